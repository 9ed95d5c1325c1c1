"""Whether a foil of a drawn scene's caption is really false: a true negative, from ground truth.

The caption says what each of its words claims. A word that was put in claims the same of the same
thing, by another word; so what the foil claims is known, and the scene says whether it can hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from counterfoil.data.pairs import Split
from counterfoil.data.scenes import (
    Scene,
    SceneCaption,
    Word,
    captions_of,
    could_be_true,
    scene_of,
    statement_of,
    tokens,
)
from counterfoil.data.scenes.vocabulary import (
    COLOUR_WORDS,
    NUMBERS,
    PATTERN_WORDS,
    PLURAL,
    POSITION_WORDS,
    RELATION_WORDS,
    SINGULAR,
    SIZE_WORDS,
)
from counterfoil.evaluation.true_graphs import EMPTY
from counterfoil.foils.lists import NUMERALS

Verdict = Literal["false", "true", "unsure"]

_LOOKS: dict[str, dict[str, str]] = {
    "colour": COLOUR_WORDS,
    "size": SIZE_WORDS,
    "pattern": PATTERN_WORDS,
}
_OTHERS = {
    "noun": SINGULAR.keys() | PLURAL.keys(),
    "count": NUMBERS.keys(),
    "relation": RELATION_WORDS.keys(),
    "position": frozenset(POSITION_WORDS),
}
_PLACES = {
    "meadow": frozenset({"meadow"}),
    "beach": frozenset({"beach", "sea"}),
    "street": frozenset({"street", "city"}),
    "room": frozenset({"room", "indoors"}),
    "park": frozenset({"park", "path"}),
    "snow": frozenset({"snow", "winter"}),
}
_GREEN = frozenset({"meadow", "park"})
"""Grass with trees: what is one to the painter may be the other to a reader."""
_OUTDOORS = "outdoors"
_ALL_PLACES = frozenset[str]().union(*_PLACES.values()) | {_OUTDOORS}
_ARTICLES = frozenset({"a", "an", "the"})
_MANY = {word: count for count, word in enumerate(NUMERALS, start=1) if count > 1}
_LINKS = frozenset({"in", "on", "at", "by", "with", "of", "to", "near", "front", "next"})


def has_truth(split: Split) -> bool:
    """Whether a split says what is true of its images, as the drawn scenes do."""
    return split.extras is not None and len(split) > 0 and "scene" in split.extras[0]


def verdict_on(split: Split, image: int, place: int, foil: str) -> Verdict:
    """Of a foil of caption ``place`` of an image of the drawn scenes."""
    if split.extras is None:
        return "unsure"
    extras = split.extras[image]
    caption = captions_of(extras, split.captions[image])[place]
    return foil_verdict(scene_of(extras), caption, foil)


def foil_verdict(scene: Scene, caption: SceneCaption, foil: str) -> Verdict:
    """``false`` where no generous reader could let the foil pass, ``true`` where one could.

    A word in a place where it makes no sense (*a red red*) makes a sentence false. ``unsure`` is
    what says more than its words' roles tell: another number of words, a new word that is no number
    in the place of an article, other clothes.
    """
    new = tokens(foil)
    if len(new) != len(caption.words):
        return "unsure"
    changed = [place for place, word in enumerate(caption.words) if word.text.lower() != new[place]]
    claims = _claims(caption, new)
    if claims is None:
        return "false"
    counted = _counted(caption, new)
    statement = statement_of(claims)
    for place, mention in counted.items():
        statement.mentions[mention].count = _MANY[new[place]]
    if not could_be_true(scene, statement):
        return "false"
    verdicts = {
        _unclaimed(scene, caption.words[place].text.lower(), new[place])
        for place in changed
        if not caption.words[place].role and place not in counted
    }
    if "false" in verdicts:
        return "false"
    return "unsure" if "unsure" in verdicts else "true"


def _claims(caption: SceneCaption, new: list[str]) -> SceneCaption | None:
    """The caption with the foil's words in the roles they take; None where one makes no sense."""
    words = list(_claiming(caption, new))
    if any(word is None for word in words):
        return None
    told = [word for word in words if word is not None]
    return SceneCaption(" ".join(new), tuple(told)) if _is_consistent(told) else None


def _claiming(caption: SceneCaption, new: list[str]) -> Iterator[Word | None]:
    for word, text in zip(caption.words, new, strict=True):
        role, _, rest = word.role.partition(":")
        if not role or text == word.text.lower():
            yield replace(word, text=text)
        elif role == "count" and text in _MANY:  # which `_counted` sees to
            yield replace(word, text=text, role="")
        elif role in _LOOKS:  # a colour may take the place of a size
            fits = next((look for look, table in _LOOKS.items() if text in table), None)
            yield replace(word, text=text, role=f"{fits}:{rest}") if fits else None
        else:
            yield replace(word, text=text) if text in _OTHERS[role] else None


def _counted(caption: SceneCaption, new: list[str]) -> dict[int, int]:
    """New numbers, also in place of articles, by their places: which mention each one counts."""
    found = {}
    for place, word in enumerate(caption.words):
        old = word.text.lower()
        can_count = word.role.startswith("count:") or (not word.role and old in _ARTICLES)
        if can_count and new[place] in _MANY and new[place] != old:
            roles = [other.role for other in caption.words[place : word.phrase[1]]]
            nouns = [int(role.split(":")[1]) for role in roles if role.startswith("noun:")]
            if nouns:
                found[place] = nouns[0]
    return found


def _is_consistent(words: list[Word]) -> bool:
    """Whether nothing is said to have two colours, sizes or patterns."""
    said: dict[str, str] = {}
    for word in words:
        table = _LOOKS.get(word.role.split(":")[0])
        if table is not None and said.setdefault(word.role, table[word.text]) != table[word.text]:
            return False
    return True


def _unclaimed(scene: Scene, old: str, new: str) -> Verdict:
    """Of a word without a role: surroundings can be checked, function words say nothing."""
    if old in _ALL_PLACES and new in _ALL_PLACES:
        return _surroundings(scene.backdrop, new)
    says_nothing = EMPTY | _LINKS
    return "true" if old in says_nothing and new in says_nothing else "unsure"


def _surroundings(backdrop: str, word: str) -> Verdict:
    if word == _OUTDOORS:
        return "false" if backdrop == "room" else "true"
    if word in _PLACES[backdrop]:
        return "true"
    is_green = backdrop in _GREEN and any(word in _PLACES[other] for other in _GREEN)
    return "unsure" if is_green else "false"
