"""Foil captions that travel with the pairs of a batch: made by rule, or read from a file."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from counterfoil.data.batches import Companions, Extra
from counterfoil.data.duplicates import spoken
from counterfoil.data.pairs import Split
from counterfoil.data.words import words
from counterfoil.errors import ConfigError
from counterfoil.foils import DEFAULT_KINDS, rule_foils
from counterfoil.foils.matching import foils_by_caption
from counterfoil.progress import Progress

RULES = "rules"


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
        # other kinds bring in a word that no own caption has
        true = frozenset(map(spoken, own)) if "swap" in self.kinds else frozenset()
        foils = rule_foils(self.split.texts[caption], draws, self.kinds, self.count, avoid, true)
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
    captions, or which of them it is, counted from 0) and ``foil``; lines about images and captions
    that are not in the split are passed over.
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
    found = foils_by_caption(path, split)
    progress.say(f"{path.name}: foils for {len(found)} of {len(split.texts)} captions")
    return ListedFoils(found, count)
