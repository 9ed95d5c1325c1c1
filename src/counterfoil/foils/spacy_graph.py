"""Scene graphs from a spaCy dependency parse, and `create_extractor` by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from counterfoil.core.errors import ConfigError, nearest
from counterfoil.data.text.dependencies import SpacyPipeline
from counterfoil.data.text.words import words
from counterfoil.foils.scene_graph import (
    ATTRIBUTE,
    NOT_ATTRIBUTES,
    NOT_OBJECTS,
    NOT_RELATIONS,
    OBJECT,
    RELATION,
    VIEWING,
    GraphExtractor,
    RuleExtractor,
    SceneGraph,
    Unit,
    is_frame,
    is_lead,
    is_quantity,
    long_relation,
)

_NOUNS = ("NOUN", "PROPN")
_OBJECT_OF_VERB = frozenset({"dobj", "obj", "dative", "attr", "oprd"})
_OBJECT_OF_PREPOSITION = frozenset({"pobj", "pcomp", "prep"})

EXTRACTORS = ("rules", "spacy")


class SpacyExtractor:
    """Objects, attributes and relations from the tags and dependencies of a spaCy pipeline."""

    def __init__(self, pipeline: str = "en_core_web_sm") -> None:
        self.pipeline = SpacyPipeline(
            pipeline,
            purpose="a scene graph by spaCy",
            instead="take the built-in extractor 'rules'",
            exclude=["ner"],
        )

    def extract(self, caption: str) -> SceneGraph:
        tokens = words(caption)
        return graph_of(self.pipeline.parse(tokens)) if tokens else SceneGraph()


def graph_of(parsed: Any) -> SceneGraph:
    """The scene graph of a spaCy ``Doc`` that has tags and dependencies."""
    tokens = [token.text for token in parsed]
    relating = list(_relations(tokens, parsed))
    taken = {index for unit in relating for index in unit.positions} | {
        index + step for index in range(len(tokens)) for step in range(long_relation(tokens, index))
    }
    return SceneGraph.of([*relating, *_things(tokens, parsed, taken)])


def _relations(tokens: list[str], parsed: Any) -> Iterator[Unit]:
    """Verbs and prepositions; a verb includes the prepositions directly after it."""
    index = 0
    while index < len(tokens):
        is_verb = _is_verb(parsed[index])
        end = index + 1 if is_verb else index
        while end < len(tokens):
            single = _is_preposition(parsed[end]) and not is_lead(tokens, end)
            length = long_relation(tokens, end) or int(single)
            if not length:
                break
            end += length
        if end > index:
            yield from _read(tokens, parsed, index, end, is_verb)
        index = max(end, index + 1)


def _is_verb(token: Any) -> bool:
    return (
        token.pos_ == "VERB"
        and token.dep_ not in ("amod", "compound", "nmod")
        and token.text not in ("is", "are", "was", "were")
    )


def _is_preposition(token: Any) -> bool:
    return token.pos_ == "ADP" or (
        token.dep_ in ("prep", "agent", "dative") and token.tag_ in ("IN", "TO")
    )


def _read(tokens: list[str], parsed: Any, start: int, end: int, is_verb: bool) -> Iterator[Unit]:
    positions = tuple(range(start, end))
    children = [child for index in positions for child in parsed[index].children]
    has_object = any(c.dep_ in _OBJECT_OF_PREPOSITION and c.i >= end for c in children)
    if is_verb:
        has_object |= any(child.dep_ in _OBJECT_OF_VERB for child in parsed[start].children)
    if tokens[start] in VIEWING:
        return
    if is_verb and (not has_object or (end - start == 2 and tokens[end - 1] == "of")):
        yield Unit(positions[:1], ATTRIBUTE)
    elif has_object and not (end - start == 1 and tokens[start] in NOT_RELATIONS):
        yield Unit(positions, RELATION)


def _things(tokens: list[str], parsed: Any, taken: set[int]) -> Iterator[Unit]:
    for token in parsed:
        index = token.i
        if index in taken:
            continue
        if token.pos_ in _NOUNS and not _is_compound(token):
            if is_quantity(tokens, index):
                yield Unit((index,), ATTRIBUTE)
            elif not (is_frame(tokens, index) or token.text in NOT_OBJECTS):
                yield Unit(_with_compounds(parsed, index), OBJECT)
        elif _is_attribute(token):
            yield Unit((index,), ATTRIBUTE)


def _is_compound(token: Any) -> bool:
    return token.dep_ in ("compound", "nmod") and token.pos_ in _NOUNS and token.head.i > token.i


def _with_compounds(parsed: Any, index: int) -> tuple[int, ...]:
    start = index
    while start and _is_compound(parsed[start - 1]):
        start -= 1
    return tuple(range(start, index + 1))


def _is_attribute(token: Any) -> bool:
    if token.text in NOT_ATTRIBUTES:
        return False
    participle = token.pos_ == "VERB" and token.dep_ == "amod"
    return token.pos_ == "ADJ" or participle or (token.pos_ == "NUM" and token.dep_ == "nummod")


def create_extractor(name: str) -> GraphExtractor:
    """``rules``, ``spacy``, or ``spacy:NAME`` for another of its pipelines."""
    kind, _, pipeline = name.partition(":")
    if kind == "rules" and not pipeline:
        return RuleExtractor()
    if kind == "spacy":
        return SpacyExtractor(pipeline) if pipeline else SpacyExtractor()
    raise ConfigError(
        f"foils: unknown extractor of scene graphs '{name}'{nearest(kind, EXTRACTORS)} "
        "(known: rules, spacy, spacy:PIPELINE)"
    )
