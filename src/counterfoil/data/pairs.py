"""`Pairs`, `Split` and `Problem`: the in-memory form of every data set, and its faults."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from counterfoil.core.errors import DataError, nearest
from counterfoil.core.printable import printable
from counterfoil.data.fragments import FragmentTable
from counterfoil.data.images import ImageRef

# Names under which data sets publish the split for model selection.
DEV_NAMES = ("dev", "val", "valid", "validation")


class Severity(str, Enum):
    """`FATAL` stops training, `SKIP` drops and counts the item, `NOTE` changes nothing."""

    FATAL = "fatal"
    SKIP = "skip"
    NOTE = "note"


@dataclass(frozen=True)
class Problem:
    """One fault: its kind (``empty-caption``), where it is, and a description."""

    kind: str
    severity: Severity
    where: str
    message: str

    def __str__(self) -> str:
        """One printable line, even if the file has control characters."""
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
        lines = "\n  ".join(str(problem) for problem in fatal[:20])
        more = f"\n  … and {len(fatal) - 20} more" if len(fatal) > 20 else ""
        raise DataError(f"the data cannot be used:\n  {lines}{more}")


def count_kinds(problems: list[Problem]) -> dict[str, int]:
    """Number of problems of each kind, most frequent first."""
    return dict(Counter(problem.kind for problem in problems).most_common())


@dataclass(frozen=True, repr=False)
class Split:
    """The images of one split with any number of captions each.

    ``captions[i]`` are the captions of image ``i``. ``pixels`` and ``fragments`` are both optional:
    a folder of photos has only the former, a data set of features only the latter. ``extras[i]``
    has all other data of image ``i`` in its source, so that conversion loses nothing.
    """

    name: str
    ids: Sequence[str]
    captions: Sequence[Sequence[str]]
    pixels: Sequence[ImageRef] | None = None
    fragments: FragmentTable | None = None
    extras: Sequence[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        for name in ("captions", "pixels", "fragments", "extras"):
            value = getattr(self, name)
            if value is not None and len(value) != len(self.ids):
                raise DataError(
                    f"split '{self.name}': {len(self.ids)} image ids but {len(value)} {name}"
                )

    def __repr__(self) -> str:
        parts = [name for name in ("pixels", "fragments") if getattr(self, name) is not None]
        captions = sum(map(len, self.captions))
        listed = "".join(f", {name}" for name in parts)
        return f"Split({self.name!r}, {len(self):,} images, {captions:,} captions{listed})"

    def __len__(self) -> int:
        """Number of images."""
        return len(self.ids)

    @cached_property
    def texts(self) -> list[str]:
        """All captions, image by image."""
        return [text for texts in self.captions for text in texts]

    @cached_property
    def image_of(self) -> NDArray[np.int64]:
        """Index of the image of each caption of `texts`."""
        counts = [len(texts) for texts in self.captions]
        return np.repeat(np.arange(len(counts), dtype=np.int64), counts)

    @cached_property
    def digest(self) -> str:
        """A hash of all ids and captions, in their order."""
        digest = hashlib.sha256()
        for image, texts in zip(self.ids, self.captions, strict=True):
            for part in (image, *texts):
                data = part.encode("utf-8", "surrogatepass")
                digest.update(len(data).to_bytes(8, "little") + data)
            digest.update(b"\n")
        return digest.hexdigest()

    def require_fragments(self) -> FragmentTable:
        """The fragments of the images; `DataError` if there are none."""
        if self.fragments is None:
            raise DataError(f"split '{self.name}' has no fragments; extract features first")
        return self.fragments

    def select(self, images: Sequence[int], name: str | None = None) -> Split:
        """The split of these images (by index), in this order."""
        return Split(
            name=name or self.name,
            ids=[self.ids[i] for i in images],
            captions=[self.captions[i] for i in images],
            pixels=[self.pixels[i] for i in images] if self.pixels is not None else None,
            fragments=self.fragments.select(images) if self.fragments is not None else None,
            extras=[self.extras[i] for i in images] if self.extras is not None else None,
        )


@dataclass(frozen=True, repr=False)
class Pairs:
    """A data set: its splits by name, its problems and its origin.

    Splits keep the names of their source, but any name of `DEV_NAMES` selects the dev split.
    """

    name: str
    splits: dict[str, Split]
    problems: list[Problem] = field(default_factory=list)
    origin: dict[str, Any] | None = None

    def __repr__(self) -> str:
        splits = "".join(f", {split.name}={len(split):,}" for split in self)
        problems = f", {len(self.problems):,} problems" if self.problems else ""
        return f"Pairs({self.name!r}{splits}{problems})"

    def __getitem__(self, split: str) -> Split:
        name = self._find(split)
        if name is None:
            raise DataError(
                f"data set '{self.name}' has no split '{split}'{nearest(split, self.splits)} "
                f"(it has: {', '.join(self.splits)})"
            )
        return self.splits[name]

    def __contains__(self, split: object) -> bool:
        return isinstance(split, str) and self._find(split) is not None

    def _find(self, split: str) -> str | None:
        if split in self.splits:
            return split
        others = DEV_NAMES if split in DEV_NAMES else ()
        return next((name for name in others if name in self.splits), None)

    def __iter__(self) -> Iterator[Split]:
        return iter(self.splits.values())

    @property
    def train(self) -> Split:
        return self["train"]

    @property
    def dev(self) -> Split:
        return self["dev"]

    @property
    def test(self) -> Split:
        return self["test"]
