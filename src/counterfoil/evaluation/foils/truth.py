"""Whether a foil of a drawn scene's caption is really false: a true negative, from ground truth.

The caption says what each of its words claims. A word that was put in claims the same of the same
thing, by another word, so what the foil claims is known.
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
"""Words of the scenes' captions that stand for nothing in the picture."""
SAYS_NOTHING = EMPTY_WORDS | {"in", "on", "at", "by", "with", "of", "to", "near", "front", "next"}

_LOOKS: dict[str, dict[str, str]] = {
    "colour": COLOR_WORDS,
    "size": SIZE_WORDS,
    "pattern": PATTERN_WORDS,
}
_OTHERS = {
    "noun": SINGULAR.keys() | PLURAL.keys(),
    "count": NUMBERS.keys(),
    "relation": RELATION_WORDS.keys(),
    "position": frozenset(POSITION_WORDS),
}
_POSTURES = frozenset({"flying", "standing", "sitting", "sits"})
_ARTICLES = frozenset({"a", "an", "the"})
_COUNT_WORDS = {word: count for count, word in enumerate(NUMERALS, start=1) if count > 1}

_ELSEWHERE = {"count": _COUNT_WORDS.keys(), "position": ALL_PLACES}
"""Words whose claims are no word's: `_counted` sees to numbers, places are of the whole picture."""

Verdict = Literal["false", "true", "unsure"]
TrueFoilKind = Literal["same", "meant", "generous"]
_ATTRIBUTES = frozenset(ATTRIBUTES) | frozenset(NUMERALS)

_GREEN = frozenset({"meadow", "park"})
"""Grass with trees: what is one to the painter may be the other to a reader."""


@dataclass(frozen=True)
class Claims:
    """What a foil states, and its new words that no role tells about: (caption's, foil's)."""

    statement: Statement
    apart: tuple[tuple[str, str], ...]


def claims_of(caption: SceneCaption, new: Sequence[str]) -> Claims | None:
    """What the foil's words claim, as many as the caption's; None where one makes no sense."""
    words = list(_claiming(caption, new))
    told = [word for word in words if word is not None]
    if len(told) < len(words) or not _is_consistent(told):
        return None
    counted = _counted(caption, new)
    statement = statement_of(SceneCaption(" ".join(new), tuple(told)))
    for place, mention in counted.items():
        statement.mentions[mention].count = _COUNT_WORDS[new[place]]
    read = {*counted, *_moved(caption, new).values()}
    apart = tuple(
        (word.text.lower(), new[place])
        for place, word in enumerate(caption.words)
        if word.text.lower() != new[place] and place not in read
        if not word.role or (word.role.startswith("position:") and new[place] in ALL_PLACES)
    )
    return Claims(statement, apart)


def _claiming(caption: SceneCaption, new: Sequence[str]) -> Iterator[Word | None]:
    moved = _moved(caption, new)
    for place, (word, text) in enumerate(zip(caption.words, new, strict=True)):
        role, _, rest = word.role.partition(":")
        fits = next((look for look, table in _LOOKS.items() if text in table), None)
        if not role or text == word.text.lower():
            yield replace(word, text=text)
        elif text in _ELSEWHERE.get(role, ()):
            yield replace(word, text=text, role="")
        elif role in (*_LOOKS, "count") and fits:  # a colour may take the place of a size
            yield replace(word, text=text, role=f"{fits}:{rest}")
        elif place in moved:
            yield replace(word, text=new[moved[place]])
        else:
            yield replace(word, text=text) if text in _OTHERS.get(role, ()) else None


def _moved(caption: SceneCaption, new: Sequence[str]) -> dict[int, int]:
    """Relations told at another place of their phrase (*right of*, now *flying above*): to where.

    The phrase must have one word that relates, and none that makes no sense beside it.
    """
    found = {}
    for place, word in enumerate(caption.words):
        if not word.role.startswith("relation:") or new[place] in RELATION_WORDS:
            continue
        phrase = range(*word.phrase)
        relating = [other for other in phrase if new[other] in RELATION_WORDS]
        others = {new[other] for other in phrase if other not in relating}
        if len(relating) == 1 and others <= SAYS_NOTHING | _POSTURES:
            found[place] = relating[0]
    return found


def _counted(caption: SceneCaption, new: Sequence[str]) -> dict[int, int]:
    """New numbers, also in place of articles, by their places: which mention each one counts."""
    found = {}
    for place, word in enumerate(caption.words):
        old = word.text.lower()
        can_count = word.role.startswith("count:") or (not word.role and old in _ARTICLES)
        if can_count and new[place] in _COUNT_WORDS and new[place] != old:
            roles = [other.role for other in caption.words[place : word.phrase[1]]]
            nouns = [int(role.split(":")[1]) for role in roles if role.startswith("noun:")]
            if nouns:
                found[place] = nouns[0]
    return found


def _is_consistent(words: Sequence[Word]) -> bool:
    """Whether nothing is said to have two colours, sizes or patterns."""
    said: dict[str, str] = {}
    for word in words:
        table = _LOOKS.get(word.role.split(":")[0])
        if table is not None and said.setdefault(word.role, table[word.text]) != table[word.text]:
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
"""English words that can stand in each role, whether scenes know them or not."""


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


def true_foil_kind(scene: Scene, caption: SceneCaption, foil: str) -> TrueFoilKind | None:
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
