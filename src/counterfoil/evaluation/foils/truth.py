"""Check against ground truth whether a foil of a drawn scene's caption is really false.

Each word of a scene's caption has a role: what it claims, and of which thing. A replacing word
takes over the role, so the claims of the foil are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from counterfoil.data.pairs import Split
from counterfoil.data.scenes import (
    Scene,
    SceneCaption,
    Statement,
    Word,
    captions_of,
    could_be_true,
    is_true,
    scene_of,
    statement_of,
    tokens,
)
from counterfoil.data.scenes.vocabulary import (
    COLOR_WORDS,
    NUMBERS,
    PATTERN_WORDS,
    PLURAL,
    POSITION_WORDS,
    RELATION_WORDS,
    SINGULAR,
    SIZE_WORDS,
)
from counterfoil.foils.lexicon import ATTRIBUTES, LONG_RELATIONS, NOUN_FORMS, NUMERALS, RELATIONS
from counterfoil.foils.lexicon import PLACES as PICTURE_PLACES

OUTDOORS = "outdoors"
PLACES = {
    "meadow": frozenset({"meadow"}),
    "beach": frozenset({"beach", "sea"}),
    "street": frozenset({"street", "city"}),
    "room": frozenset({"room", "indoors"}),
    "park": frozenset({"park", "path"}),
    "snow": frozenset({"snow", "winter"}),
}
"""Words for the surroundings, by the backdrop they name."""
ALL_PLACES = frozenset[str]().union(*PLACES.values()) | {OUTDOORS}
EMPTY_WORDS = frozenset(
    {"a", "an", "the", "and", "is", "are", "there", "it", "to", "of", "picture", "drawing"}
    | {"you", "can", "see", "outdoors", "indoors"}
)
"""Words of the scenes' captions that claim nothing about the picture."""
SAYS_NOTHING = EMPTY_WORDS | {"in", "on", "at", "by", "with", "of", "to", "near", "front", "next"}

_APPEARANCE: dict[str, dict[str, str]] = {
    "colour": COLOR_WORDS,
    "size": SIZE_WORDS,
    "pattern": PATTERN_WORDS,
}
_ROLE_WORDS = {
    "noun": SINGULAR.keys() | PLURAL.keys(),
    "count": NUMBERS.keys(),
    "relation": RELATION_WORDS.keys(),
    "position": frozenset(POSITION_WORDS),
}
_POSTURES = frozenset({"flying", "standing", "sitting", "sits"})
_ARTICLES = frozenset({"a", "an", "the"})
_COUNT_WORDS = {word: count for count, word in enumerate(NUMERALS, start=1) if count > 1}

_PICTURE_WORDS = {"count": _COUNT_WORDS.keys(), "position": ALL_PLACES}
"""Words without a claim about one thing: `_new_counts` reads numbers, places are scene-wide."""

Verdict = Literal["false", "true", "unsure"]
TrueFoilKind = Literal["same", "meant", "generous"]
_ATTRIBUTES = frozenset(ATTRIBUTES) | frozenset(NUMERALS)

_GREEN = frozenset({"meadow", "park"})
"""Backdrops of grass with trees, which a reader may confuse."""


@dataclass(frozen=True)
class Claims:
    """What a foil states, and its new words without a role, as (old word, new word)."""

    statement: Statement
    unroled: tuple[tuple[str, str], ...]


def claims_of(caption: SceneCaption, new: Sequence[str]) -> Claims | None:
    """The claims of a foil's words, as many as the caption's; None if one makes no sense."""
    words = list(_claims_by_word(caption, new))
    claims = [word for word in words if word is not None]
    if len(claims) < len(words) or not _is_consistent(claims):
        return None
    counted = _new_counts(caption, new)
    statement = statement_of(SceneCaption(" ".join(new), tuple(claims)))
    for position, mention in counted.items():
        statement.mentions[mention].count = _COUNT_WORDS[new[position]]
    explained = {*counted, *_moved_relations(caption, new).values()}
    unroled = tuple(
        (word.text.lower(), new[position])
        for position, word in enumerate(caption.words)
        if word.text.lower() != new[position] and position not in explained
        if not word.role or (word.role.startswith("position:") and new[position] in ALL_PLACES)
    )
    return Claims(statement, unroled)


def _claims_by_word(caption: SceneCaption, new: Sequence[str]) -> Iterator[Word | None]:
    moved = _moved_relations(caption, new)
    for position, (word, text) in enumerate(zip(caption.words, new, strict=True)):
        role, _, rest = word.role.partition(":")
        fits = next((look for look, table in _APPEARANCE.items() if text in table), None)
        if not role or text == word.text.lower():
            yield replace(word, text=text)
        elif text in _PICTURE_WORDS.get(role, ()):
            yield replace(word, text=text, role="")
        elif role in (*_APPEARANCE, "count") and fits:  # a color may replace a size
            yield replace(word, text=text, role=f"{fits}:{rest}")
        elif position in moved:
            yield replace(word, text=new[moved[position]])
        else:
            yield replace(word, text=text) if text in _ROLE_WORDS.get(role, ()) else None


def _moved_relations(caption: SceneCaption, new: Sequence[str]) -> dict[int, int]:
    """New positions of relations that moved in their phrase (*right of*, now *flying above*).

    The phrase must have exactly one relation word, and no other word that makes no sense there.
    """
    moved = {}
    for position, word in enumerate(caption.words):
        if not word.role.startswith("relation:") or new[position] in RELATION_WORDS:
            continue
        phrase = range(*word.phrase)
        relating = [other for other in phrase if new[other] in RELATION_WORDS]
        others = {new[other] for other in phrase if other not in relating}
        if len(relating) == 1 and others <= SAYS_NOTHING | _POSTURES:
            moved[position] = relating[0]
    return moved


def _new_counts(caption: SceneCaption, new: Sequence[str]) -> dict[int, int]:
    """Positions of new numbers, also in place of articles, and the mention that each one counts."""
    counts = {}
    for position, word in enumerate(caption.words):
        old = word.text.lower()
        can_count = word.role.startswith("count:") or (not word.role and old in _ARTICLES)
        if can_count and new[position] in _COUNT_WORDS and new[position] != old:
            roles = [other.role for other in caption.words[position : word.phrase[1]]]
            nouns = [int(role.split(":")[1]) for role in roles if role.startswith("noun:")]
            if nouns:
                counts[position] = nouns[0]
    return counts


def _is_consistent(words: Sequence[Word]) -> bool:
    """Whether no thing has two colors, sizes or patterns."""
    values: dict[str, str] = {}
    for word in words:
        table = _APPEARANCE.get(word.role.split(":")[0])
        if table is not None and values.setdefault(word.role, table[word.text]) != table[word.text]:
            return False
    return True


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
"""English words that fit each role, whether the scenes use them or not."""


def has_truth(split: Split) -> bool:
    """Whether a split has ground truth about its images, as the drawn scenes have."""
    return split.extras is not None and len(split) > 0 and "scene" in split.extras[0]


def caption_positions(split: Split, captions: Sequence[int]) -> list[tuple[int, int]]:
    """(image, number of the caption there) of captions, given as indices into all texts."""
    images = [int(split.image_of[caption]) for caption in captions]
    first = np.searchsorted(split.image_of, np.arange(len(split)))
    return [
        (image, caption - int(first[image]))
        for image, caption in zip(images, captions, strict=True)
    ]


def truth_of(split: Split, image: int, position: int) -> tuple[Scene, SceneCaption]:
    """The scene of an image, and its caption ``position`` with the roles of its words."""
    assert split.extras is not None  # noqa: S101 - the drawn scenes have them
    extras = split.extras[image]
    return scene_of(extras), captions_of(extras, split.captions[image])[position]


def verdict_on(split: Split, image: int, position: int, foil: str) -> Verdict:
    """The verdict on a foil of caption ``position`` of an image; ``unsure`` without truth."""
    return (
        "unsure" if split.extras is None else foil_verdict(*truth_of(split, image, position), foil)
    )


def foil_verdict(scene: Scene, caption: SceneCaption, foil: str) -> Verdict:
    """``true`` if a generous reader could accept the foil, else ``false``, or ``unsure``.

    A word that makes no sense at its position (*a red red*) makes a sentence false. ``unsure`` are
    foils whose claims do not follow from roles: another number of words, a new word other than a
    number for an article, other clothes.
    """
    new = tokens(foil)
    if len(new) != len(caption.words):
        return "unsure"
    claims = claims_of(caption, new)
    if claims is None or not could_be_true(scene, claims.statement):
        return "false"
    verdicts = {_unroled_verdict(scene, *words) for words in claims.unroled}
    if "false" in verdicts:
        return "false"
    return "unsure" if "unsure" in verdicts else "true"


def makes_sense(caption: SceneCaption, foil: str) -> bool:
    """Whether every word of a foil makes sense at its position; assumed for other lengths.

    *A zebra* for *a cat* makes sense although no scene has one; *a red* for *a cat* does not.
    """
    new = tokens(foil)
    if len(new) != len(caption.words):
        return True
    # A word of the right class makes sense even if no scene uses it.
    known = [
        word.text.lower() if text in _CLASSES.get(word.role.split(":")[0], ()) else text
        for word, text in zip(caption.words, new, strict=True)
    ]
    return claims_of(caption, new) is not None or claims_of(caption, known) is not None


def true_foil_kind(scene: Scene, caption: SceneCaption, foil: str) -> TrueFoilKind | None:
    """In which sense a foil is true; None if it is not.

    ``same``: it claims what the caption claims, by other words. ``meant``: it is plainly true of
    the things that the caption means. ``generous``: it is true of other things, or only by a
    generous reading.
    """
    if foil_verdict(scene, caption, foil) != "true":
        return None
    claims = claims_of(caption, tokens(foil))
    assert claims is not None  # noqa: S101 - what makes no sense is not true
    if _without_nouns(claims.statement) == _without_nouns(statement_of(caption)):
        return "same"
    return "meant" if is_true(scene, claims.statement) else "generous"


def _without_nouns(statement: Statement) -> Statement:
    """The statement without its nouns, as a bike is a bicycle."""
    mentions = {key: replace(mention, noun="") for key, mention in statement.mentions.items()}
    return Statement(mentions, statement.relations)


def _unroled_verdict(scene: Scene, old: str, new: str) -> Verdict:
    """The verdict on a word without a role: places are checked, function words are true."""
    empty = old in SAYS_NOTHING and new in SAYS_NOTHING
    if new in ALL_PLACES and (empty or old in ALL_PLACES or old in POSITION_WORDS):
        return _surroundings(scene.backdrop, new)  # "indoors" fits anywhere
    return "true" if empty else "unsure"


def _surroundings(backdrop: str, word: str) -> Verdict:
    if word == OUTDOORS:
        return "false" if backdrop == "room" else "true"
    if word in PLACES[backdrop]:
        return "true"
    is_green = backdrop in _GREEN and any(word in PLACES[other] for other in _GREEN)
    return "unsure" if is_green else "false"
