"""Foils of a whole data set in a file, made by rule; what all makers of such files share."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from counterfoil.data.pairs import Split
from counterfoil.data.words import words
from counterfoil.errors import ConfigError
from counterfoil.foils.rules import DEFAULT_KINDS, rule_foils
from counterfoil.foils.store import FoilWriter, StoredFoil
from counterfoil.progress import Progress, Silent


@dataclass(frozen=True)
class Caption:
    """A caption of a split: which image has it, its id ``IMAGE#0``, and its text."""

    row: int
    image: str
    id: str
    text: str


@dataclass(frozen=True)
class FoilCounts:
    """What became of the captions of a split.

    ``captions`` were looked at, of which ``without`` have no foil; ``unreadable`` says which images
    were left out. ``unspelt`` foils were dropped as no text stands for their tokens, counted since
    the writing was last begun.
    """

    captions: int
    foils: int
    without: int
    unreadable: tuple[str, ...] = ()
    unspelt: int = 0

    @classmethod
    def of(cls, writer: FoilWriter, unreadable: Sequence[str] = (), unspelt: int = 0) -> FoilCounts:
        found = writer.found()
        return cls(len(found), sum(found), found.count(0), tuple(unreadable), unspelt)

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "unreadable": list(self.unreadable)}


def captions_of(split: Split) -> list[Caption]:
    """All captions of a split; one that an image has twice is there once."""
    found: dict[tuple[int, str], Caption] = {}
    for row, (image, texts) in enumerate(zip(split.ids, split.captions, strict=True)):
        for number, text in enumerate(texts):
            found.setdefault((row, text), Caption(row, image, f"{image}#{number}", text))
    return list(found.values())


def split_digest(split: Split) -> str:
    """A hash of the ids and captions of a split."""
    digest = hashlib.sha256()
    for image, texts in zip(split.ids, split.captions, strict=True):
        for part in (image, *texts):
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
        digest.update(b"\n")
    return digest.hexdigest()


def write_rule_foils(
    split: Split,
    path: Path,
    *,
    kinds: Sequence[str] = DEFAULT_KINDS,
    count: int = 5,
    seed: int = 0,
    progress: Progress | None = None,
) -> FoilCounts:
    """Foils of every caption by rule, up to ``count`` each; cut off, the same call goes on.

    What is drawn for a caption depends on the seed, its image's id and its text alone. No foil
    brings in a word of any caption of the image, as that would often leave it true.
    """
    rule_foils("", random.Random(0), kinds, count)  # refuses a kind that it does not know
    settings = {
        "maker": "rules",
        "kinds": list(kinds),
        "count": count,
        "seed": seed,
        "captions": split_digest(split),
    }
    captions = captions_of(split)
    progress = progress or Silent()
    with FoilWriter(path, settings) as writer:
        done = len(writer.found())
        left = [one for one in captions if not writer.is_done(one.image, one.text)]
        for one in progress.track(left, f"writing foils ({split.name})", len(captions), done):
            writer.add(one.image, one.text, _by_rule(one, split, kinds, count, seed))
        return FoilCounts.of(writer)


def _by_rule(
    one: Caption, split: Split, kinds: Sequence[str], count: int, seed: int
) -> list[StoredFoil]:
    avoid = frozenset(word for text in split.captions[one.row] for word in words(text))
    draws = random.Random(f"{seed} {one.image} {one.text}")
    return [
        StoredFoil(one.image, one.text, foil.text, foil.positions, foil.kind, None, one.id)
        for foil in rule_foils(one.text, draws, kinds, count, avoid)
    ]


def batches_of(captions: Sequence[Caption], size: int) -> list[Sequence[Caption]]:
    """Captions in batches of fixed members, so that what is drawn for one does not change."""
    if size < 1:
        raise ConfigError(f"foils: a batch has at least 1 caption, got {size}")
    return [captions[start : start + size] for start in range(0, len(captions), size)]


def batch_generator(seed: int, number: int) -> np.random.Generator:
    """Where the draws of one batch come from."""
    return np.random.default_rng([seed, number])
