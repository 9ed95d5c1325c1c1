"""What is wrong with a data set: each problem with its place, and whether work can go on."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from counterfoil.errors import DataError
from counterfoil.printable import printable


class Severity(str, Enum):
    """`FATAL` stops training; `SKIP` drops the item and counts it; `NOTE` changes nothing."""

    FATAL = "fatal"
    SKIP = "skip"
    NOTE = "note"


@dataclass(frozen=True)
class Problem:
    """One fault: its kind (``empty-caption``), where it is, and what was found."""

    kind: str
    severity: Severity
    where: str
    message: str

    def __str__(self) -> str:
        """One line, whatever the file holds that it is about."""
        return printable(f"{self.where}: {self.message} [{self.kind}]")

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "severity": self.severity.value}


@dataclass
class ProblemLog:
    """Collects problems while a source is read."""

    problems: list[Problem] = field(default_factory=list)

    def fatal(self, kind: str, where: object, message: str) -> None:
        self.problems.append(Problem(kind, Severity.FATAL, str(where), message))

    def skip(self, kind: str, where: object, message: str) -> None:
        self.problems.append(Problem(kind, Severity.SKIP, str(where), message))

    def note(self, kind: str, where: object, message: str) -> None:
        self.problems.append(Problem(kind, Severity.NOTE, str(where), message))

    def refuse_fatal(self) -> None:
        """Raise one error that lists every fatal problem (the first twenty in full)."""
        fatal = [problem for problem in self.problems if problem.severity is Severity.FATAL]
        if not fatal:
            return
        shown = "\n  ".join(str(problem) for problem in fatal[:20])
        more = f"\n  … and {len(fatal) - 20} more" if len(fatal) > 20 else ""
        raise DataError(f"the data cannot be used:\n  {shown}{more}")


def count_kinds(problems: list[Problem]) -> dict[str, int]:
    """Number of problems of each kind, most frequent first."""
    return dict(Counter(problem.kind for problem in problems).most_common())
