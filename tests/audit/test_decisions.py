"""The log of decisions: durable, shared by writers, and about captions, not about numbers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from pydantic import ValidationError

from counterfoil.audit.decisions import LOG, CaptionKey, Decision, DecisionLog, Review, key_of
from counterfoil.core.errors import DataError
from tests.audit.test_report import finding

FINDINGS = [finding(f"a red dog {n}", n) for n in range(5)]
KEYS = [key_of(one) for one in FINDINGS]


def decide(log: DecisionLog, number: int, action: str, correction=None, reviewer="ann") -> None:
    log.append(Decision.on(KEYS[number], action, reviewer, correction))


def outcomes(folder: Path) -> list:
    review = Review.of(DecisionLog(folder), FINDINGS)
    finals = [review.of_finding(one).final for one in FINDINGS]
    return [None if final is None else final.outcome for final in finals]


def test_decisions_survive_a_restart_and_the_last_one_counts(tmp_path) -> None:
    log = DecisionLog(tmp_path)
    decide(log, 0, "keep")
    decide(log, 1, "fix", "a blue dog")
    decide(log, 2, "discard")
    decide(log, 0, "discard")
    fixed, gone = ("fix", "a blue dog"), ("discard", None)
    assert outcomes(tmp_path) == [gone, fixed, gone, None, None]
    counts = Review.of(DecisionLog(tmp_path), FINDINGS).counts()
    assert counts["findings"] == 5
    assert (counts["decided"], counts["open"]) == (3, 2)
    assert (counts["kept"], counts["fixed"], counts["discarded"]) == (0, 1, 2)


def test_undo_brings_back_what_stood_before(tmp_path) -> None:
    log = DecisionLog(tmp_path)
    decide(log, 0, "fix", "a cat")
    decide(log, 0, "discard")
    decide(log, 0, "undo")
    assert outcomes(tmp_path)[0] == ("fix", "a cat")
    decide(log, 0, "undo")
    decide(log, 0, "undo")  # there is nothing left to undo
    assert outcomes(tmp_path)[0] is None


@pytest.mark.parametrize("lost", range(1, 60, 7))
def test_a_kill_in_mid_write_loses_only_the_last_decision(tmp_path, lost) -> None:
    log = DecisionLog(tmp_path)
    for number in range(3):
        decide(log, number, "keep")
    path = tmp_path / LOG
    path.write_bytes(path.read_bytes()[:-lost])
    again = DecisionLog(tmp_path)
    whole = lost == 1  # only the line's end is gone: the decision is complete
    assert again.damaged == (not whole)
    assert len(again.standings()) == 2 + whole
    decide(again, 4, "discard")
    assert len(DecisionLog(tmp_path).standings()) == 3 + whole
    assert outcomes(tmp_path)[4] == ("discard", None)


def test_a_line_that_is_still_being_written_is_read_when_it_is_complete(tmp_path) -> None:
    log = DecisionLog(tmp_path)
    decide(log, 0, "keep")
    line = (tmp_path / LOG).read_bytes()
    reader = DecisionLog(tmp_path)
    second = Decision.on(KEYS[1], "discard", "bob").to_json(indent=None).encode() + b"\n"
    for size in (10, len(second)):
        (tmp_path / LOG).write_bytes(line + second[:size])
        os.utime(tmp_path / LOG)
        reader.refresh()
    assert reader.damaged == 0
    assert set(reader.standings()) == set(KEYS[:2])


def test_garbage_in_the_file_is_skipped_and_counted(tmp_path) -> None:
    log = DecisionLog(tmp_path)
    decide(log, 0, "keep")
    with (tmp_path / LOG).open("ab") as file:
        file.write(b"\xff\xfe\n[]\nnull\n{}\n\n   \n" + b'{"split": 3}\n')
    decide(log, 1, "keep")
    again = DecisionLog(tmp_path)
    assert again.damaged == 5
    assert set(again.standings()) == set(KEYS[:2])


def test_several_writers_do_not_lose_each_others_decisions(tmp_path) -> None:
    def write(name: str) -> None:
        log = DecisionLog(tmp_path)
        for number in range(20):
            key = CaptionKey("test", f"{name}-{number}", 0, "a dog")
            log.append(Decision.on(key, "keep", name))

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log = DecisionLog(tmp_path)
    assert log.damaged == 0
    assert len(log.standings()) == 60


WRITER = """
import sys
from pathlib import Path
from counterfoil.audit.decisions import CaptionKey, Decision, DecisionLog
log = DecisionLog(Path(sys.argv[1]))
for number in range(100000):
    key = CaptionKey("test", f"{sys.argv[2]}-{number}", 0, "a dog " * 40)
    log.append(Decision.on(key, "keep", sys.argv[2]))
    print(number, flush=True)
"""


@pytest.mark.slow
def test_a_killed_process_leaves_every_decision_that_it_had_stored(tmp_path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path), "w"], stdout=subprocess.PIPE, text=True
    )
    stored = 0
    for line in writer.stdout:
        stored = int(line) + 1
        decide(DecisionLog(tmp_path), stored % 5, "keep")
        if stored == 15:
            writer.send_signal(signal.SIGKILL)
            break
    stored += len(writer.stdout.readlines())
    writer.wait()
    writer.stdout.close()
    log = DecisionLog(tmp_path)
    theirs = [key for key in log.standings() if key.image.startswith("w-")]
    assert len(theirs) in (stored, stored + 1)
    assert set(KEYS) <= set(log.standings())
    decide(log, 0, "discard")
    assert outcomes(tmp_path)[0] == ("discard", None)


def test_a_reader_sees_the_decisions_of_others_after_a_refresh(tmp_path) -> None:
    reader, writer = DecisionLog(tmp_path), DecisionLog(tmp_path)
    decide(writer, 0, "keep")
    assert not reader.standings()
    reader.refresh()
    assert set(reader.standings()) == {KEYS[0]}
    (tmp_path / LOG).unlink()
    reader.refresh()
    assert not reader.standings()


def test_a_decision_is_not_applied_to_another_caption(tmp_path) -> None:
    decide(DecisionLog(tmp_path), 0, "discard")
    changed = [finding("another caption", 0), *FINDINGS[1:]]
    review = Review.of(DecisionLog(tmp_path), changed)
    assert all(review.of_finding(one).final is None for one in changed)
    assert review.counts()["unknown"] == 1
    assert review.counts()["open"] == 5


def test_a_decision_follows_its_caption_to_another_number_or_split(tmp_path) -> None:
    decide(DecisionLog(tmp_path), 0, "discard")
    moved = finding(FINDINGS[0].text, 0, caption=3, split="dev")
    review = Review.of(DecisionLog(tmp_path), [moved])
    assert review.of_finding(moved).final.action == "discard"
    assert review.counts()["unknown"] == 0


def test_identical_captions_of_an_image_are_decided_one_by_one(tmp_path) -> None:
    same = [finding("a dog", 0, caption=n) for n in (0, 2)]
    log = DecisionLog(tmp_path)
    log.append(Decision.on(key_of(same[1]), "discard", "ann"))
    review = Review.of(log, same)
    assert review.of_finding(same[0]).final is None
    assert review.of_finding(same[1]).final.action == "discard"


@pytest.mark.parametrize(
    "values",
    [
        {"action": "fix", "correction": None},
        {"action": "keep", "correction": "a cat"},
        {"action": "fix", "correction": "two\nlines"},
        {"action": "fix", "correction": "a\ttab"},
        {"action": "fix", "correction": "  "},
        {"action": "fix", "correction": "x" * 5000},
        {"action": "keep", "correction": None, "reviewer": "a\x1bb"},
        {"action": "keep", "correction": None, "reviewer": ""},
        {"action": "burn", "correction": None},
    ],
)
def test_a_decision_that_cannot_be_written_into_data_is_refused(values) -> None:
    values = {"reviewer": "ann", **values}
    with pytest.raises(ValidationError):
        Decision.on(KEYS[0], **values)


def test_a_place_that_is_no_file_is_refused_without_waiting(tmp_path) -> None:
    os.mkfifo(tmp_path / LOG)
    with pytest.raises(DataError, match="cannot be read"):
        DecisionLog(tmp_path)
