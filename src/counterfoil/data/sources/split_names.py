"""Splits: their order, and the split of an image whose source does not say."""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import sha256

ORDER = ("train", "restval", "dev", "val", "valid", "validation", "test", "testall")
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


def hashed_split(image_id: str) -> str:
    """80 % train, 10 % dev, 10 % test by a hash of the id: the same on every machine, for ever."""
    digest = sha256(image_id.encode("utf-8", "surrogatepass")).digest()
    share = int.from_bytes(digest[:8], "big") % 100
    return "train" if share < 80 else "dev" if share < 90 else "test"
