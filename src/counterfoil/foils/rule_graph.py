"""Scene graphs by rule: a tagger of word lists and endings, then phrases read off the tags."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from counterfoil.data.words import words
from counterfoil.foils.graph import ATTRIBUTE, OBJECT, RELATION, SceneGraph, Unit
from counterfoil.foils.graph_words import (
    NOT_ATTRIBUTES,
    NOT_OBJECTS,
    NOT_RELATIONS,
    VIEWING,
    is_frame,
    is_lead,
    is_quantity,
    long_relation,
)
from counterfoil.foils.lexicon import (
    ADJECTIVE,
    ADVERB,
    COLOURS,
    CONJUNCTION,
    DETERMINER,
    NOUN,
    NUMBER,
    PREPOSITION,
    PRONOUN,
    SIGN,
    TO,
    VERB,
)
from counterfoil.foils.tagging import tag

Tokens = Sequence[str]
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
    if tags[place] != ADJECTIVE or tokens[place] in COLOURS:
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
