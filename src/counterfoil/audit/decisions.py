"""Decisions of reviewers on the findings of an audit: an append-only log beside the report.

A line of ``decisions.jsonl`` is one decision. The last line about a caption counts, unless it was
merged from another reviewer's log: such a line replaces only earlier decisions by the same
reviewer. If it differs from the others, the caption is a conflict until somebody decides again.

A line is written in one call, under a lock, and synced. A kill leaves at most one incomplete line,
which readers skip and count, and the next writer starts a new line.
"""

from __future__ import annotations

import os
import stat
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from hashlib import sha256
from itertools import takewhile
from json import dumps
from pathlib import Path
from threading import RLock
from typing import Literal, NamedTuple

from pydantic import AwareDatetime, Field, field_validator, model_validator
from typing_extensions import Self

from counterfoil.audit.findings import Finding, read_findings
from counterfoil.core.errors import DataError
from counterfoil.core.printable import is_encodable
from counterfoil.core.storage.atomic import sync_folder
from counterfoil.core.storage.locks import locked_in_turn
from counterfoil.core.storage.reading import LINES_BYTES, open_regular, read_lines
from counterfoil.evaluation.report import Report

LOG = "decisions.jsonl"
REVIEWER_CHARS = 100
CORRECTION_CHARS = 4000
ANONYMOUS = "anonymous"

Action = Literal["keep", "fix", "discard", "undo"]


class CaptionKey(NamedTuple):
    """The caption that a decision is about; ``caption`` only separates identical captions."""

    split: str
    image: str
    caption: int
    text: str

    @property
    def digest(self) -> str:
        """A short name for requests, which are looked up by it."""
        return sha256(dumps(self).encode()).hexdigest()[:32]

    @property
    def content(self) -> tuple[str, str]:
        return self.image, self.text


def key_of(finding: Finding) -> CaptionKey:
    return CaptionKey(finding.split, finding.image, finding.caption, finding.text)


def one_line(text: str) -> str:
    """A text without line breaks and control characters; `ValueError` if it has any."""
    if not text.strip():
        raise ValueError("is empty")
    if not is_encodable(text):
        raise ValueError("contains a lone surrogate, which is not a character")
    if any(unicodedata.category(letter) in ("Cc", "Zl", "Zp") for letter in text):
        raise ValueError("contains a line break or another control character")
    return text


class Decision(Report):
    """What a reviewer decided about a caption.

    ``undo`` takes back the reviewer's last decision on it that was made here. ``merged``: it was
    made without knowledge of the other decisions in this log. A merged ``undo`` has the time of the
    decision that it takes back.
    """

    split: str
    image: str
    caption: int = Field(ge=0)
    text: str
    action: Action
    correction: str | None = Field(None, max_length=CORRECTION_CHARS)
    reviewer: str = Field(ANONYMOUS, max_length=REVIEWER_CHARS)
    time: AwareDatetime
    merged: bool = False

    @field_validator("reviewer", "correction")
    @classmethod
    def _check_line(cls, value: str | None) -> str | None:
        return None if value is None else one_line(value)

    @model_validator(mode="after")
    def _check_correction(self) -> Self:
        if (self.action == "fix") != (self.correction is not None):
            raise ValueError("a correction belongs to the action fix, and only to it")
        return self

    @classmethod
    def on(
        cls, key: CaptionKey, action: Action, reviewer: str, correction: str | None = None
    ) -> Decision:
        """A decision made now."""
        return cls(
            **key._asdict(),
            action=action,
            correction=correction,
            reviewer=reviewer,
            time=datetime.now(timezone.utc),
        )

    @property
    def key(self) -> CaptionKey:
        return CaptionKey(self.split, self.image, self.caption, self.text)

    @property
    def outcome(self) -> tuple[str, str | None]:
        """What becomes of the caption; a correction without a change keeps it."""
        if self.correction == self.text:
            return "keep", None
        return self.action, self.correction

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for two copies of one decision, which may be in several logs."""
        return (*self.key.content, self.action, self.correction, self.reviewer, self.time)

    def is_by_reviewer_of(self, other: Decision) -> bool:
        """Whether both have the same named reviewer; the anonymous may be several people."""
        return self.reviewer == other.reviewer != ANONYMOUS


@dataclass(frozen=True)
class Standing:
    """The decision on a caption, and merged decisions that differ from it.

    ``independent`` is the last decision that was made here before any other was merged.
    """

    decision: Decision | None = None
    rivals: tuple[Decision, ...] = ()
    independent: Decision | None = None

    @classmethod
    def of(cls, decisions: Sequence[Decision]) -> Standing:
        """What follows from the decisions on a caption, in the order of the log."""
        votes: list[Decision] = []
        latest: dict[str, Decision] = {}  # by reviewer
        for new in decisions:
            earlier = latest.get(new.reviewer)
            if earlier is None or not new.is_by_reviewer_of(earlier):
                votes = [*votes, new] if new.merged else [new]
            elif not new.merged or new.time >= earlier.time:
                votes = [one for one in votes if one is not earlier] if new.merged else []
                votes.append(new)
            else:
                continue  # from an older copy of that reviewer's log
            latest[new.reviewer] = new
        if not votes:
            return cls()
        own = list(takewhile(lambda one: not one.merged, decisions))
        rivals = tuple(one for one in votes if one.outcome != votes[0].outcome)
        return cls(votes[0], rivals, own[-1] if own else None)

    @property
    def final(self) -> Decision | None:
        """The decision that counts; None if the finding is open or a conflict."""
        return None if self.rivals else self.decision

    @property
    def votes(self) -> list[Decision]:
        return [one for one in (self.decision, *self.rivals) if one is not None]


class DecisionLog:
    """The decisions of a file. Other processes may write to it; `refresh` reads their lines."""

    def __init__(self, path: Path) -> None:
        self.path = path / LOG if path.is_dir() else path
        self.damaged = 0
        """Lines that are no decisions, such as one cut off by a kill."""
        self.identities: set[tuple[object, ...]] = set()
        self._withdrawn: list[Decision] = []
        self.version = 0
        self._history: dict[CaptionKey, list[Decision]] = defaultdict(list)
        self._standings: dict[CaptionKey, Standing] = {}
        self._offset, self._file, self._tail_bytes = 0, 0, 0
        self._lock = RLock()
        self.refresh()

    def standings(self) -> dict[CaptionKey, Standing]:
        """The captions with a decision."""
        with self._lock:
            for key, history in self._history.items():
                if history and key not in self._standings:
                    self._standings[key] = Standing.of(history)
            return {key: self._standings[key] for key, history in self._history.items() if history}

    def active(self) -> dict[tuple[object, ...], CaptionKey]:
        """The captions of all decisions that were not taken back, by the decisions' identities."""
        with self._lock:
            histories = self._history.items()
            return {one.identity: key for key, history in histories for one in history}

    def withdrawn(self) -> list[Decision]:
        """The decisions that were taken back."""
        active = self.active()
        with self._lock:
            return [one for one in self._withdrawn if one.identity not in active]

    def can_undo(self, key: CaptionKey, reviewer: str) -> bool:
        with self._lock:
            return _last_own(self._history.get(key, ()), reviewer) is not None

    def refresh(self) -> None:
        """Read the lines that were added since the last call."""
        with self._lock:
            try:
                self._read()
            except FileNotFoundError:
                self._restart()
            except OSError as error:
                raise DataError(f"{self.path}: cannot be read ({error.strerror})") from None

    def _restart(self) -> None:
        if self._offset or self.damaged:
            self.version += 1
        self._history.clear()
        self._standings.clear()
        self.identities.clear()
        self._withdrawn.clear()
        self._offset, self._tail_bytes, self.damaged = 0, 0, 0

    def _read(self) -> None:
        with open_regular(self.path, LINES_BYTES) as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._file or status.st_size < self._offset:
                self._restart()  # the file was replaced
                self._file = status.st_ino
            if status.st_size == self._offset + self._tail_bytes:
                return
            file.seek(self._offset)
            self.damaged -= self._tail_bytes > 0
            self._tail_bytes = 0
            for line in read_lines(file, self.path):
                if not self._add(line) and not line.endswith(b"\n"):
                    self._tail_bytes = len(line)  # cut off, or still being written: read it again
                    break
                self._offset += len(line)
            self.version += 1

    def _add(self, line: bytes) -> bool:
        """Apply a line; False if it is no decision."""
        if not line.strip():
            return True
        try:
            decision = Decision.from_json(line.decode("utf-8"))
        except (DataError, UnicodeDecodeError):
            self.damaged += 1
            return False
        history = self._history[decision.key]
        self.identities.add(decision.identity)
        self._standings.pop(decision.key, None)
        if decision.action != "undo":
            history.append(decision)
        else:
            self._undo(history, decision)
        return True

    def _undo(self, history: list[Decision], undo: Decision) -> None:
        if undo.merged:
            by, time = undo.reviewer, undo.time
            indices = [n for n, one in enumerate(history) if (one.reviewer, one.time) == (by, time)]
        else:
            last = _last_own(history, undo.reviewer)
            indices = [] if last is None else [last]
        for index in reversed(indices):
            self._withdrawn.append(history.pop(index))

    def append(self, *decisions: Decision) -> None:
        """Add decisions in one write, and sync it to disk."""
        data = b"".join(one.to_json(indent=None).encode() + b"\n" for one in decisions)
        lock = self.path.with_name(f".{self.path.name}.lock")
        with self._lock, locked_in_turn(lock, "writing decisions"):
            is_new = not self.path.exists()
            _append(self.path, data)
            if is_new:
                sync_folder(self.path.parent)
            self.refresh()


def _last_own(history: Sequence[Decision], reviewer: str) -> int | None:
    """Index of the reviewer's last decision that was made in this log."""
    indices = range(len(history) - 1, -1, -1)
    return next(
        (n for n in indices if history[n].reviewer == reviewer and not history[n].merged), None
    )


def _append(path: Path, data: bytes) -> None:
    # O_NONBLOCK: the path may be a FIFO.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path}: not a regular file; decisions cannot be stored there")
        if status.st_size:
            os.lseek(descriptor, -1, os.SEEK_END)
            if os.read(descriptor, 1) != b"\n":
                data = b"\n" + data  # a kill cut the last line off
        while data:
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Review:
    """The decisions on the findings of an audit.

    ``listed`` are the suspicious captions, which are to be decided. ``unknown`` are decisions on
    captions that are not among the findings, as after an audit of changed data. They apply to no
    other caption.
    """

    standings: Mapping[CaptionKey, Standing]
    unknown: list[Standing]
    listed: frozenset[CaptionKey]
    damaged: int

    @classmethod
    def of(cls, log: DecisionLog, findings: Sequence[Finding]) -> Review:
        """A decision applies to the finding with the same image and text.

        The caption's number and the split only decide between identical captions, so that a
        decision survives if another caption of the image is removed.
        """
        keys = [key_of(finding) for finding in findings]
        known, contents = set(keys), {key.content for key in keys}
        standings: dict[CaptionKey, Standing] = {}
        elsewhere: list[tuple[CaptionKey, Standing]] = []
        for key, standing in log.standings().items():
            if key in known:
                standings[key] = standing
            else:
                elsewhere.append((key, standing))
        free: dict[tuple[str, str], list[CaptionKey]] = defaultdict(list)
        for key in keys:
            if key not in standings:
                free[key.content].append(key)
        for key, standing in elsewhere:
            if candidates := free.get(key.content):
                standings[candidates.pop(0)] = standing
        unknown = [standing for key, standing in elsewhere if key.content not in contents]
        listed = frozenset(key_of(one) for one in findings if one.kind == "mismatch")
        return cls(standings, unknown, listed, log.damaged)

    def of_finding(self, finding: Finding) -> Standing:
        return self.standings.get(key_of(finding), Standing())

    def is_decided(self, finding: Finding) -> bool:
        return self.of_finding(finding).final is not None

    def counts(self) -> dict[str, int]:
        """Numbers of findings: all, open, decided (by outcome), in conflict; unknown decisions.

        Near-duplicates are not errors, so they only count once they are decided.
        """
        finals = [final for one in self.standings.values() if (final := one.final) is not None]
        outcomes = Counter(final.outcome[0] for final in finals)
        findings = len(self.listed | self.standings.keys())
        return {
            "findings": findings,
            "open": findings - len(finals),
            "decided": len(finals),
            "kept": outcomes["keep"],
            "fixed": outcomes["fix"],
            "discarded": outcomes["discard"],
            "conflicts": sum(bool(one.rivals) for one in self.standings.values()),
            "unknown": len(self.unknown),
            "damaged": self.damaged,
        }


def review_of(folder: Path) -> Review:
    """The decisions on the findings of a report folder."""
    return Review.of(DecisionLog(folder), read_findings(folder))
