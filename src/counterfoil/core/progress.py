"""Progress reports of long work: the `Progress` protocol, and bars for terminals and logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from counterfoil.core.errors import ArgumentError
from counterfoil.core.printable import printable

T = TypeVar("T")

LINE_EVERY = 60.0
"""Seconds between two lines about long work, if there is no terminal for a bar."""


class Progress(Protocol):
    """What long work reports to; the command line and the web app implement it."""

    def track(
        self, items: Iterable[T], description: str, total: int | None = None, done: int = 0
    ) -> Iterator[T]:
        """Yield ``items``, showing rate and remaining time; ``done`` items were done before."""
        ...

    def note(self, text: str) -> None:
        """Show ``text`` beside the current bar (a loss, a count of skipped items)."""
        ...

    def say(self, text: str) -> None:
        """Print one line above the bar."""
        ...


class Silent:
    """The default: no output."""

    def track(
        self, items: Iterable[T], description: str, total: int | None = None, done: int = 0
    ) -> Iterator[T]:
        yield from items

    def note(self, text: str) -> None:
        return None

    def say(self, text: str) -> None:
        return None


class Bars:
    """Progress bars with rate and remaining time on a terminal; elsewhere one line per minute."""

    def __init__(self, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console

        self.console = Console(stderr=True)
        self.quiet = quiet
        self._clock = clock
        self._note = ""
        self._bar: Any = None
        self._task: Any = None

    def track(
        self, items: Iterable[T], description: str, total: int | None = None, done: int = 0
    ) -> Iterator[T]:
        if self.quiet or (self.console.is_terminal and self._bar is not None):
            yield from items  # a bar inside a bar would only flicker
            return
        if not self.console.is_terminal:
            yield from self._lines(items, description, total, done)
            return
        from rich.markup import escape

        with self._new_bar() as self._bar:
            try:
                title = escape(printable(description))
                self._task = self._bar.add_task(title, total=total, completed=done, note="")
                for item in items:
                    yield item
                    self._bar.advance(self._task)
            finally:
                self._bar = None

    def _new_bar(self) -> Any:
        from rich import progress as rich

        return rich.Progress(
            rich.TextColumn("{task.description}"),
            rich.BarColumn(),
            rich.TaskProgressColumn(),
            rich.MofNCompleteColumn(),
            rich.TimeElapsedColumn(),
            rich.TimeRemainingColumn(),
            rich.TextColumn("{task.fields[note]}"),
            console=self.console,
            transient=True,
        )

    def _lines(
        self, items: Iterable[T], description: str, total: int | None, done: int
    ) -> Iterator[T]:
        """For logs: a line at the start, then one per minute with count and remaining time."""
        self.say(f"{description} …")
        self._note = ""
        began = last = self._clock()
        for count, item in enumerate(items, 1):
            yield item
            now = self._clock()
            if now - last >= LINE_EVERY:
                last = now
                rate = count / (now - began)
                line = [_count_and_time_left(done + count, total, rate), self._note]
                self.say("  ".join(filter(None, line)))

    def note(self, text: str) -> None:
        from rich.markup import escape

        self._note = text
        if self._bar is not None:
            self._bar.update(self._task, note=escape(printable(text)))

    def say(self, text: str) -> None:
        if not self.quiet:
            # in a log, a line is never wrapped
            self.console.print(
                printable(text, keep="\n"),
                highlight=False,
                markup=False,
                soft_wrap=not self.console.is_terminal,
            )


def _count_and_time_left(count: int, total: int | None, rate: float) -> str:
    if not total:
        return f"  {count:,}"
    left = max(0, total - count) / rate
    time_left = f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
    return f"  {count:,} of {total:,} ({count / total:.0%}), about {time_left} left"


def default_progress() -> Bars | Silent:
    """Bars on a terminal or in a notebook; else nothing."""
    from rich.console import Console

    console = Console(stderr=True)
    return Bars() if console.is_terminal or console.is_jupyter else Silent()


def as_progress(given: Progress | bool | None) -> Progress:
    """The given progress; True: the default bars; False or None: no output."""
    if given is True:
        return default_progress()
    if given is not None and given is not False and not hasattr(given, "track"):
        raise ArgumentError(
            f"progress: expected True, False or an object with track, note and say, got {given!r}"
        )
    return given or Silent()
