"""Words that every extractor of scene graphs treats alike, so that their graphs compare."""

from __future__ import annotations

from collections.abc import Sequence

from counterfoil.foils.lexicon import LONG_RELATIONS

# "a picture of a dog" speaks of a dog; the picture is not in the picture.
_FRAMES = "picture photo photograph drawing painting image view shot scene sort kind"
# "a group of men" tells how many men there are, as a number would.
_QUANTITIES = "group groups couple pair pairs bunch crowd number lot lots set dozens team row rows"
FRAMES, QUANTITIES = frozenset(_FRAMES.split()), frozenset(_QUANTITIES.split())
# Words that tell nothing that could be seen to be wrong.
NOT_ATTRIBUTES = frozenset({"other", "own", "such", "same", "about", "more", "most", "next", "due"})
NOT_OBJECTS = frozenset({"other", "others", "one", "ones"})
NOT_RELATIONS = frozenset({"of", "as", "than"})
# "can be seen" is said of whoever looks at the picture.
VIEWING = frozenset({"see", "sees", "seen", "seeing", "depict", "depicts", "depicted"})

_LONG = frozenset(LONG_RELATIONS) | {("out", "of"), ("in", "back", "of"), ("across", "from")}


def long_relation(tokens: Sequence[str], place: int) -> int:
    """How many words a relation of several words has that begins here; 0 where none does.

    >>> long_relation("a dog in front of a bus".split(), 2)
    3
    """
    for length in (3, 2):
        if place + length <= len(tokens) and tuple(tokens[place : place + length]) in _LONG:
            return length
    return 0


def is_frame(tokens: Sequence[str], place: int) -> bool:
    return tokens[place] in FRAMES and tokens[place + 1 : place + 2] == ["of"]


def is_quantity(tokens: Sequence[str], place: int) -> bool:
    return tokens[place] in QUANTITIES and tokens[place + 1 : place + 2] == ["of"]


def is_lead(tokens: Sequence[str], place: int) -> bool:
    """Whether a preposition only leads to a relation of several words: ``to the`` left of."""
    return tokens[place + 1 : place + 2] == ["the"] and long_relation(tokens, place + 2) > 0
