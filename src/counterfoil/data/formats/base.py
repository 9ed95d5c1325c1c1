"""What data sources and conversion targets are, and the tables they are looked up in.

All sources share how items look before they are checked, and how splits and columns are named.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

from counterfoil.core.errors import nearest
from counterfoil.core.registry import Registry
from counterfoil.data.fragments import FragmentTable
from counterfoil.data.images import ImageRef
from counterfoil.data.pairs import Pairs, ProblemLog, Split


@dataclass
class Item:
    """One image of a split as its source tells it.

    ``row`` is the image's row in the split's fragment table. ``caption_extras`` are lists that go
    with the captions one by one, and lose an entry when a caption is dropped.
    """

    id: str
    split: str
    captions: list[str]
    file: Path
    line: int | None = None
    caption_lines: Sequence[int] | None = None
    image: ImageRef | None = None
    row: int | None = None
    extras: dict[str, Any] = field(default_factory=dict)
    caption_extras: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def where(self) -> str:
        place = f"{self.file}:{self.line}" if self.line is not None else str(self.file)
        return f"{place}: image '{self.id}'"

    def where_caption(self, number: int) -> str:
        if self.caption_lines is not None:
            return f"{self.file}:{self.caption_lines[number]}"
        return f"{self.where}, caption {number + 1}"


@dataclass
class Draft:
    """A data set as read: its items and, by split, the fragments their rows refer to."""

    name: str
    items: list[Item] = field(default_factory=list)
    tables: dict[str, FragmentTable] = field(default_factory=dict)


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


# Splits: their order, and the split of an image whose source does not say.


ORDER = ("train", "restval", "dev", "val", "valid", "validation", "test", "testall")
HASHED = "hashed-split"
"""Kind of the note that images without a stated split were split by a hash."""
_IN_NAME = re.compile(
    r"(?<![a-z])(train|dev|val|valid|validation|testall|test)(?:2014|2015|2017)?(?![a-z])", re.I
)


def in_order(names: Iterable[str]) -> list[str]:
    """Split names as people list them: train, dev, test, then the others as they came."""
    unique = list(dict.fromkeys(names))
    known = [name for name in ORDER if name in unique]
    return known + [name for name in unique if name not in ORDER]


def split_in_name(file_name: str) -> str | None:
    """The split that a file's name speaks of.

    >>> split_in_name("flickr8k-train-0.tar"), split_in_name("photos.tar")
    ('train', None)
    """
    found = _IN_NAME.search(file_name)
    return found.group(1).lower() if found else None


_ALIASES = {"training": "train", "testing": "test", "development": "dev"}


def split_called(name: str) -> str:
    """A split name as people write it in a table, as the one that commands know.

    >>> split_called("Train "), split_called("testing"), split_called("Fold A")
    ('train', 'test', 'Fold A')
    """
    folded = name.strip().lower()
    folded = _ALIASES.get(folded, folded)
    return folded if folded in ORDER else name.strip()


def hash_of(image_id: str, purpose: str) -> float:
    """A number from 0 to 1 of an id: the same on every machine, for ever."""
    text = f"{purpose}\n{image_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(sha256(text).digest()[:8], "big") / 2**64


def least_images(images: int) -> int:
    """The least images of a part of a set: ten, but at most a fifth of it; at least one."""
    return max(1, min(10, images // 5))


def hashed_split(image_id: str) -> str:
    """80 % train, 10 % dev, 10 % test by a hash of the id: the same on every machine, for ever."""
    share = _share(image_id)
    return "train" if share < 80 else "dev" if share < 90 else "test"


def hashed_splits(ids: Sequence[str]) -> list[str]:
    """`hashed_split` of all images of a set that states no split.

    Small sets have at least `least_images` in dev and in test: those with the next hashes. One or
    two images are all for training.
    """
    if len(ids) < 3:
        return ["train"] * len(ids)
    splits = [hashed_split(image) for image in ids]
    least = least_images(len(ids))
    counts = {name: max(least, splits.count(name)) for name in ("test", "dev")}
    if 2 * sum(counts.values()) > len(ids):  # most of a handful, by chance
        counts = dict.fromkeys(counts, least)
    order = sorted(range(len(ids)), key=lambda index: (-_share(ids[index]), ids[index]))
    for place, index in enumerate(order):
        in_dev = place < counts["test"] + counts["dev"]
        splits[index] = "test" if place < counts["test"] else "dev" if in_dev else "train"
    return splits


def fill_splits(
    images: Sequence[tuple[str, str | None]], usable: Collection[int] | None = None
) -> list[str]:
    """The split of each (id, stated split), by a hash of the id if none is stated.

    ``usable`` are the places of images that can be used (None: all). If no split is stated, these
    are divided among themselves: otherwise those that are missing could be all of the training.
    """
    if any(stated for _, stated in images):
        return [stated or hashed_split(image) for image, stated in images]
    places = sorted(usable or range(len(images)))
    splits = [hashed_split(image) for image, _ in images]
    for place, split in zip(
        places, hashed_splits([images[place][0] for place in places]), strict=True
    ):
        splits[place] = split
    return splits


def _share(image_id: str) -> int:
    digest = sha256(image_id.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % 100


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


# Which column of a table is the image, the caption, the id, the split.


ALIASES = {
    "captions": (
        "captions", "caption", "text", "sentence", "sentences", "description", "descriptions",
        "comment", "raw",
    ),
    "image": (
        "image", "file", "filename", "file_name", "image_path", "image_name", "image_file", "path",
        "file_path", "filepath", "img", "img_path", "photo",
    ),
    "id": ("id", "image_id"),
    "split": ("split", "partition", "subset"),
}  # fmt: skip
_NUMBERED = re.compile(r"(caption|text|sentence|description|comment)s?[ _-]?\d+")
LABEL = "original_name"
RESERVED = frozenset(name for names in ALIASES.values() for name in names) | {LABEL}


@dataclass(frozen=True)
class Columns:
    """Names of the columns a table has for each role; the others are extras.

    There are several of captions if they are numbered: ``caption_1``, ``caption_2`` …
    """

    captions: tuple[str, ...]
    image: str | None
    id: str | None
    split: str | None
    label: str | None
    extras: tuple[str, ...]


def find_columns(names: Iterable[str], chosen: dict[str, str | None]) -> Columns | str:
    """The roles of a table's columns, or what is missing.

    >>> find_columns(["Image", "caption", "width"], {}).extras
    ('width',)
    """
    names = tuple(names)
    folded = {name.strip().lower(): name for name in reversed(names)}
    roles: dict[str, str | None] = {}
    for role, aliases in ALIASES.items():
        choice = chosen.get(role)
        if choice is not None:
            if choice not in names:
                return f"no column '{choice}'{nearest(choice, names)} {_found(names)}"
            roles[role] = choice
        else:
            roles[role] = next((folded[alias] for alias in aliases if alias in folded), None)
    one = roles.pop("captions")
    numbered = tuple(name for name in names if _NUMBERED.fullmatch(name.strip().lower()))
    captions = (one,) if one is not None else numbered
    if not captions:
        return f"no column of captions {_expected('captions', 'caption')} {_found(names)}"
    if roles["image"] is None and roles["id"] is None:
        return f"no column of images {_expected('image', 'image')} {_found(names)}"
    label = LABEL if LABEL in names else None
    used = {*captions, *roles.values(), label}
    return Columns(
        captions=captions,
        image=roles["image"],
        id=roles["id"],
        split=roles["split"],
        label=label,
        extras=tuple(name for name in names if name not in used),
    )


def _expected(role: str, option: str) -> str:
    return (
        f"({', '.join(ALIASES[role])}): the first line names the columns; call one of them so, or "
        f"name it with the option {option}_column=NAME"
    )


def _found(names: tuple[str, ...]) -> str:
    return f"(found: {', '.join(names) or 'none'})"
