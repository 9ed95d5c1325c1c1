"""False captions with known wrong words, made from the ground truth of drawn scenes."""

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
from counterfoil.evaluation.foils.sets import choose_captions
from counterfoil.evaluation.foils.truth import has_truth

KINDS = ("object", "attribute", "count", "relation", "position")
MAX_WORDS = 3


@dataclass(frozen=True)
class FoilCase:
    """A caption of image ``image`` (an index into the split), and its foil.

    ``wrong`` has the kind of error of each word of ``foil`` without punctuation; "" if it is right.
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
    """The cases of a split sorted by image; ``left_out`` of ``captions`` captions have none."""

    cases: list[FoilCase]
    captions: int
    left_out: int


def make_foils(
    split: Split, per_caption: int = 1, max_captions: int | None = None, seed: int = 0
) -> Foils:
    """``per_caption`` false captions for each caption, with one to three words exchanged.

    The kind of a single exchange is drawn from those the caption allows, so that rare kinds occur,
    too. The same split and seed give the same foils, whatever ``max_captions`` is.
    """
    if split.extras is None or not has_truth(split):
        raise DataError(
            f"split '{split.name}' does not say what is true of its images, so no caption can be "
            "made false for sure: word-level truth needs the drawn scenes (--data scenes)"
        )
    if per_caption < 1 or (max_captions is not None and max_captions < 1):
        raise ConfigError(
            f"foils: expected at least 1 per caption and 1 caption, got {per_caption} and "
            f"{max_captions}"
        )
    chosen = set(choose_captions(split, max_captions, seed))
    cases: list[FoilCase] = []
    left_out = position = 0
    for image in range(len(split)):
        count = len(split.captions[image])
        numbers = [number for number in range(count) if position + number in chosen]
        position += count
        if not numbers:
            continue
        extras = split.extras[image]
        scene, captions = scene_of(extras), captions_of(extras, split.captions[image])
        for number in numbers:
            stem = f"{seed}/{split.ids[image]}/{number}"
            foils = _falsify(scene, captions[number], per_caption, stem)
            cases += [_case(image, captions[number].text, foil) for foil in foils]
            left_out += not foils
    if not cases:
        raise DataError(f"split '{split.name}': none of its captions can be made false")
    return Foils(cases, len(chosen), left_out)


def _falsify(scene: Scene, caption: SceneCaption, number: int, stem: str) -> list[Foil]:
    """Up to ``number`` different foils of a caption, each with its own random generator."""
    foils: dict[str, Foil] = {}
    for attempt in range(2 * number):
        if len(foils) == number:
            break
        rng = random.Random(f"{stem}/{attempt}")
        words = rng.randint(1, MAX_WORDS)
        foil = None
        for kind in rng.sample(KINDS, len(KINDS)) if words == 1 else ():
            foil = foil or falsify(scene, caption, rng, 1, (kind,))
        foil = foil or falsify(scene, caption, rng, words)
        # Both ways to split the text into words must agree.
        if foil is not None and _words_of(foil.text) == tokens(foil.text):
            foils.setdefault(foil.text, foil)
    return list(foils.values())


def _words_of(text: str) -> list[str]:
    return [word.text.lower() for word in caption_words(text) if not word.is_punctuation]


def _case(image: int, caption: str, foil: Foil) -> FoilCase:
    wrong = [""] * len(tokens(foil.text))
    for position, kind in zip(foil.positions, foil.kinds, strict=True):
        wrong[position] = kind
    return FoilCase(image, caption, foil.text, tuple(wrong))
