"""Foil captions that travel with the pairs of a batch: made by rule, or read from a file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from counterfoil.data.batches import Companions, Extra
from counterfoil.data.pairs import Split
from counterfoil.data.words import words
from counterfoil.errors import ConfigError, DataError
from counterfoil.foils import DEFAULT_KINDS, rule_foils
from counterfoil.progress import Progress

RULES = "rules"

Key = tuple[str, str]
"""An image id and the text of one of its captions."""


@dataclass(frozen=True)
class RuleFoils:
    """Foils drawn anew each time a caption comes into a batch.

    No foil brings in a word of any caption of the image, as that would often leave it true.
    """

    split: Split
    kinds: tuple[str, ...]
    count: int

    def of(self, caption: int, rng: np.random.Generator) -> Extra:
        own = self.split.captions[int(self.split.image_of[caption])]
        avoid = frozenset(word for text in own for word in words(text))
        draws = random.Random(int(rng.integers(1 << 62)))
        foils = rule_foils(self.split.texts[caption], draws, self.kinds, self.count, avoid)
        return Extra(texts=tuple(foil.text for foil in foils))


@dataclass(frozen=True)
class ListedFoils:
    """Foils given for each caption; where there are more than ``count``, some are drawn."""

    foils: Mapping[int, tuple[str, ...]]
    count: int

    def of(self, caption: int, rng: np.random.Generator) -> Extra:
        found = self.foils.get(caption, ())
        if len(found) <= self.count:
            return Extra(texts=found)
        drawn = rng.choice(len(found), self.count, replace=False)
        return Extra(texts=tuple(found[place] for place in drawn))


def foil_companions(source: str, count: int, split: Split, progress: Progress) -> Companions:
    """Foils of a split by ``rules``, by some of them (``rules:noun,swap``), or from a JSONL file.

    A line of the file is an object with ``image`` (its id), ``caption`` (the text of one of its
    captions, or which of them it is, counted from 0) and ``foil``; other keys are ignored, and so
    are lines about images and captions that are not in the split.
    """
    if count < 1:
        raise ConfigError(f"foils: expected a count of at least 1, got {count}")
    name, _, kinds = source.partition(":")
    if name == RULES:
        chosen = tuple(kinds.split(",")) if kinds else DEFAULT_KINDS
        rule_foils("", random.Random(0), chosen)  # refuses a kind it does not know
        return RuleFoils(split, chosen, count)
    path = Path(source)
    if not path.is_file():
        raise ConfigError(
            f"foils: '{source}' is neither '{RULES}' nor a file; give the path of a JSONL file "
            'with lines such as {"image": "12", "caption": "a dog runs", "foil": "a cat runs"}'
        )
    found = _matched(path, split)
    progress.say(f"{path.name}: foils for {len(found)} of {len(split.texts)} captions")
    return ListedFoils(found, count)


def _matched(path: Path, split: Split) -> dict[int, tuple[str, ...]]:
    """The foils of each caption by its index; one that is a caption of the image is left out."""
    captions: dict[Key, list[int]] = {}
    for index, (text, image) in enumerate(zip(split.texts, split.image_of, strict=True)):
        captions.setdefault((split.ids[image], text), []).append(index)
    own = dict(zip(split.ids, split.captions, strict=True))
    found: dict[int, dict[str, None]] = {}
    for image, caption, foil in _lines(path):
        texts = own.get(image, ())
        if isinstance(caption, int):
            caption = texts[caption] if caption < len(texts) else ""
        if foil not in texts:
            for index in captions.get((image, caption), ()):
                found.setdefault(index, {})[foil] = None
    if not found:
        raise DataError(
            f"{path}: no line matches a caption of split '{split.name}' by image id and caption "
            f"(the first image of the split is '{split.ids[0] if len(split) else ''}')"
        )
    return {index: tuple(foils) for index, foils in found.items()}


def _lines(path: Path) -> Iterator[tuple[str, str | int, str]]:
    """Image id, caption and foil of each line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _parsed(line, f"{path}, line {number}")


def _parsed(line: bytes, where: str) -> tuple[str, str | int, str]:
    try:
        record = json.loads(line)
    except ValueError as error:  # not JSON, or not UTF-8
        raise DataError(f"{where}: not JSON ({error})") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected an object, got {type(record).__name__}")
    for key, kinds in {"image": (str, int), "caption": (str, int), "foil": (str,)}.items():
        if type(record.get(key)) not in kinds:
            raise DataError(
                f"{where}: expected '{key}' as {_either(kinds)}, got {record.get(key)!r}"
            )
    if type(record["caption"]) is int and record["caption"] < 0:
        raise DataError(f"{where}: 'caption' counts from 0, got {record['caption']}")
    if not record["foil"].strip():
        raise DataError(f"{where}: the foil is empty")
    return str(record["image"]), record["caption"], record["foil"]


def _either(kinds: tuple[type, ...]) -> str:
    return " or ".join({str: "text", int: "a whole number"}[kind] for kind in kinds)
