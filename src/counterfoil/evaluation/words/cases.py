"""False captions whose wrong words are known, made from the truth of drawn scenes."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.data.pairs import Split
from counterfoil.data.scenes import (
    Foil,
    Scene,
    SceneCaption,
    captions_of,
    falsify,
    scene_of,
    tokens,
)
from counterfoil.data.text.words import caption_words

KINDS = ("object", "attribute", "count", "relation", "position")
MAX_WORDS = 3


@dataclass(frozen=True)
class FoilCase:
    """A caption of image ``image`` (an index into the split), and the same made false.

    ``wrong`` says of each word of ``foil``, punctuation left out, what kind of error it is, or is
    empty where the word was left as it was.
    """

    image: int
    caption: str
    foil: str
    wrong: tuple[str, ...]

    @property
    def kinds(self) -> set[str]:
        return {kind for kind in self.wrong if kind}

    @property
    def labels(self) -> NDArray[np.bool_]:
        return np.array([bool(kind) for kind in self.wrong])


@dataclass(frozen=True)
class Foils:
    """The cases of a split in the order of its images; captions that could not be used."""

    cases: list[FoilCase]
    captions: int
    left_out: int


def make_foils(
    split: Split, per_caption: int = 1, max_captions: int | None = None, seed: int = 0
) -> Foils:
    """``per_caption`` false captions for each caption, with one to three words exchanged.

    A single exchange is of a kind drawn from those the caption allows, so that rare kinds get their
    share. The same split and seed give the same foils, whichever captions are asked for.
    """
    if split.extras is None or not len(split) or "scene" not in split.extras[0]:
        raise DataError(
            f"split '{split.name}' does not say what is true of its images, so no caption can be "
            "made false for sure: word-level truth needs the drawn scenes (--data scenes)"
        )
    if per_caption < 1 or (max_captions is not None and max_captions < 1):
        raise ConfigError(
            f"foils: expected at least 1 per caption and 1 caption, got {per_caption} and "
            f"{max_captions}"
        )
    chosen = _choose(len(split.texts), max_captions, seed)
    cases: list[FoilCase] = []
    left_out = position = 0
    for image in range(len(split)):
        count = len(split.captions[image])
        wanted = [place for place in range(count) if position + place in chosen]
        position += count
        if not wanted:
            continue
        extras = split.extras[image]
        scene, captions = scene_of(extras), captions_of(extras, split.captions[image])
        for place in wanted:
            stem = f"{seed}/{split.ids[image]}/{place}"
            found = _falsify(scene, captions[place], per_caption, stem)
            cases += [_case(image, captions[place].text, foil) for foil in found]
            left_out += not found
    if not cases:
        raise DataError(f"split '{split.name}': none of its captions can be made false")
    return Foils(cases, len(chosen), left_out)


def _choose(count: int, most: int | None, seed: int) -> set[int]:
    if most is None or most >= count:
        return set(range(count))
    return set(random.Random(f"{seed}/captions").sample(range(count), most))


def _falsify(scene: Scene, caption: SceneCaption, number: int, stem: str) -> list[Foil]:
    """Up to ``number`` different foils of a caption, each from a generator of its own."""
    found: dict[str, Foil] = {}
    for attempt in range(2 * number):
        if len(found) == number:
            break
        rng = random.Random(f"{stem}/{attempt}")
        words = rng.randint(1, MAX_WORDS)
        foil = None
        for kind in rng.sample(KINDS, len(KINDS)) if words == 1 else ():
            foil = foil or falsify(scene, caption, rng, 1, (kind,))
        foil = foil or falsify(scene, caption, rng, words)
        # Every word must be found again in the text, whatever cuts it.
        if foil is not None and _spoken(foil.text) == tokens(foil.text):
            found.setdefault(foil.text, foil)
    return list(found.values())


def _spoken(text: str) -> list[str]:
    return [word.text.lower() for word in caption_words(text) if not word.is_punctuation]


def _case(image: int, caption: str, foil: Foil) -> FoilCase:
    wrong = [""] * len(tokens(foil.text))
    for place, kind in zip(foil.positions, foil.kinds, strict=True):
        wrong[place] = kind
    return FoilCase(image, caption, foil.text, tuple(wrong))
