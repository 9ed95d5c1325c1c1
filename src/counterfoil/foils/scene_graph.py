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
    """A node of a scene graph: its kind, and the indices of its words among a caption's `words`.

    Indices ascend; they need not be consecutive.
    """

    positions: tuple[int, ...]
    kind: str


@dataclass(frozen=True)
class SceneGraph:
    """Objects, attributes and relations of a caption.

    An object is a noun with the nouns that qualify it (``soccer ball``). An attribute is one word
    about an object: an adjective, a number, a verb without an object (``a girl cries``). A
    relation holds between two objects: a preposition, a verb with an object, or a verb and the
    preposition next to it (``sitting on``).
    """

    objects: tuple[Unit, ...] = ()
    attributes: tuple[Unit, ...] = ()
    relations: tuple[Unit, ...] = ()

    @classmethod
    def of(cls, units: Iterable[Unit]) -> SceneGraph:
        """A graph of units in any order; duplicates are dropped.

        >>> SceneGraph.of([Unit((2,), "object"), Unit((1,), "attribute")]).units()
        [Unit(positions=(1,), kind='attribute'), Unit(positions=(2,), kind='object')]
        """
        ordered = sorted(set(units))
        return cls(*(tuple(unit for unit in ordered if unit.kind == kind) for kind in KINDS))

    def units(self) -> list[Unit]:
        """Units of all kinds, in the order of their words."""
        return sorted((*self.objects, *self.attributes, *self.relations))

    def kind_of(self, positions: Collection[int]) -> str:
        """The kinds of the units that an edit at these positions touches, joined by ``+``.

        ``word`` if no unit has any of the positions.

        >>> SceneGraph.of([Unit((2,), "object"), Unit((1,), "attribute")]).kind_of([1, 2])
        'object+attribute'
        """
        touched = {
            unit.kind for unit in self.units() if not set(positions).isdisjoint(unit.positions)
        }
        return "+".join(kind for kind in KINDS if kind in touched) or PLAIN_WORD


class GraphExtractor(Protocol):
    """Parses a caption into its scene graph."""

    def extract(self, caption: str) -> SceneGraph: ...


# Words that all extractors treat the same way, so that their graphs are comparable.

# "a picture of a dog" is about a dog: the picture itself is not shown.
_FRAMES = "picture photo photograph drawing painting image view shot scene sort kind"
# "a group of men": a quantity, as a number would be.
_QUANTITIES = "group groups couple pair pairs bunch crowd number lot lots set dozens team row rows"
FRAMES, QUANTITIES = frozenset(_FRAMES.split()), frozenset(_QUANTITIES.split())
# Words whose falsehood cannot be seen in an image.
NOT_ATTRIBUTES = frozenset({"other", "own", "such", "same", "about", "more", "most", "next", "due"})
NOT_OBJECTS = frozenset({"other", "others", "one", "ones"})
NOT_RELATIONS = frozenset({"of", "as", "than"})
# "can be seen" is about the viewer, not the scene.
VIEWING = frozenset({"see", "sees", "seen", "seeing", "depict", "depicts", "depicted"})

_LONG = frozenset(LONG_RELATIONS) | {("out", "of"), ("in", "back", "of"), ("across", "from")}


def long_relation(tokens: Sequence[str], index: int) -> int:
    """Length of the multi-word relation that begins here; 0 if there is none.

    >>> long_relation("a dog in front of a bus".split(), 2)
    3
    """
    for length in (3, 2):
        if index + length <= len(tokens) and tuple(tokens[index : index + length]) in _LONG:
            return length
    return 0


def is_frame(tokens: Sequence[str], index: int) -> bool:
    return tokens[index] in FRAMES and tokens[index + 1 : index + 2] == ["of"]


def is_quantity(tokens: Sequence[str], index: int) -> bool:
    return tokens[index] in QUANTITIES and tokens[index + 1 : index + 2] == ["of"]


def is_lead(tokens: Sequence[str], index: int) -> bool:
    """Whether a preposition only introduces a multi-word relation: ``to the`` left of."""
    return tokens[index + 1 : index + 2] == ["the"] and long_relation(tokens, index + 2) > 0


_OBJECT_BEGINS = (DETERMINER, ADJECTIVE, NUMBER, NOUN, PRONOUN)


class RuleExtractor:
    """Objects, attributes and relations by word lists and rules, without a model.

    >>> graph = RuleExtractor().extract("A small dog sits on the red table.")
    >>> [unit.positions for unit in graph.relations]
    [(3, 4)]
    """

    def extract(self, caption: str) -> SceneGraph:
        tokens = words(caption)
        tags = tag(tokens)
        relating = _relations(tokens, tags)
        for positions, _ in relating:
            for index in positions:
                tags[index] = RELATION
        units = [Unit(positions, kind) for positions, kind in relating if kind]
        return SceneGraph.of([*units, *_objects(tokens, tags), *_attributes(tokens, tags)])


Relating = tuple[tuple[int, ...], str]


def _relations(tokens: Tokens, tags: list[str]) -> list[Relating]:
    """Verbs and prepositions, each with its kind: relation, attribute, or none (empty)."""
    relations: list[Relating] = []
    index = 0
    while index < len(tokens):
        end = _end(tokens, tags, index)
        if end > index:
            relations += _read(tokens, tags, index, end)
        index = max(end, index + 1)
    return relations


def _end(tokens: Tokens, tags: list[str], index: int) -> int:
    """End of the verb and prepositions that begin here; ``index`` if there are none."""
    end = index + 1 if tags[index] == VERB else index
    while end < len(tokens):
        length = long_relation(tokens, end)
        if not length and _is_preposition(tokens, tags, end):
            length = 1
        if not length:
            break
        end += length
    return end


def _is_preposition(tokens: Tokens, tags: list[str], index: int) -> bool:
    if is_lead(tokens, index):
        return False
    to_object = tags[index] == TO and index + 1 < len(tags) and tags[index + 1] in _OBJECT_BEGINS
    return to_object or tags[index] == PREPOSITION


def _read(tokens: Tokens, tags: list[str], start: int, end: int) -> Iterator[Relating]:
    has_object = _object_follows(tokens, tags, end)
    positions = tuple(range(start, end))
    if tokens[start] in VIEWING or (tags[start] != VERB and not has_object):
        yield positions, ""
    elif not has_object or (tags[start] == VERB and tokens[end - 1] == "of" and end - start == 2):
        yield positions[:1], ATTRIBUTE
    elif end - start == 1 and tokens[start] in NOT_RELATIONS:
        yield positions, ""
    else:
        yield positions, RELATION


def _object_follows(tokens: Tokens, tags: list[str], index: int) -> bool:
    """Whether a noun phrase follows; a color counts as one (``in red``), ``ready`` does not."""
    while index < len(tags) and tags[index] == ADVERB:
        index += 1
    if index == len(tags) or tags[index] not in _OBJECT_BEGINS:
        return False
    if tags[index] != ADJECTIVE or tokens[index] in COLORS:
        return True
    while index < len(tags) and tags[index] in (ADJECTIVE, CONJUNCTION, SIGN, NUMBER):
        index += 1
    return index < len(tags) and tags[index] == NOUN


def _objects(tokens: Tokens, tags: list[str]) -> Iterator[Unit]:
    """Runs of nouns, without those that only introduce the object (``a picture of``)."""
    index = 0
    while index < len(tokens):
        end = index
        while end < len(tokens) and tags[end] == NOUN:
            end += 1
        if end > index:
            if is_quantity(tokens, end - 1):
                yield Unit((end - 1,), ATTRIBUTE)
            elif not (is_frame(tokens, end - 1) or tokens[end - 1] in NOT_OBJECTS):
                yield Unit(tuple(range(index, end)), OBJECT)
        index = end + 1


def _attributes(tokens: Tokens, tags: list[str]) -> Iterator[Unit]:
    for index, word in enumerate(tokens):
        if tags[index] in (ADJECTIVE, NUMBER) and word not in NOT_ATTRIBUTES:
            yield Unit((index,), ATTRIBUTE)
