"""Base classes and registries of data sources and writers; names of splits and table columns."""

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
    """One image with its captions, as read from a source and not yet checked.

    ``row`` is the image's row in the split's fragment table. ``caption_extras`` are lists with one
    entry per caption. ``caption_paths`` are the indices that lead to each caption in a JSON file.
    ``caption_files`` are the files of the captions, if they are not all in ``file``.
    ``name`` is the image's file name in ``file``, if there is no ``line`` to name it by.
    ``split_is_stated`` is False if a hash of the id chose the split.
    """

    id: str
    split: str
    captions: list[str]
    file: Path
    line: int | None = None
    caption_lines: Sequence[int] | None = None
    caption_paths: list[tuple[int, ...]] = field(default_factory=list)
    caption_files: Sequence[Path] = ()
    image: ImageRef | None = None
    row: int | None = None
    extras: dict[str, Any] = field(default_factory=dict)
    caption_extras: dict[str, list[Any]] = field(default_factory=dict)
    name: str = ""
    split_is_stated: bool = True

    @property
    def where(self) -> str:
        line = f":{self.line}" if self.line is not None else ""
        return f"{self.file}{line}: image '{self.id}'"

    def where_caption(self, number: int) -> str:
        if self.caption_lines is not None:
            return f"{self.caption_file(number)}:{self.caption_lines[number]}"
        return f"{self.where}, caption {number + 1}"

    def caption_file(self, number: int) -> Path:
        return self.caption_files[number] if self.caption_files else self.file


@dataclass
class Draft:
    """A data set as read: its items and the fragment table of each split."""

    name: str
    items: list[Item] = field(default_factory=list)
    tables: dict[str, FragmentTable] = field(default_factory=dict)


class Source(ABC):
    """One layout of images and captions on disk.

    The options of a source are the keyword-only arguments of its constructor. Reading never raises
    because of faults in the data: it logs them and reads on.
    """

    looks_for: ClassVar[str]
    """Description of the files that make a path match."""

    examples: ClassVar[tuple[str, ...]]
    """Typical file names, to suggest the nearest format if nothing matches."""

    rank: ClassVar[int] = 0
    """If several formats match, the one of the lowest rank is used."""

    @classmethod
    @abstractmethod
    def matches(cls, path: Path) -> bool:
        """Whether an existing path looks like this layout, judged by file names."""

    @abstractmethod
    def read(self, path: Path, log: ProblemLog) -> Draft:
        """All items, including faulty ones."""

    @classmethod
    def split_of_file(cls, path: Path) -> str | None:
        """What the name of a caption file states about its split; None if nothing."""
        return None


sources: Registry[type[Source]] = Registry("data source")
"""Layouts by name."""

named_sources: Registry[Callable[..., Pairs]] = Registry("named data set")
"""Data sets made by code: called as ``make(cache_dir, progress=progress, **options)``."""


# Splits: their order, and the split of images whose source states none.

ORDER = ("train", "restval", "dev", "val", "valid", "validation", "test", "testall")
HASHED, PARTLY_HASHED = "hashed-split", "partly-hashed-split"
"""Kinds of the note that all images, or some, state no split and were split by a hash of their
id."""
_IN_NAME = re.compile(
    r"(?<![a-z])(train|dev|val|valid|validation|testall|test)(?:2014|2015|2017)?(?![a-z])", re.I
)


def in_order(names: Iterable[str]) -> list[str]:
    """Split names in the usual order: train, dev, test, then the others as given."""
    unique = list(dict.fromkeys(names))
    known = [name for name in ORDER if name in unique]
    return known + [name for name in unique if name not in ORDER]


def split_in_name(file_name: str) -> str | None:
    """The split that a file name contains, if any.

    >>> split_in_name("flickr8k-train-0.tar"), split_in_name("photos.tar")
    ('train', None)
    """
    match = _IN_NAME.search(file_name)
    return match.group(1).lower() if match else None


_ALIASES = {"training": "train", "testing": "test", "development": "dev"}


def normalized_split(name: str) -> str:
    """A split name from a table as one of `ORDER`, if it is one of those in another spelling.

    >>> normalized_split("Train "), normalized_split("testing"), normalized_split("Fold A")
    ('train', 'test', 'Fold A')
    """
    folded = name.strip().lower()
    folded = _ALIASES.get(folded, folded)
    return folded if folded in ORDER else name.strip()


def hash_of(image_id: str, purpose: str) -> float:
    """A hash of an id as a number from 0 to 1, the same on every machine."""
    text = f"{purpose}\n{image_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(sha256(text).digest()[:8], "big") / 2**64


def least_images(images: int) -> int:
    """Fewest images of a part of a set: ten, but at most a fifth of the set, and at least one."""
    return max(1, min(10, images // 5))


def hashed_split(image_id: str) -> str:
    """80 % train, 10 % dev, 10 % test by a hash of the id, the same on every machine."""
    share = _share(image_id)
    return "train" if share < 80 else "dev" if share < 90 else "test"


def hashed_splits(ids: Sequence[str]) -> list[str]:
    """`hashed_split` of all images of a set without stated splits.

    Small sets have at least `least_images` in dev and in test: those with the next hashes. One or
    two images are all in train.
    """
    if len(ids) < 3:
        return ["train"] * len(ids)
    splits = [hashed_split(image) for image in ids]
    least = least_images(len(ids))
    counts = {name: max(least, splits.count(name)) for name in ("test", "dev")}
    if 2 * sum(counts.values()) > len(ids):  # by chance, in a very small set
        counts = dict.fromkeys(counts, least)
    order = sorted(range(len(ids)), key=lambda index: (-_share(ids[index]), ids[index]))
    names = ["test"] * counts["test"] + ["dev"] * counts["dev"]
    names += ["train"] * (len(ids) - len(names))
    for index, name in zip(order, names, strict=True):
        splits[index] = name
    return splits


def fill_splits(
    images: Sequence[tuple[str, str | None]], usable: Collection[int] | None = None
) -> list[str]:
    """The split of each (id, stated split), by a hash of the id if none is stated.

    ``usable`` are the indices of usable images (None: all). If no split is stated, only these are
    divided 80/10/10; otherwise a set with many missing files could have no training images. Images
    with the same id are in the same split, in which that is found to be an error.
    """
    if any(stated for _, stated in images):
        return [stated or hashed_split(image) for image, stated in images]
    ids = list(dict.fromkeys(images[index][0] for index in sorted(usable or range(len(images)))))
    chosen = dict(zip(ids, hashed_splits(ids), strict=True))
    return [chosen.get(image) or hashed_split(image) for image, _ in images]


def set_splits(
    items: Sequence[Item], where: Path, log: ProblemLog, usable: Collection[int] | None = None
) -> None:
    """`fill_splits` of items; logs how many of them had no stated split."""
    hashed = sum(not item.split for item in items)
    splits = fill_splits([(item.id, item.split) for item in items], usable)
    for item, split in zip(items, splits, strict=True):
        item.split, item.split_is_stated = split, bool(item.split)
    if hashed:
        log.note(
            HASHED if hashed == len(items) else PARTLY_HASHED,
            where,
            f"no split is stated for {hashed} of {len(items)} images; they are split 80/10/10 "
            "into train, dev and test by a hash of the id",
        )


def _share(image_id: str) -> int:
    digest = sha256(image_id.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % 100


class Writer(ABC):
    """Writes splits into a folder, one image at a time.

    If an image cannot be read, that is logged and its item is written without it.
    """

    def __init__(self, folder: Path, log: ProblemLog) -> None:
        self.folder = folder
        self.log = log

    @abstractmethod
    def write_split(self, split: Split, images: Iterable[int]) -> None:
        """Write a split; ``images`` are its indices in order, wrapped in a progress bar."""

    def close(self) -> None:  # noqa: B027 - most writers have nothing to finish
        """Finish files that span several splits."""


def extras_of(split: Split, image: int) -> dict[str, Any]:
    return split.extras[image] if split.extras is not None else {}


writers: Registry[type[Writer]] = Registry("conversion target")


# Roles of table columns: image, captions, id, split.

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
    """Column names of a table by role; the others are extras.

    There can be several numbered columns of captions: ``caption_1``, ``caption_2`` …, also beside
    a plain ``caption``.
    """

    captions: tuple[str, ...]
    image: str | None
    id: str | None
    split: str | None
    label: str | None
    extras: tuple[str, ...]


def find_columns(names: Iterable[str], chosen: dict[str, str | None]) -> Columns | str:
    """The roles of a table's columns, or a message about what is missing.

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
                return f"no column '{choice}'{nearest(choice, names)} {_listed(names)}"
            roles[role] = choice
        else:
            roles[role] = next((folded[alias] for alias in aliases if alias in folded), None)
    one = roles.pop("captions")
    captions = _caption_columns(names, one, chosen.get("captions") is not None)
    if not captions:
        return f"no column of captions {_expected('captions', 'caption')} {_listed(names)}"
    if roles["image"] is None and roles["id"] is None:
        return f"no column of images {_expected('image', 'image')} {_listed(names)}"
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


def _caption_columns(names: Sequence[str], one: str | None, chosen: bool) -> tuple[str, ...]:
    """The columns of captions: ``one``, if the user chose it, else with its numbered ones."""
    if one is not None and chosen:
        return (one,)
    stems = {name: _NUMBERED.fullmatch(name.strip().lower()) for name in names}
    plain = None if one is None else one.strip().lower().removesuffix("s")
    return tuple(
        name
        for name, match in stems.items()
        if name == one or (match is not None and plain in (None, match[1]))
    )


def _expected(role: str, option: str) -> str:
    return (
        f"({', '.join(ALIASES[role])}): rename a column, or name it with the option "
        f"{option}_column=NAME"
    )


def _listed(names: tuple[str, ...]) -> str:
    return f"(found: {', '.join(names) or 'none'})"
