"""How extractors of scene graphs are measured, and what the built-in one reaches on the scenes."""

from __future__ import annotations

import random

import pytest
from benchmarks._graph_metrics import (
    ALL,
    GARMENTS,
    LEADS,
    SURROUNDINGS,
    compare_graphs,
    true_graph,
)
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.data.scenes import describe, make_scene
from counterfoil.data.text.words import words
from counterfoil.evaluation.foils.truth import EMPTY_WORDS
from counterfoil.foils.scene_graph import KINDS, RuleExtractor, SceneGraph, Unit

GRAPHS = st.lists(
    st.builds(
        Unit,
        st.sets(st.integers(0, 5), min_size=1, max_size=3).map(lambda s: tuple(sorted(s))),
        st.sampled_from(KINDS),
    ),
    max_size=6,
).map(SceneGraph.of)


def scene_captions(scenes: int):
    for number in range(scenes):
        scene = make_scene((11, 0, number, 0))
        yield from describe(scene, random.Random(number), 5)


@given(st.lists(st.tuples(GRAPHS, GRAPHS), max_size=5))
def test_precision_and_recall_count_what_both_have(pairs) -> None:
    report = compare_graphs(pairs)
    assert report.captions == len(pairs)
    for kind in (*KINDS, ALL):
        result = true = common = 0
        for one, other in pairs:
            mine = [u for u in one.units() if kind in (u.kind, ALL)]
            theirs = [u for u in other.units() if kind in (u.kind, ALL)]
            result, true = result + len(mine), true + len(theirs)
            common += sum(unit in theirs for unit in mine)
        measured = report.units[kind]
        assert measured.precision == (common / result if result else 1)
        assert measured.recall == (common / true if true else 1)
    places = [
        tuple({p for unit in graph.units() for p in unit.positions} for graph in pair)
        for pair in pairs
    ]
    assert report.covered.common == sum(len(one & other) for one, other in places)


def test_a_wrong_kind_is_wrong_and_a_missing_word_costs_the_unit_only() -> None:
    result = SceneGraph.of([Unit((1,), "object"), Unit((2,), "relation")])
    true = SceneGraph.of([Unit((1,), "attribute"), Unit((2, 3), "relation")])
    report = compare_graphs([(result, true)])
    assert report.units[ALL].common == 0
    assert (report.words["relation"].precision, report.words["relation"].recall) == (1, 0.5)
    assert report.words["object"].precision == 0
    assert (report.covered.precision, report.covered.recall) == (1, pytest.approx(2 / 3))
    assert "| relation | 0.000 | 0.000 | 0.000 | 1.000 | 0.500 |" in report.to_markdown()
    assert report.as_dict()["words"]["relation"]["f1"] == pytest.approx(2 / 3)


def test_true_graphs_have_every_word_that_has_a_role() -> None:
    seen = 0
    for caption in scene_captions(60):
        graph = true_graph(caption)
        spoken = [place for place, word in enumerate(words(caption.text)) if word[0].isalnum()]
        kinds = {place: unit.kind for unit in graph.units() for place in unit.positions}
        for place, word in zip(spoken, caption.words, strict=True):
            if word.kind in KINDS:
                assert kinds[place] == word.kind
            elif word.kind == "count":
                assert kinds[place] == "attribute"
            elif word.kind == "position":
                assert kinds[place] == "object"
            seen += bool(word.role)
    assert seen > 1000


def test_the_words_without_a_role_are_all_accounted_for() -> None:
    known = GARMENTS | SURROUNDINGS | LEADS | EMPTY_WORDS
    for caption in scene_captions(200):
        for place, word in enumerate(caption.words):
            start, end = word.phrase
            relates = any(other.kind == "relation" for other in caption.words[start:end])
            assert word.role or relates or word.text in known, (caption.text, place)


def test_the_rules_find_nearly_all_of_a_scene_and_hardly_anything_else() -> None:
    extractor = RuleExtractor()
    report = compare_graphs((extractor.extract(c.text), true_graph(c)) for c in scene_captions(80))
    assert report.captions > 390
    for kind in KINDS:
        assert report.units[kind].true > 300
        assert report.units[kind].precision >= 0.99
        assert report.units[kind].recall >= 0.99
