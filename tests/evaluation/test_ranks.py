"""Ranks by counting, against a loop that anyone can check by eye."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file

from counterfoil.core.errors import DataError
from counterfoil.evaluation import Positives, count_ranks, count_ranks_of, top_k
from counterfoil.evaluation.ranks import THREAD_CELLS, count_ranks_of_groups

ORACLE = load_file(Path(__file__).parents[1] / "oracle" / "retrieval-metrics.safetensors")


def looped(scores: NDArray, image_of: NDArray) -> tuple[dict[int, int], dict[int, int]]:
    """Ranks of images and of texts, from their definition."""
    n_images, n_texts = scores.shape
    i2t, t2i = {}, {}
    for i in range(n_images):
        own = [scores[i, j] for j in range(n_texts) if image_of[j] == i]
        if own:
            others = [scores[i, j] for j in range(n_texts) if image_of[j] != i]
            i2t[i] = sum(score >= max(own) for score in others)
    for j in range(n_texts):
        own = scores[image_of[j], j]
        t2i[j] = sum(scores[i, j] >= own for i in range(n_images) if i != image_of[j])
    return i2t, t2i


@st.composite
def problems(draw: st.DrawFn, levels: int = 4) -> tuple[NDArray, NDArray]:
    """A small score matrix full of ties, with captions ragged and in any order."""
    n_images, n_texts = draw(st.integers(1, 7)), draw(st.integers(1, 12))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    scores = rng.integers(-levels, levels, size=(n_images, n_texts)) / 4
    return scores.astype(np.float32), rng.integers(0, n_images, size=n_texts)


@given(problems(), st.integers(1, 9))
def test_ranks_equal_those_of_a_naive_loop_whatever_the_chunk(problem, chunk_rows):
    scores, image_of = problem
    i2t, t2i = looped(scores, image_of)
    result = count_ranks(scores, image_of, chunk_rows=chunk_rows)
    assert dict(zip(result.images.tolist(), result.i2t.tolist(), strict=True)) == i2t
    assert dict(zip(result.texts.tolist(), result.t2i.tolist(), strict=True)) == t2i


@given(problems(), st.randoms(use_true_random=False))
def test_permuting_images_and_texts_permutes_the_ranks(problem, random):
    scores, image_of = problem
    rows, columns = list(range(scores.shape[0])), list(range(scores.shape[1]))
    random.shuffle(rows)
    random.shuffle(columns)
    before = count_ranks(scores, image_of)
    after = count_ranks(scores[rows][:, columns], np.argsort(rows)[image_of[columns]])
    ranks = dict(zip(before.images.tolist(), before.i2t.tolist(), strict=True))
    assert [ranks[rows[image]] for image in after.images] == after.i2t.tolist()
    assert before.t2i[columns].tolist() == after.t2i.tolist()


@given(st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_with_one_caption_each_transposing_swaps_the_directions(size, seed):
    scores = np.random.default_rng(seed).integers(0, 3, size=(size, size)).astype(np.float64)
    straight = count_ranks(scores, np.arange(size))
    turned = count_ranks(scores.T, np.arange(size))
    assert straight.i2t.tolist() == turned.t2i.tolist()
    assert straight.t2i.tolist() == turned.i2t.tolist()


@given(problems())
def test_half_single_double_torch_and_numpy_agree(problem):
    scores, image_of = problem
    expected = count_ranks(scores, image_of)
    tensor = torch.from_numpy(scores)
    forms = [scores.astype(np.float16), scores.astype(np.float64), np.asfortranarray(scores)]
    for form in [*forms, tensor, tensor.half(), tensor.bfloat16(), tensor.double()]:
        result = count_ranks(form, image_of)
        assert result.i2t.tolist() == expected.i2t.tolist()
        assert result.t2i.tolist() == expected.t2i.tolist()


def test_a_memory_mapped_matrix_is_ranked_like_one_in_memory(tmp_path):
    scores = np.random.default_rng(0).standard_normal((300, 700)).astype(np.float32)
    np.save(tmp_path / "scores.npy", scores)
    image_of = np.arange(700) % 300
    mapped = count_ranks(np.load(tmp_path / "scores.npy", mmap_mode="r"), image_of)
    assert np.array_equal(mapped.i2t, count_ranks(scores, image_of).i2t)
    assert np.array_equal(mapped.t2i, count_ranks(scores, image_of).t2i)


def test_threads_and_byte_counters_do_not_change_a_rank():
    # Constant scores make every count as large as it can be: bytes must not overflow.
    scores = np.zeros((1700, 1300), dtype=np.float32)
    assert scores.size > THREAD_CELLS
    result = count_ranks(scores, np.arange(1300), chunk_rows=1000)
    assert set(result.t2i.tolist()) == {1699}
    assert set(result.i2t.tolist()) == {1299}


def test_images_without_captions_are_left_out_but_still_compete():
    scores = np.array([[0.9, 0.1], [0.2, 0.3], [0.0, 0.8]])
    result = count_ranks(scores, [0, 1])
    assert result.images.tolist() == [0, 1]
    assert result.t2i.tolist() == [0, 1]


def test_infinite_scores_are_scores_like_any_other():
    scores = np.array([[np.inf, 0.0], [np.inf, -np.inf]])
    result = count_ranks(scores, [0, 1])
    assert result.i2t.tolist() == [0, 1]
    assert result.t2i.tolist() == [1, 1]


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_the_first_nan_is_named_by_row_and_column(make):
    scores = np.zeros((2000, 1200), dtype=np.float32)
    scores[1999, 0] = scores[40, 3] = scores[40, 7] = np.nan
    with pytest.raises(DataError, match="row 40, column 3"):
        count_ranks(make(scores), np.zeros(1200, dtype=np.int64))


@pytest.mark.parametrize(
    ("image_of", "message"),
    [
        ([0, 1], "each of the 3 texts"),
        ([0, 1, 2], r"image_of\[2\] is 2"),
        ([0, -1, 0], r"image_of\[1\] is -1"),
        ([0.0, 1.0, 1.0], "integers"),
    ],
)
def test_positives_that_do_not_fit_the_matrix_are_refused(image_of, message):
    with pytest.raises(DataError, match=message):
        count_ranks(np.zeros((2, 3)), image_of)


def test_anything_but_a_matrix_is_refused():
    with pytest.raises(DataError, match="matrix"):
        count_ranks(np.zeros(3), [0, 0, 0])


def test_the_scores_given_are_not_changed():
    scores = np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32)
    before = scores.copy()
    count_ranks(scores, np.arange(6))
    assert np.array_equal(scores, before)


def test_positives_may_differ_between_the_directions():
    scores = np.array([[0.1, 0.9], [0.8, 0.2]])
    i2t = Positives.from_pairs([(0, 0), (0, 1), (1, 1)], 2, 2)
    t2i = Positives.from_pairs([(0, 0)], 2, 2)
    result = count_ranks_of(scores, i2t, t2i)
    assert result.i2t.tolist() == [0, 1]
    assert (result.t2i.tolist(), result.texts.tolist()) == ([1], [0])


def test_ranks_and_best_answers_match_the_public_implementation():
    sims, image_of = ORACLE["in.sims"], np.arange(250) // 5
    result = count_ranks(sims, image_of)
    assert result.i2t.tolist() == ORACLE["out.scan.i2t_ranks"].tolist()
    assert result.t2i.tolist() == ORACLE["out.scan.t2i_ranks"].tolist()
    assert top_k(sims, 1)[:, 0].tolist() == ORACLE["out.scan.i2t_top1"].tolist()
    assert top_k(sims.T, 1)[:, 0].tolist() == ORACLE["out.scan.t2i_top1"].tolist()


@given(problems(), st.integers(1, 14), st.integers(1, 5))
def test_top_k_is_a_stable_sort_cut_short(problem, k, chunk_rows):
    scores, _ = problem
    full = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    assert top_k(scores, k, chunk_rows=chunk_rows).tolist() == full.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_identical_captions_are_right_for_every_image_that_has_one(seed) -> None:
    rng = np.random.default_rng(seed)
    n_images, n_texts = int(rng.integers(2, 9)), int(rng.integers(3, 30))
    image_of = rng.integers(0, n_images, n_texts)
    groups = rng.integers(0, max(2, n_texts // 2), n_texts)
    scores = rng.integers(0, 5, (n_images, n_texts)).astype(np.float32)  # many ties
    own = [{int(g) for g, i in zip(groups, image_of, strict=True) if i == n}
           for n in range(n_images)]  # fmt: skip
    right = np.array([[int(g) in own[i] for g in groups] for i in range(n_images)])
    result = count_ranks_of_groups(scores, image_of, groups, chunk_rows=int(rng.integers(1, 4)))
    for rank, image in zip(result.i2t, result.images, strict=True):
        best = scores[image, right[image]].max()
        assert rank == (scores[image, ~right[image]] >= best).sum()
    for text, rank in enumerate(result.t2i):
        best = scores[right[:, text], text].max()
        assert rank == (scores[~right[:, text], text] >= best).sum()
    assert result.images.tolist() == sorted(set(image_of.tolist()))


def test_captions_that_are_all_different_are_ranked_as_ever() -> None:
    rng = np.random.default_rng(0)
    image_of = np.sort(rng.integers(0, 7, 31))
    scores = rng.normal(size=(8, 31)).astype(np.float32)
    usual = count_ranks(scores, image_of)
    result = count_ranks_of_groups(scores, image_of, np.arange(31))
    assert (result.i2t == usual.i2t).all()
    assert (result.t2i == usual.t2i).all()
    assert (result.images == usual.images).all()
