"""Just enough grammar for rules: where a noun phrase has its noun, and what relates two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterfoil.data.words import STOP_WORDS
from counterfoil.foils.lexicon import LONG_RELATIONS, NOUN_FORMS, NUMERALS, RELATIONS

Tokens = Sequence[str]

_DETERMINERS = frozenset(
    {"a", "an", "the", "this", "that", "these", "those", "some", "another", "other", *NUMERALS}
    | {"his", "her", "its", "their", "my", "our", "your"}
)
_PRONOUNS = frozenset({"it", "him", "them"})
_LONGEST_PHRASE = 5
_LONGEST_LINK = 3


@dataclass(frozen=True)
class Relating:
    """Words [start, end) that relate a subject to the object at ``object`` (its noun).

    ``object`` is None where a pronoun stands for it.
    """

    start: int
    end: int
    object: int | None


def is_noun(tokens: Tokens, place: int) -> bool:
    """Whether a listed noun stands here that does not merely qualify the next one."""
    if not 0 <= place < len(tokens) or tokens[place] not in NOUN_FORMS:
        return False
    if tokens[place - 1 : place + 1] == ["hot", "dog"]:
        return False
    return place + 1 == len(tokens) or tokens[place + 1] not in NOUN_FORMS


def noun_after(tokens: Tokens, start: int) -> int | None:
    """Place of the noun of the phrase that begins at ``start``; None where it is not a listed one.

    >>> noun_after("on a big red ball".split(), 1)
    4
    """
    for place in range(start, min(start + _LONGEST_PHRASE, len(tokens))):
        if is_noun(tokens, place):
            return place
        word = tokens[place]
        if word in _DETERMINERS or word in NOUN_FORMS:
            continue
        if word in STOP_WORDS or word in RELATIONS or not word.replace("-", "").isalnum():
            return None
    return None


def relations_of(tokens: Tokens) -> list[Relating]:
    """The relations of a caption that have an object; longer ones win over the words in them."""
    found = []
    place = 0
    while place < len(tokens):
        end = _end_of_relation(tokens, place)
        related = _relating(tokens, place, end) if end is not None else None
        if related is not None:
            found.append(related)
            place = related.end
        else:
            place += 1
    return found


def _end_of_relation(tokens: Tokens, place: int) -> int | None:
    for length in (3, 2):
        if tuple(tokens[place : place + length]) in LONG_RELATIONS:
            return place + length
    if tokens[place] not in RELATIONS:
        return None
    return place + 2 if tokens[place + 1 : place + 2] == ["by"] else place + 1


def _relating(tokens: Tokens, start: int, end: int) -> Relating | None:
    if end < len(tokens) and tokens[end] in _PRONOUNS:
        return Relating(start, end, None)
    noun = noun_after(tokens, end)
    return None if noun is None else Relating(start, end, noun)


def subject_of(tokens: Tokens, relating: Relating) -> int | None:
    """Place of the noun just before a relation, over ``is``, ``sitting`` or ``to the``."""
    for place in range(relating.start - 1, max(-1, relating.start - 2 - _LONGEST_LINK), -1):
        if is_noun(tokens, place):
            return place
        word = tokens[place]
        linking = word in ("is", "are", "was", "were", "to", "the") or word.endswith("ing")
        if not linking or word in RELATIONS:
            return None
    return None


def is_plural(tokens: Tokens, place: int) -> bool:
    """Whether the noun at ``place`` means several; the sheep of "two sheep" do."""
    form = NOUN_FORMS[tokens[place]]
    if form.is_singular != form.is_plural:
        return form.is_plural
    for before in reversed(tokens[max(0, place - _LONGEST_PHRASE) : place]):
        if before in ("a", "an", "one", "the", "this", "that"):
            return False
        if before in STOP_WORDS:
            break
    return True
