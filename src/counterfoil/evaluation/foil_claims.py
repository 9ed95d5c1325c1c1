"""What a foil of a drawn scene's caption claims, word by word.

The caption says what each of its words claims. A word that was put in claims the same of the same
thing, by another word, so what the foil claims is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from counterfoil.data.scenes import SceneCaption, Statement, Word, statement_of
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
from counterfoil.foils.lexicon import NUMERALS

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
EMPTY = frozenset(
    {"a", "an", "the", "and", "is", "are", "there", "it", "to", "of", "picture", "drawing"}
    | {"you", "can", "see", "outdoors", "indoors"}
)
"""Words of the scenes' captions that stand for nothing in the picture."""
SAYS_NOTHING = EMPTY | {"in", "on", "at", "by", "with", "of", "to", "near", "front", "next"}

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
_POSTURES = frozenset({"flying", "standing", "sitting", "sits"})
_ARTICLES = frozenset({"a", "an", "the"})
_MANY = {word: count for count, word in enumerate(NUMERALS, start=1) if count > 1}

_ELSEWHERE = {"count": _MANY.keys(), "position": ALL_PLACES}
"""Words whose claims are no word's: `_counted` sees to numbers, places are of the whole picture."""


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
        statement.mentions[mention].count = _MANY[new[place]]
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
        if can_count and new[place] in _MANY and new[place] != old:
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
