"""The true scene graph of a drawn scene's caption, from the truth of its words."""

from __future__ import annotations

from collections.abc import Iterator

from counterfoil.data.scenes import SceneCaption, Word
from counterfoil.data.words import words
from counterfoil.foils.graph import ATTRIBUTE, OBJECT, RELATION, SceneGraph, Unit

_KIND_OF_ROLE = {
    "noun": OBJECT,
    "position": OBJECT,
    "colour": ATTRIBUTE,
    "size": ATTRIBUTE,
    "pattern": ATTRIBUTE,
    "count": ATTRIBUTE,
}
# Words without a role of their own that stand for something in the picture all the same.
GARMENTS = frozenset({"shirt", "shirts", "dress", "dresses", "clothes"})
SURROUNDINGS = frozenset(
    {"meadow", "beach", "sea", "street", "city", "room", "park", "path", "snow", "winter", "day"}
)
LEADS = frozenset({"in", "on", "at", "by", "near", "wearing", "with"})
# … and words that stand for nothing.
EMPTY = frozenset(
    {"a", "an", "the", "and", "is", "are", "there", "it", "to", "of", "picture", "drawing"}
    | {"you", "can", "see", "outdoors", "indoors"}
)
_NOT_RELATING = frozenset({"is", "are", "it"})


def true_graph(caption: SceneCaption) -> SceneGraph:
    """Objects, attributes and relations as the scene's words are known to be.

    Counts are attributes, as in SPICE; a place within the picture is an object (``on the left``).
    A relation has all the words that tell it, so ``sitting on`` is one; ``is`` tells nothing.
    """
    places = [place for place, word in enumerate(words(caption.text)) if word[0].isalnum()]
    units = (
        Unit(tuple(places[number] for number in numbers), kind)
        for span in sorted({word.phrase for word in caption.words})
        for numbers, kind in _units_of_phrase(caption.words, *span)
    )
    return SceneGraph.of(units)


def _units_of_phrase(
    spoken: tuple[Word, ...], start: int, end: int
) -> Iterator[tuple[tuple[int, ...], str]]:
    numbers = range(start, end)
    if any(spoken[number].kind == "relation" for number in numbers):
        yield _relating(spoken, start, end), RELATION
        return
    for number in numbers:
        role = spoken[number].role.split(":")[0]
        if role:
            yield (number,), _KIND_OF_ROLE[role]
    things = tuple(number for number in numbers if spoken[number].text in GARMENTS | SURROUNDINGS)
    if things:
        yield things, OBJECT
    lead = spoken[start]
    if not lead.role and lead.text in LEADS:
        yield (start,), RELATION


def _relating(spoken: tuple[Word, ...], start: int, end: int) -> tuple[int, ...]:
    """The words of a relation: without ``is``, without the ``to the`` of ``to the left of``."""
    told = [number for number in range(start, end) if spoken[number].text not in _NOT_RELATING]
    if [spoken[number].text for number in told[:2]] == ["to", "the"]:
        told = told[2:]
    return tuple(told)
