"""How well scene graphs are extracted: against true graphs, or one extractor against another.

The true graph of a drawn scene's caption comes from the truth of its words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from counterfoil.data.scenes import SceneCaption, Word
from counterfoil.data.text.words import words
from counterfoil.foils.scene_graph import ATTRIBUTE, KINDS, OBJECT, RELATION, SceneGraph, Unit

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
_NOT_RELATING = frozenset({"is", "are", "it"})

ALL = "all"
Thing = tuple[str, object]


@dataclass(frozen=True)
class Agreement:
    """What is found and what is true; ``common`` is both. With no truth, precision is of one side
    as seen from the other."""

    found: int
    true: int
    common: int

    @property
    def precision(self) -> float:
        """1 where nothing was found."""
        return self.common / self.found if self.found else 1.0

    @property
    def recall(self) -> float:
        """1 where there was nothing to find."""
        return self.common / self.true if self.true else 1.0

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall."""
        return 2 * self.common / (self.found + self.true) if self.found + self.true else 1.0

    def as_dict(self) -> dict[str, float]:
        return {
            **asdict(self),
            "precision": self.precision,
            "recall": self.recall,
            "f1": self.f1,
        }


@dataclass(frozen=True)
class GraphReport:
    """Agreement by kind and over all: of whole units, and of single words with their kinds.

    A unit counts when its kind and all its words are right. ``covered`` asks only whether a word is
    in any unit, which is all that masking needs to know of it.
    """

    captions: int
    units: dict[str, Agreement]
    words: dict[str, Agreement]
    covered: Agreement

    def as_dict(self) -> dict[str, Any]:
        return {
            "captions": self.captions,
            "units": {kind: value.as_dict() for kind, value in self.units.items()},
            "words": {kind: value.as_dict() for kind, value in self.words.items()},
            "covered": self.covered.as_dict(),
        }

    def to_markdown(self) -> str:
        head = "| kind | units P | R | F1 | words P | R | F1 | units true |"
        lines = [head, "| --- " + "| ---: " * 7 + "|"]
        for kind in (*KINDS, ALL):
            unit, word = self.units[kind], self.words[kind]
            shown = (unit.precision, unit.recall, unit.f1, word.precision, word.recall, word.f1)
            lines.append(f"| {kind} | {' | '.join(f'{x:.3f}' for x in shown)} | {unit.true} |")
        covered = self.covered
        lines.append(
            f"\nwords in any unit: P {covered.precision:.3f}, R {covered.recall:.3f}, "
            f"F1 {covered.f1:.3f}; {self.captions} captions"
        )
        return "\n".join(lines)


def compare_graphs(pairs: Iterable[tuple[SceneGraph, SceneGraph]]) -> GraphReport:
    """Agreement of graphs with the true ones (or others), given as pairs (found, true)."""
    units, single, covered = _Counts(), _Counts(), _Counts()
    captions = 0
    for found, true in pairs:
        captions += 1
        units.add(_units(found), _units(true))
        single.add(_words(found), _words(true))
        covered.add(_covered(found), _covered(true))
    return GraphReport(
        captions,
        {kind: units.of(kind) for kind in (*KINDS, ALL)},
        {kind: single.of(kind) for kind in (*KINDS, ALL)},
        covered.of(ALL),
    )


class _Counts:
    """Sizes of sets and of what they have in common, by the kind that each member begins with."""

    def __init__(self) -> None:
        self.sides: tuple[Counter[str], ...] = (Counter(), Counter(), Counter())

    def add(self, found: set[Thing], true: set[Thing]) -> None:
        for counter, side in zip(self.sides, (found, true, found & true), strict=True):
            counter.update(kind for kind, _ in side)

    def of(self, kind: str) -> Agreement:
        found, true, common = (
            counter.total() if kind == ALL else counter[kind] for counter in self.sides
        )
        return Agreement(found, true, common)


def _units(graph: SceneGraph) -> set[Thing]:
    return {(unit.kind, unit.positions) for unit in graph.units()}


def _words(graph: SceneGraph) -> set[Thing]:
    return {(unit.kind, place) for unit, place in _places(graph)}


def _covered(graph: SceneGraph) -> set[Thing]:
    return {("", place) for _, place in _places(graph)}


def _places(graph: SceneGraph) -> list[tuple[Unit, int]]:
    return [(unit, place) for unit in graph.units() for place in unit.positions]


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
