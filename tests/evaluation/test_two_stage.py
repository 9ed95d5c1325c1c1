"""Two stages of retrieval against plain loops over sorted lists."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import counterfoil as cf
from counterfoil.core.errors import ConfigError, DataError
from counterfoil.evaluation.evaluate import report_scores
from counterfoil.evaluation.retrieval import retrieval
from counterfoil.evaluation.two_stage import _fill_unlisted, score_two_stages
from counterfoil.scoring.encode import score_split


@pytest.fixture(scope="module")
def fast(concepts):
    return cf.create("vse-fc", concepts, embed_size=8, text={"word_dim": 4}).eval()


@pytest.fixture(scope="module")
def slow(concepts):
    matcher = {"layers": 1, "heads": 2}
    model = cf.create("uniter-small", concepts, seed=1, embed_size=16, matcher=matcher).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def distinct(concepts):
    """Test images no two captions of which are the same, so that no two scores are."""
    split, kept, seen = concepts.test, [], set()
    for image, texts in enumerate(split.captions):
        if len(set(texts)) == len(texts) and seen.isdisjoint(texts):
            kept.append(image)
            seen.update(texts)
    assert len(kept) > 20
    return split.select(kept)


def naive_rank(first: np.ndarray, second: np.ndarray, right: set[int], top: int) -> int:
    """Place of the best right answer: the list by the second stage, then the rest by the first."""
    order = sorted(range(len(first)), key=lambda j: -first[j])
    listed, rest = order[:top], order[top:]
    ranking = sorted(listed, key=lambda j: -second[j]) + rest
    return min(ranking.index(j) for j in right)


def naive_recalls(first: np.ndarray, second: np.ndarray, image_of, top: int, k: int):
    """R@k both ways, and how often an answer is on the list."""
    images = [set(np.flatnonzero(image_of == row)) for row in range(len(first))]
    texts = [{int(owner)} for owner in image_of]
    results = []
    for a, b, answers in ((first, second, images), (first.T, second.T, texts)):
        ranks = [naive_rank(a[q], b[q], right, top) for q, right in enumerate(answers)]
        lists = [set(np.argsort(-row)[:top].tolist()) for row in a]
        on_list = [bool(result & right) for result, right in zip(lists, answers, strict=True)]
        results.append((100 * np.mean(np.array(ranks) < k), 100 * np.mean(on_list)))
    return results


@pytest.mark.parametrize("top", [1, 3, 10, 100])
def test_recalls_are_those_of_plain_lists(distinct, fast, slow, top) -> None:
    split = distinct
    first, second = score_split(fast, split), score_split(slow, split)
    result = score_two_stages([slow], split, first, shortlist_size=top)
    report = result.report("test", bootstrap=10)
    for k in (1, 5, 10):
        (i2t, images), (t2i, texts) = naive_recalls(
            first.scores.numpy(), second.scores.numpy(), first.image_of, top, k
        )
        assert report.i2t.recalls[k] == pytest.approx(i2t)
        assert report.t2i.recalls[k] == pytest.approx(t2i)
        assert result.lists.i2t_recall == pytest.approx(images)
        assert result.lists.t2i_recall == pytest.approx(texts)
    assert report.rsum == pytest.approx(
        sum(report.i2t.recalls.values()) + sum(report.t2i.recalls.values())
    )
    assert report.rsum_interval[0] <= report.rsum <= report.rsum_interval[1]


def test_only_what_is_listed_is_scored(concepts, fast, slow) -> None:
    split, scored = concepts.test, []
    first = score_split(fast, split)

    def count(_module, args) -> None:
        scored.append(len(args[0]) * len(args[1]))

    hook = slow.matcher.register_forward_pre_hook(count)
    result = score_two_stages([slow], split, first, shortlist_size=4)
    hook.remove()
    assert sum(scored) == result.lists.scored <= 4 * (32 + 64)
    assert result.lists.pairs == 32 * 64
    assert f"{result.lists.scored:,} of 2,048 pairs" in result.lists.note()


def test_a_list_of_everything_is_exhaustive_scoring(distinct, fast, slow) -> None:
    split = distinct
    result = score_two_stages([slow], split, score_split(fast, split), shortlist_size=1000)
    whole = report_scores([score_split(slow, split)], "test", bootstrap=0, captions=split.texts)
    assert result.report("test", bootstrap=0) == whole
    assert (result.lists.i2t_recall, result.lists.t2i_recall) == (100.0, 100.0)


def test_an_ensemble_ranks_by_the_mean(concepts, distinct, fast, slow) -> None:
    split = distinct
    first, scan = score_split(fast, split), cf.create("scan-t2i", concepts, embed_size=8)
    result = score_two_stages([slow, scan], split, first, shortlist_size=1000)
    scores = [score_split(slow, split), score_split(scan, split)]
    both = report_scores(scores, "test", bootstrap=0, captions=split.texts)
    assert result.report("test", bootstrap=0) == both
    assert scan.training


def test_lists_of_folds_stay_in_their_fold(concepts, fast, slow) -> None:
    split = concepts.test
    first = score_split(fast, split)
    result = score_two_stages([slow], split, first, shortlist_size=3, folds=4)
    report = result.report("test", folds=4, bootstrap=0)
    parts = []
    for start in range(0, 32, 8):
        part = split.select(range(start, start + 8))
        alone = score_two_stages([slow], part, score_split(fast, part), shortlist_size=3)
        parts.append(alone.report("test", bootstrap=0).rsum)
    assert report.rsum == pytest.approx(np.mean(parts))


class Unreadable:
    """Fragments of which some images cannot be read."""

    def __init__(self, table, rows: set[int]) -> None:
        self.table, self.rows = table, rows

    def __len__(self) -> int:
        return len(self.table)

    def read(self, row: int):
        if row in self.rows:
            raise DataError("damaged")
        return self.table.read(row)

    compact = read


def test_what_either_stage_cannot_read_is_left_out_of_both(concepts, fast, slow) -> None:
    split = concepts.test
    one = replace(split, fragments=Unreadable(split.fragments, {0, 5}))
    two = replace(split, fragments=Unreadable(split.fragments, {5, 31}))
    result = score_two_stages([slow], two, score_split(fast, one), shortlist_size=3)
    rest = split.select([i for i in range(32) if i not in (0, 5, 31)])
    alone = score_two_stages([slow], rest, score_split(fast, rest), shortlist_size=3)
    assert result.report("test", bootstrap=0) == alone.report("test", bootstrap=0)
    assert len(result.skipped) == 3
    none, first = replace(one, fragments=Unreadable(split.fragments, set(range(1, 32)))), one
    with pytest.raises(DataError, match="by both stages"):
        score_two_stages([slow], none, score_split(fast, first), shortlist_size=3)


def test_an_empty_list_is_refused(concepts, fast, slow) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        score_two_stages([slow], concepts.test, score_split(fast, concepts.test), shortlist_size=0)


@given(st.integers(0, 10_000))
def test_what_is_not_listed_comes_after_the_list_in_the_first_order(seed) -> None:
    rng = np.random.default_rng(seed)
    scores, first = rng.normal(size=(2, 4, 7)).astype(np.float32)
    listed = np.zeros((4, 7), dtype=bool)
    np.put_along_axis(listed, np.argsort(-first, axis=1)[:, :3], True, axis=1)
    ranked = np.argsort(-_fill_unlisted(scores, listed, first), axis=1)
    for row in range(4):
        mine = [j for j in ranked[row] if listed[row, j]]
        assert mine == sorted(mine, key=lambda j: -scores[row, j])
        assert ranked[row, 3:].tolist() == np.argsort(-first[row])[3:].tolist()


def test_the_directions_may_have_scores_of_their_own() -> None:
    rng = np.random.default_rng(0)
    one, two = rng.normal(size=(2, 12, 24))
    image_of = np.repeat(np.arange(12), 2)
    for more in ({}, {"protocol": "folds", "folds": 3}):
        both = retrieval(one, image_of, text_scores=two, bootstrap=20, **more)
        assert both.i2t == retrieval(one, image_of, bootstrap=20, **more).i2t
        apart = retrieval(two, image_of, bootstrap=20, **more)
        assert both.t2i == apart.t2i
    with pytest.raises(DataError, match="text_scores"):
        retrieval(one, image_of, text_scores=two[:5])
