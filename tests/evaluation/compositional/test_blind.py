"""Scores without images: the language model, lengths, and words without their order."""

from __future__ import annotations

import gzip
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.core.errors import DataError
from counterfoil.data.text.words import words
from counterfoil.evaluation.caption_model import CaptionModel, read_captions
from counterfoil.evaluation.compositional.blind import BlindScorer, shuffled
from counterfoil.evaluation.compositional.readers import Item, Subset

CAPTIONS = [
    f"{article} {adjective} {noun} {verb} on the {place}"
    for article in ("a", "the")
    for adjective in ("red", "small", "happy")
    for noun in ("dog", "cat", "man", "child")
    for verb in ("runs", "sits", "sleeps")
    for place in ("grass", "street")
]


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def model(request) -> CaptionModel:
    return CaptionModel(CAPTIONS, request.param)


@pytest.mark.parametrize("context", ["", "a", "the red dog", "unheard words here", "a red"])
def test_the_next_words_have_a_total_probability_of_one(model, context) -> None:
    """Over all known words, one unknown word, and the end."""
    position = len(words(context))
    texts = [f"{context} {word}" for word in [*model.ids, "never-seen"]]
    total = sum(math.exp(one[position]) for one in model.log_probabilities(texts))
    end = math.exp(model.log_probabilities([context])[0][-1])
    assert total + end == pytest.approx(1.0)


def test_counts_of_one_context_follow_the_formula() -> None:
    """Two words: half the captions have one, half the other, in one context."""
    model = CaptionModel(["dog"] * 102 + ["cat"] * 100, 1)
    # counts: dog 102, cat 96 (of 100, after 4 held out), end 198; no count of 1: discount 1/2
    train = 202 - 202 // 50
    counts = {"dog": 102, "cat": train - 102}
    total = 2 * train
    uniform = 1 / (2 + 2)
    for word, count in counts.items():
        expected = (count - 0.5) / total + 0.5 * 3 / total * uniform
        assert math.exp(model.log_probabilities([word])[0][0]) == pytest.approx(expected)


def test_likely_captions_have_a_higher_likelihood(model) -> None:
    if model.order > 1:
        texts = ["a red dog runs on the grass", "grass the on runs dog red a"]
        likely, unlikely = model.log_likelihood(texts)
        assert likely > unlikely


def test_longer_contexts_predict_held_out_captions_better() -> None:
    perplexities = [CaptionModel(CAPTIONS, order).perplexity for order in (1, 2)]
    assert perplexities[1] < perplexities[0]


def test_the_same_captions_give_the_same_model() -> None:
    texts = ["a red cat sleeps on the street", "the unknown"]
    one, two = (CaptionModel(CAPTIONS).log_likelihood(texts) for _ in range(2))
    assert one.tolist() == two.tolist()


def test_too_few_captions_are_refused() -> None:
    with pytest.raises(DataError, match="too few"):
        CaptionModel(["a dog"] * 5)


def test_captions_are_read_from_text_and_gzip(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("a dog\n\n  \na cat\n")
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"a dog\na cat"))
    assert read_captions(tmp_path / "a.txt") == read_captions(tmp_path / "a.gz")
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"a dog\na cat" * 99)[:20])
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe")
    for name in ("b.gz", "c.txt", "absent.txt"):
        with pytest.raises(DataError, match=name):
            read_captions(tmp_path / name)


@given(st.permutations(["a", "red", "ball", "and", "a", "blue", "dog"]))
def test_shuffled_words_forget_their_order(order) -> None:
    assert shuffled(" ".join(order)) == shuffled("a red ball and a blue dog")
    assert sorted(shuffled(" ".join(order)).split()) == sorted(order)


def test_a_changed_word_leaves_the_order_of_the_others() -> None:
    one, two = shuffled("a red ball and a dog").split(), shuffled("a blue ball and a dog").split()
    assert [word for word in one if word != "red"] == [word for word in two if word != "blue"]
    assert one != sorted(one) or one != ["a", "red", "ball", "and", "a", "dog"]


def subset(*items: Item) -> Subset:
    return Subset("s", "choice", items)


def test_without_captions_only_lengths_are_scored() -> None:
    items = subset(Item("0", ("a",), ("a dog",), ("a large dog",)))
    scores = BlindScorer().score(items)
    assert list(scores) == ["shorter caption", "longer caption"]
    (short,), (long,) = scores.values()
    assert short is not None
    assert long is not None
    assert short.scores.tolist() == [[-5.0, -11.0]]
    assert long.scores.tolist() == [[5.0, 11.0]]


def test_a_blind_score_is_the_same_for_every_image() -> None:
    model = CaptionModel(CAPTIONS)
    item = Item("0", ("a", "b"), ("a dog runs", "a cat sits"))
    for (one,) in BlindScorer(model).score(Subset("s", "square", (item,))).values():
        assert one is not None
        assert one.scores[0].tolist() == one.scores[1].tolist()


def test_word_frequencies_cannot_tell_the_order_of_words() -> None:
    model = CaptionModel(CAPTIONS)
    item = Item("0", ("a",), ("a red dog and the small cat",), ("the small dog and a red cat",))
    (one,) = BlindScorer(model).score(subset(item))["word frequencies"]
    assert one is not None
    assert one.scores[0, 0] == one.scores[0, 1]


def test_the_least_expected_word_is_the_suspect() -> None:
    model = CaptionModel(CAPTIONS)
    item = Item("0", ("a",), ("a red zebra runs on the grass.",), wrong=((6, 11),))
    (one,) = BlindScorer(model).score(Subset("s", "words", (item,)))["caption likelihood"]
    assert one is not None
    assert one.effects is not None
    start, end, _ = min(one.effects, key=lambda effect: effect[2])
    assert item.captions[0][start:end] == "zebra"
    assert np.isfinite([effect for *_, effect in one.effects]).all()
