"""Progress where there is no terminal: a log should say how far long work is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from counterfoil.core.progress import LINE_EVERY, Bars


class Clock:
    """A clock that goes on by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def work(clock: Clock, count: int, seconds: float) -> Iterator[int]:
    for item in range(count):
        clock.now += seconds
        yield item


def test_a_log_has_a_line_a_minute_with_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    bars = Bars(clock=clock)
    seen = list(bars.track(work(clock, 10, LINE_EVERY / 2), "reading", total=10))
    assert seen == list(range(10))
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "reading …"
    assert lines[0] == "  2 of 10 (20%), about 4 min left"
    assert lines[-1] == "  10 of 10 (100%), about 0 s left"
    assert len(lines) == 5


def test_what_was_done_before_counts_as_done_but_not_for_the_rate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    bars = Bars(clock=clock)
    list(bars.track(work(clock, 1, LINE_EVERY), "reading", total=102, done=100))
    assert "  101 of 102 (99%), about 60 s left" in capsys.readouterr().err


def test_a_log_shows_notes_and_work_of_unknown_length(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    bars = Bars(clock=clock)
    for _ in bars.track(work(clock, 1200, LINE_EVERY), "training"):
        bars.note("loss 1.5")
    assert "  1,200  loss 1.5" in capsys.readouterr().err.splitlines()


def test_short_work_has_one_line_and_quiet_work_none(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    list(Bars(clock=clock).track(work(clock, 5, 1.0), "reading", total=5))
    assert capsys.readouterr().err == "reading …\n"
    list(Bars(quiet=True, clock=clock).track(work(clock, 5, LINE_EVERY), "reading", total=5))
    assert capsys.readouterr().err == ""
