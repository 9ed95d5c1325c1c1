"""What a conversion target is, and the table they are looked up in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from counterfoil.data.pairs import Split
from counterfoil.data.problems import ProblemLog
from counterfoil.registry import Registry


class Writer(ABC):
    """Writes splits into a folder, one image at a time.

    Faults of single images (a file that is gone) are logged; the item is written without it.
    """

    def __init__(self, folder: Path, log: ProblemLog) -> None:
        self.folder = folder
        self.log = log

    @abstractmethod
    def write_split(self, split: Split, images: Iterable[int]) -> None:
        """Write a split; ``images`` are its indices in order, seen through a progress bar."""

    def close(self) -> None:  # noqa: B027 - most writers have nothing to finish
        """Finish what spans splits."""


def extras_of(split: Split, image: int) -> dict[str, Any]:
    return split.extras[image] if split.extras is not None else {}


writers: Registry[type[Writer]] = Registry("conversion target")
