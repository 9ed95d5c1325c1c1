"""Splits: their order, and the split of an image whose source does not say."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from hashlib import sha256

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
