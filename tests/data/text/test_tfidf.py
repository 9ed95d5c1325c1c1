"""Caption semantics: Porter's stems, TF-IDF against a loop, the SVD against LAPACK."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from counterfoil.core.errors import ConfigError
from counterfoil.data.text.tfidf import caption_space, stems, tf_idf, truncated_svd
from counterfoil.data.text.words import stem

# The examples that accompany the rules in Porter (1980), as they leave the whole algorithm.
CLASSIC = {
    "caresses": "caress", "ponies": "poni", "ties": "ti", "caress": "caress", "cats": "cat",
    "feed": "feed", "agreed": "agre", "plastered": "plaster", "bled": "bled", "motoring": "motor",
    "sing": "sing", "conflated": "conflat", "troubled": "troubl", "sized": "size", "hopping": "hop",
    "tanned": "tan", "falling": "fall", "hissing": "hiss", "fizzed": "fizz", "failing": "fail",
    "filing": "file", "happy": "happi", "sky": "sky", "relational": "relat",
    "conditional": "condit", "rational": "ration", "valenci": "valenc", "hesitanci": "hesit",
    "digitizer": "digit", "conformabli": "conform", "radicalli": "radic", "differentli": "differ",
    "vileli": "vile", "analogousli": "analog", "vietnamization": "vietnam", "predication": "predic",
    "operator": "oper", "feudalism": "feudal", "decisiveness": "decis", "hopefulness": "hope",
    "callousness": "callous", "formaliti": "formal", "sensitiviti": "sensit",
    "sensibiliti": "sensibl", "triplicate": "triplic", "formative": "form", "formalize": "formal",
    "electriciti": "electr", "electrical": "electr", "hopeful": "hope", "goodness": "good",
    "revival": "reviv", "allowance": "allow", "inference": "infer", "airliner": "airlin",
    "gyroscopic": "gyroscop", "adjustable": "adjust", "defensible": "defens", "irritant": "irrit",
    "replacement": "replac", "adjustment": "adjust", "dependent": "depend", "adoption": "adopt",
    "homologou": "homolog", "communism": "commun", "activate": "activ", "angulariti": "angular",
    "homologous": "homolog", "effective": "effect", "bowdlerize": "bowdler", "probate": "probat",
    "rate": "rate", "cease": "ceas", "controll": "control", "roll": "roll",
    "generalizations": "gener", "oscillators": "oscil",
}  # fmt: skip

WORDS = ["dog", "dogs", "cat", "running", "runs", "red", "the", "a", ".", "ball", "balls"]
CAPTIONS = st.lists(st.lists(st.sampled_from(WORDS)).map(" ".join), max_size=12)


@pytest.mark.parametrize(("word", "expected"), CLASSIC.items())
def test_stems_are_those_of_the_published_algorithm(word, expected) -> None:
    assert stem(word) == expected


@given(st.text(max_size=20))
def test_any_text_has_a_stem_no_longer_than_itself(word) -> None:
    assert len(stem(word)) <= len(word)


def test_stop_words_and_punctuation_say_nothing() -> None:
    assert stems("There is a dog, isn't there?") == ["dog"]
    assert stems("... -- !") == []


def naive_tf_idf(captions: list[str]) -> dict[tuple[int, str], float]:
    rows = [Counter(stems(caption)) for caption in captions]
    result = {}
    for number, row in enumerate(rows):
        weights = {}
        for term, count in row.items():
            holding = sum(term in other for other in rows)
            weights[term] = count * (math.log((1 + len(captions)) / (1 + holding)) + 1)
        length = math.sqrt(sum(weight**2 for weight in weights.values()))
        result |= {(number, term): weight / length for term, weight in weights.items()}
    return result


@given(CAPTIONS)
@settings(deadline=None)
def test_tf_idf_equals_a_naive_loop(captions) -> None:
    matrix = tf_idf(captions)
    dense = matrix.tensor().to_dense()
    result = {
        (int(row), matrix.terms[int(column)]): float(dense[row, column])
        for row, column in dense.nonzero()
    }
    assert result == pytest.approx(naive_tf_idf(captions), rel=1e-5)


@given(CAPTIONS, st.integers(1, 12))
@example([], 3)
@example(["the"], 3)
@settings(deadline=None)
def test_with_enough_dimensions_inner_products_are_kept(captions, extra) -> None:
    matrix = tf_idf(captions).tensor()
    dim = min(matrix.shape) + extra
    vectors = truncated_svd(matrix, dim)
    dense = matrix.to_dense()
    assert vectors.shape == (len(captions), dim)
    assert vectors.dtype == torch.float32
    assert torch.allclose(vectors @ vectors.T, dense @ dense.T, atol=1e-5)
    beyond = int(torch.linalg.matrix_rank(dense, rtol=1e-4)) if dense.numel() else 0
    assert not vectors[:, beyond:].any()


def test_the_leading_dimensions_are_those_of_an_exact_svd() -> None:
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(60, 40)) * (rng.random((60, 40)) < 0.2) * 0.8 ** np.arange(40)
    left, values, right = np.linalg.svd(dense, full_matrices=False)
    vectors = truncated_svd(torch.tensor(dense, dtype=torch.float32).to_sparse(), 5)
    signs = np.sign(right[np.arange(5), np.abs(right[:5]).argmax(1)])
    assert np.allclose(vectors.numpy(), (left * values)[:, :5] * signs, atol=1e-4)


def test_vectors_depend_on_captions_and_seed_alone() -> None:
    captions = [f"a {a} near a {b}" for a in ("dog", "cat", "car") for b in ("tree", "lamp")]
    first, again = (caption_space(captions, dim=3, seed=4).vectors for _ in range(2))
    assert torch.equal(first, again)


def test_similarity_is_a_cosine_and_zero_for_captions_that_say_nothing() -> None:
    captions = ["two dogs run", "The two dogs are running.", "a red car", "", "it is on the"]
    space = caption_space(captions, dim=8)
    every = torch.arange(len(captions))
    similarity = space.similarity(every, every)
    assert similarity[0, 1] == pytest.approx(1.0, abs=1e-5)
    assert similarity[0, 2] == pytest.approx(0.0, abs=1e-5)
    assert not space.vectors[3:].any()
    assert not similarity[3:].any()
    assert space.similarity(torch.tensor([2]), torch.tensor([0, 2])).shape == (1, 2)


def test_captions_about_the_same_things_are_closer() -> None:
    animals = [f"a {a} and a {b}" for a in ("dog", "cat", "cow") for b in ("horse", "sheep")]
    streets = [f"a {a} and a {b}" for a in ("car", "bus", "van") for b in ("lamp", "sign")]
    space = caption_space(animals + streets, dim=2)
    rows = torch.arange(6)
    assert space.similarity(rows, rows).min() > space.similarity(rows, rows + 6).max()


def test_a_space_needs_a_dimension() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        caption_space(["a dog"], dim=0)
