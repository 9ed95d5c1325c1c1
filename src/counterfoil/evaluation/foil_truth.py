"""Whether a foil of a drawn scene's caption is really false: a true negative, from ground truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from counterfoil.data.pairs import Split
from counterfoil.data.scenes import (
    Scene,
    SceneCaption,
    Statement,
    captions_of,
    could_be_true,
    is_true,
    scene_of,
    statement_of,
    tokens,
)
from counterfoil.data.scenes.vocabulary import POSITION_WORDS
from counterfoil.evaluation.foil_claims import (
    ALL_PLACES,
    OUTDOORS,
    PLACES,
    SAYS_NOTHING,
    claims_of,
)
from counterfoil.foils.lexicon import ATTRIBUTES, LONG_RELATIONS, NOUN_FORMS, NUMERALS, RELATIONS
from counterfoil.foils.lexicon import PLACES as PICTURE_PLACES

Verdict = Literal["false", "true", "unsure"]
Manner = Literal["same", "meant", "generous"]

_ATTRIBUTES = frozenset(ATTRIBUTES) | frozenset(NUMERALS)
_CLASSES: dict[str, frozenset[str]] = {
    "noun": frozenset(NOUN_FORMS),
    "relation": frozenset(RELATIONS)
    | {word for words in RELATIONS.values() for word in words}
    | {word for phrase in LONG_RELATIONS for word in phrase}
    | {word for others in LONG_RELATIONS.values() for phrase in others for word in phrase},
    "count": _ATTRIBUTES,
    "colour": _ATTRIBUTES,
    "size": _ATTRIBUTES,
    "pattern": _ATTRIBUTES,
    "position": frozenset(PICTURE_PLACES),
}
"""English words that can stand in each role, whether scenes know them or not."""

_GREEN = frozenset({"meadow", "park"})
"""Grass with trees: what is one to the painter may be the other to a reader."""


def has_truth(split: Split) -> bool:
    """Whether a split says what is true of its images, as the drawn scenes do."""
    return split.extras is not None and len(split) > 0 and "scene" in split.extras[0]


def places_of(split: Split, captions: Sequence[int]) -> list[tuple[int, int]]:
    """Captions by their indices into all texts: of which image each is, and its place there."""
    images = [int(split.image_of[caption]) for caption in captions]
    first = np.searchsorted(split.image_of, np.arange(len(split)))
    return [
        (image, caption - int(first[image]))
        for image, caption in zip(images, captions, strict=True)
    ]


def truth_of(split: Split, image: int, place: int) -> tuple[Scene, SceneCaption]:
    """The scene of an image of the drawn scenes, and its caption ``place`` with what words mean."""
    assert split.extras is not None  # noqa: S101 - the drawn scenes have them
    extras = split.extras[image]
    return scene_of(extras), captions_of(extras, split.captions[image])[place]


def verdict_on(split: Split, image: int, place: int, foil: str) -> Verdict:
    """Of a foil of caption ``place`` of an image of the drawn scenes."""
    return "unsure" if split.extras is None else foil_verdict(*truth_of(split, image, place), foil)


def foil_verdict(scene: Scene, caption: SceneCaption, foil: str) -> Verdict:
    """``false`` where no generous reader could let the foil pass, ``true`` where one could.

    A word in a place where it makes no sense (*a red red*) makes a sentence false. ``unsure`` is
    what says more than its words' roles tell: another number of words, a new word that is no number
    in the place of an article, other clothes.
    """
    new = tokens(foil)
    if len(new) != len(caption.words):
        return "unsure"
    claims = claims_of(caption, new)
    if claims is None or not could_be_true(scene, claims.statement):
        return "false"
    verdicts = {_apart(scene, *words) for words in claims.apart}
    if "false" in verdicts:
        return "false"
    return "unsure" if "unsure" in verdicts else "true"


def makes_sense(caption: SceneCaption, foil: str) -> bool:
    """Whether every word of a foil can stand where it does; of another number of words, it may.

    *A zebra* for *a cat* makes sense although no scene has one; *a red* for *a cat* does not.
    """
    new = tokens(foil)
    if len(new) != len(caption.words):
        return True
    # a word of the right class that scenes do not know claims something else, but makes sense
    known = [
        word.text.lower() if text in _CLASSES.get(word.role.split(":")[0], ()) else text
        for word, text in zip(caption.words, new, strict=True)
    ]
    return claims_of(caption, new) is not None or claims_of(caption, known) is not None


def manner_of(scene: Scene, caption: SceneCaption, foil: str) -> Manner | None:
    """In which manner a foil is true; None of one that is not.

    ``same``: it claims what the caption claims, by other words. ``meant``: it is plainly true of
    the things that the caption means. ``generous``: it is true of other things, or passes only
    where the reader is generous.
    """
    if foil_verdict(scene, caption, foil) != "true":
        return None
    claims = claims_of(caption, tokens(foil))
    assert claims is not None  # noqa: S101 - what makes no sense is not true
    if _bare(claims.statement) == _bare(statement_of(caption)):
        return "same"
    return "meant" if is_true(scene, claims.statement) else "generous"


def _bare(statement: Statement) -> Statement:
    """Claims without the words for them: a bike is a bicycle."""
    mentions = {place: replace(one, noun="") for place, one in statement.mentions.items()}
    return Statement(mentions, statement.relations)


def _apart(scene: Scene, old: str, new: str) -> Verdict:
    """Of a word without a role: surroundings can be checked, function words say nothing."""
    empty = old in SAYS_NOTHING and new in SAYS_NOTHING
    if new in ALL_PLACES and (empty or old in ALL_PLACES or old in POSITION_WORDS):
        return _surroundings(scene.backdrop, new)  # "indoors" can stand anywhere
    return "true" if empty else "unsure"


def _surroundings(backdrop: str, word: str) -> Verdict:
    if word == OUTDOORS:
        return "false" if backdrop == "room" else "true"
    if word in PLACES[backdrop]:
        return "true"
    is_green = backdrop in _GREEN and any(word in PLACES[other] for other in _GREEN)
    return "unsure" if is_green else "false"
