"""The scene graph of a caption: its objects, attributes and relations, and the words of each."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

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
