"""What a data source is, and the two tables they are looked up in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from counterfoil.data.pairs import Pairs
from counterfoil.data.problems import ProblemLog
from counterfoil.data.sources.items import Draft
from counterfoil.registry import Registry


class Source(ABC):
    """One layout of images and captions on disk.

    The options of a source are the keyword-only arguments of its constructor. Reading never raises
    over what it finds: every fault goes into the log, and everything else is still read.
    """

    looks_for: ClassVar[str]
    """What makes a path match, in words."""

    examples: ClassVar[tuple[str, ...]]
    """Typical file names, to name the nearest format when nothing matches."""

    rank: ClassVar[int] = 0
    """Formats of a lower rank are preferred where several match."""

    @classmethod
    @abstractmethod
    def matches(cls, path: Path) -> bool:
        """Whether an existing path looks like this layout; a glance, not a check."""

    @abstractmethod
    def read(self, path: Path, log: ProblemLog) -> Draft:
        """Everything that can be read, faults included."""


sources: Registry[type[Source]] = Registry("data source")
"""Layouts of files by name."""

named_sources: Registry[Callable[..., Pairs]] = Registry("named data set")
"""Data sets that are not files: called as ``make(cache_dir, progress=progress, **options)``.

Options are keyword-only arguments, as everywhere.
"""
