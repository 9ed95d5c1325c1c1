"""The scene graph of a caption (objects, attributes, relations), and its extraction by rule."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from counterfoil.data.text.words import words
from counterfoil.foils.grammar import Tokens, tag
from counterfoil.foils.lexicon import (
    ADJECTIVE,
    ADVERB,
    COLORS,
    CONJUNCTION,
    DETERMINER,
    LONG_RELATIONS,
    NOUN,
    NUMBER,
    PREPOSITION,
    PRONOUN,
    SIGN,
    TO,
    VERB,
)

OBJECT, ATTRIBUTE, RELATION = "object", "attribute", "relation"
KINDS = (OBJECT, ATTRIBUTE, RELATION)
PLAIN_WORD = "word"


@dataclass(frozen=True, order=True)
class Unit:
    """A part of a scene graph: what it is, and which of the `words` of a caption it has.

    Places ascend; they need not follow each other.
    """

    positions: tuple[int, ...]
    kind: str


@dataclass(frozen=True)
class SceneGraph:
    """What a caption speaks of.

    An object is a noun with the nouns that qualify it (``soccer ball``). An attribute is one word
    said of an object: an adjective, a number, a verb that has no object (``a girl cries``). A
    relation is what holds between two objects: a preposition, a verb with an object, or a verb and
    the preposition next to it (``sitting on``).
    """

    objects: tuple[Unit, ...] = ()
    attributes: tuple[Unit, ...] = ()
    relations: tuple[Unit, ...] = ()

    @classmethod
    def of(cls, units: Iterable[Unit]) -> SceneGraph:
        """A graph of units in any order; one that is there twice is kept once.

        >>> SceneGraph.of([Unit((2,), "object"), Unit((1,), "attribute")]).units()
        [Unit(positions=(1,), kind='attribute'), Unit(positions=(2,), kind='object')]
        """
        found = sorted(set(units))
        return cls(*(tuple(unit for unit in found if unit.kind == kind) for kind in KINDS))

    def units(self) -> list[Unit]:
        """All units, whatever their kind, in the order of their words."""
        return sorted((*self.objects, *self.attributes, *self.relations))

    def kind_of(self, positions: Collection[int]) -> str:
        """What an edit at these places is about: the kinds of the units that it touches.

        Several are joined by ``+``; ``word`` where no unit has any of the places.

        >>> SceneGraph.of([Unit((2,), "object"), Unit((1,), "attribute")]).kind_of([1, 2])
        'object+attribute'
        """
        touched = {
            unit.kind for unit in self.units() if not set(positions).isdisjoint(unit.positions)
        }
        return "+".join(kind for kind in KINDS if kind in touched) or PLAIN_WORD


class GraphExtractor(Protocol):
    """Reads the scene graph off a caption."""

    def extract(self, caption: str) -> SceneGraph: ...


# Words that every extractor treats alike, so that their graphs compare.


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


_OBJECT_BEGINS = (DETERMINER, ADJECTIVE, NUMBER, NOUN, PRONOUN)


class RuleExtractor:
    """Objects, attributes and relations by word lists and a few rules; needs no model.

    >>> graph = RuleExtractor().extract("A small dog sits on the red table.")
    >>> [unit.positions for unit in graph.relations]
    [(3, 4)]
    """

    def extract(self, caption: str) -> SceneGraph:
        tokens = words(caption)
        tags = tag(tokens)
        relating = _relations(tokens, tags)
        for places, _ in relating:
            for place in places:
                tags[place] = RELATION
        units = [Unit(places, kind) for places, kind in relating if kind]
        return SceneGraph.of([*units, *_objects(tokens, tags), *_attributes(tokens, tags)])


Relating = tuple[tuple[int, ...], str]


def _relations(tokens: Tokens, tags: list[str]) -> list[Relating]:
    """Verbs and prepositions with what they are: a relation, an attribute, or nothing (empty)."""
    found: list[Relating] = []
    place = 0
    while place < len(tokens):
        end = _end(tokens, tags, place)
        if end > place:
            found += _read(tokens, tags, place, end)
        place = max(end, place + 1)
    return found


def _end(tokens: Tokens, tags: list[str], place: int) -> int:
    """Where the verb and prepositions that begin here end; ``place`` where none does."""
    end = place + 1 if tags[place] == VERB else place
    while end < len(tokens):
        length = long_relation(tokens, end)
        if not length and _is_preposition(tokens, tags, end):
            length = 1
        if not length:
            break
        end += length
    return end


def _is_preposition(tokens: Tokens, tags: list[str], place: int) -> bool:
    if is_lead(tokens, place):
        return False
    to_object = tags[place] == TO and place + 1 < len(tags) and tags[place + 1] in _OBJECT_BEGINS
    return to_object or tags[place] == PREPOSITION


def _read(tokens: Tokens, tags: list[str], start: int, end: int) -> Iterator[Relating]:
    has_object = _object_follows(tokens, tags, end)
    places = tuple(range(start, end))
    if tokens[start] in VIEWING or (tags[start] != VERB and not has_object):
        yield places, ""
    elif not has_object or (tags[start] == VERB and tokens[end - 1] == "of" and end - start == 2):
        yield places[:1], ATTRIBUTE
    elif end - start == 1 and tokens[start] in NOT_RELATIONS:
        yield places, ""
    else:
        yield places, RELATION


def _object_follows(tokens: Tokens, tags: list[str], place: int) -> bool:
    """Whether a noun phrase comes next; a colour does for one (``in red``), ``ready`` does not."""
    while place < len(tags) and tags[place] == ADVERB:
        place += 1
    if place == len(tags) or tags[place] not in _OBJECT_BEGINS:
        return False
    if tags[place] != ADJECTIVE or tokens[place] in COLORS:
        return True
    while place < len(tags) and tags[place] in (ADJECTIVE, CONJUNCTION, SIGN, NUMBER):
        place += 1
    return place < len(tags) and tags[place] == NOUN


def _objects(tokens: Tokens, tags: list[str]) -> Iterator[Unit]:
    """Runs of nouns, but for those that only lead to what is shown."""
    place = 0
    while place < len(tokens):
        end = place
        while end < len(tokens) and tags[end] == NOUN:
            end += 1
        if end > place:
            if is_quantity(tokens, end - 1):
                yield Unit((end - 1,), ATTRIBUTE)
            elif not (is_frame(tokens, end - 1) or tokens[end - 1] in NOT_OBJECTS):
                yield Unit(tuple(range(place, end)), OBJECT)
        place = end + 1


def _attributes(tokens: Tokens, tags: list[str]) -> Iterator[Unit]:
    for place, word in enumerate(tokens):
        if tags[place] in (ADJECTIVE, NUMBER) and word not in NOT_ATTRIBUTES:
            yield Unit((place,), ATTRIBUTE)
