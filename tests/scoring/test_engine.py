"""All pairs scored tile by tile are scored as by one call, whatever becomes of the tiles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from counterfoil.core.errors import BusyError, DataError
from counterfoil.core.progress import Silent
from counterfoil.core.storage.locks import beside
from counterfoil.core.tensors import device
from counterfoil.core.tensors.device import free_memory
from counterfoil.encoders import Encoded
from counterfoil.evaluation.ranks import top_k
from counterfoil.kernels.spec import WORDS
from counterfoil.matchers import Matcher, matchers
from counterfoil.scoring import plan as score_plan
from counterfoil.scoring.engine import best_pairs, score_matrix, score_on_device, scored_tiles
from counterfoil.scoring.plan import extents, plan_for_kernels, plan_scores
from counterfoil.scoring.score_file import fingerprint, score_to_file
from tests.holding import content, held

DIM = 8


def side(lengths: list[int], seed: int, spread: bool = False) -> Encoded:
    """Unit fragments; ``spread`` lets the real ones stand anywhere."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(1, *lengths) + 2
    x = F.normalize(torch.randn(len(lengths), longest, DIM, generator=generator), dim=-1)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    if spread:
        mask = mask[:, torch.randperm(longest, generator=generator)]
    return Encoded(x * mask[..., None], mask, F.normalize(x.sum(1), dim=-1))


sizes = st.lists(st.integers(1, 64), min_size=1, max_size=9)


@given(
    name=st.sampled_from(["naaf", "scan-t2i", "scan-i2t", "bfan", "chan", "cosine", "imram"]),
    regions=st.lists(st.integers(0, 100), min_size=1, max_size=6),
    words=st.lists(st.integers(0, 64), min_size=1, max_size=9),
    cells=st.sampled_from([1, 300, 5000, None]),
    spread=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_tiles_are_what_one_call_gives(name, regions, words, cells, spread, seed) -> None:
    # where fragments may stand anywhere depends on the matcher; packed ones do not mind
    spread = spread and name in ("naaf", "scan-t2i", "bfan", "chan")
    matcher = matchers[name](DIM).eval()
    images, texts = side(regions, seed, spread), side(words, seed + 1, spread)
    with torch.inference_mode():
        direct = matcher(images, texts)
    plan = plan_scores(images, texts, cells)
    found = score_matrix(matcher, images, texts, plan=plan)
    # a caption without words scores what its matcher says, be that minus infinity
    assert torch.allclose(found, direct, atol=2e-5, rtol=1e-5, equal_nan=True)


@given(
    regions=sizes,
    words=sizes,
    cells=st.integers(1, 20_000),
    pairs=st.none() | st.integers(1, 30),
    seed=st.integers(0, 99),
)
def test_a_plan_has_every_pair_once_and_no_tile_too_large(
    regions, words, cells, pairs, seed
) -> None:
    images, texts = side(regions, seed), side(words, seed + 1)
    plan = plan_scores(images, texts, cells, pairs)
    seen = torch.zeros(len(images), len(texts), dtype=torch.long)
    for tile in plan.tiles:
        columns = plan.columns(tile)
        seen[tile.rows, columns] += 1
        rows = tile.rows.stop - tile.rows.start
        size = rows * max(regions) * len(columns) * max(words[int(c)] for c in columns)
        assert size <= cells or len(columns) == 1
        assert pairs is None or rows * len(columns) <= pairs
    assert (seen == 1).all()
    assert plan.lengths == sorted(words)


@given(
    regions=sizes,
    words=sizes,
    free=st.sampled_from([0, 1 << 10, 1 << 14, 1 << 40]),
    seed=st.integers(0, 99),
)
def test_a_plan_for_kernels_has_every_pair_once_and_minds_the_memory(
    regions, words, free, seed
) -> None:
    images, texts = side(regions, seed), side(words, seed + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score_plan, "free_memory", lambda device: free)
        plan = plan_for_kernels(images, texts, DIM)
    seen = torch.zeros(len(images), len(texts), dtype=torch.long)
    for tile in plan.tiles:
        columns = plan.columns(tile)
        seen[tile.rows, columns] += 1
        held = len(columns) * max(words[int(c)] for c in columns) * DIM
        assert 4 * 16 * held <= free or len(columns) == 1
        rows = tile.rows.stop - tile.rows.start
        assert 4 * 16 * rows * len(columns) <= free or rows == 1 or len(columns) == 1
    assert (seen == 1).all()
    assert free < 1 << 40 or len(plan.tiles) == 1
    matcher = matchers["chan"](DIM).eval()
    found = score_on_device(matcher, images, texts, plan=plan)
    assert torch.allclose(found, score_matrix(matcher, images, texts), atol=2e-5, equal_nan=True)


def test_texts_too_long_for_kernels_take_no_others_with_them() -> None:
    lengths = [5, 200, WORDS, 1, WORDS + 1]
    plan = plan_for_kernels(side([2, 3], 0), side(lengths, 1), DIM)
    groups = [[lengths[c] for c in plan.columns(tile).tolist()] for tile in plan.tiles]
    assert groups == [[1, 5, WORDS], [WORDS + 1, 200]]


def test_many_texts_are_scored_with_little_padding() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 31, (2000,), generator=generator).tolist()
    texts = Encoded(None, torch.arange(30) < torch.tensor(lengths)[:, None])
    plan = plan_scores(side([4, 4], 0), texts, 1 << 30)
    places = [tile.places for tile in plan.tiles]
    scored = sum(plan.lengths[at.stop - 1] * (at.stop - at.start) for at in places)
    assert sum(lengths) <= scored <= 1.1 * sum(lengths)
    assert all(at.stop - at.start >= 128 for at in places[:-1])


class Coarse(Matcher):
    """Scores rounded to a few levels, so that many are equal."""

    needs = "pooled"

    def __init__(self, levels: int) -> None:
        super().__init__(DIM)
        self.levels = levels

    def forward(self, images: Encoded, texts: Encoded) -> Tensor:
        assert images.pooled is not None
        assert texts.pooled is not None
        return (self.levels * (images.pooled @ texts.pooled.T)).round() / self.levels


@given(
    regions=sizes,
    words=sizes,
    cells=st.integers(1, 4000),
    k=st.integers(1, 12),
    levels=st.sampled_from([1, 2, 1000]),
)
def test_the_best_are_those_of_the_whole_matrix_ties_included(
    regions, words, cells, k, levels
) -> None:
    images, texts, matcher = side(regions, 3), side(words, 4), Coarse(levels)
    plan = plan_scores(images, texts, cells)
    whole = score_matrix(matcher, images, texts, plan=plan)
    best = best_pairs(matcher, images, texts, k, plan=plan)
    assert np.array_equal(best.texts.numpy(), top_k(whole, k))
    assert np.array_equal(best.images.numpy(), top_k(whole.T, k))
    assert torch.equal(best.text_scores, whole.gather(1, best.texts))
    assert torch.equal(best.image_scores, whole.T.gather(1, best.images))


def test_a_score_that_is_no_number_cannot_be_ranked() -> None:
    images, texts = side([2, 2], 0), side([3], 1)
    assert images.pooled is not None
    images.pooled[1, 0] = torch.nan
    with pytest.raises(DataError, match="not a number"):
        best_pairs(matchers["cosine"](DIM), images, texts, 1)


class Killed(Exception):
    pass


class Mortal(Silent):
    """Progress that ends the work after some tiles."""

    def __init__(self, tiles: int) -> None:
        self.tiles, self.before = tiles, 0

    def track(self, items, description, total=None, done=0):
        self.before = done
        for number, item in enumerate(items):
            if number == self.tiles:
                raise Killed
            yield item


def job():
    matcher = matchers["naaf"](DIM, boundary=0.1).eval()
    return matcher, side([3, 5, 1, 4, 4], 0), side([2, 7, 1, 9, 4, 4, 0], 1)


def test_a_matrix_on_disk_is_resumed_to_the_same_bytes_from_every_tile(tmp_path: Path) -> None:
    matcher, images, texts = job()
    whole = tmp_path / "whole.npy"
    scores = score_to_file(whole, matcher, images, texts, cells=60)
    assert np.array_equal(scores, score_matrix(matcher, images, texts, plan=plan_of(60)).numpy())
    tiles = len(plan_of(60).tiles)
    assert tiles > 5
    for stop in range(tiles):
        cut = tmp_path / f"cut-{stop}.npy"
        with pytest.raises(Killed):
            score_to_file(cut, matcher, images, texts, Mortal(stop), cells=60)
        assert not cut.exists()
        watch = Mortal(tiles)
        score_to_file(cut, matcher, images, texts, watch)  # it knows its plan
        assert watch.before == stop
        assert cut.read_bytes() == whole.read_bytes()


def plan_of(cells: int):
    _, images, texts = job()
    return plan_scores(images, texts, cells)


def test_a_line_that_a_kill_cut_off_is_not_believed(tmp_path: Path) -> None:
    matcher, images, texts = job()
    path = tmp_path / "scores.npy"
    whole = score_to_file(tmp_path / "whole.npy", matcher, images, texts, cells=60)
    with pytest.raises(Killed):
        score_to_file(path, matcher, images, texts, Mortal(4), cells=60)
    journal = tmp_path / "scores.npy.journal"
    journal.write_text(journal.read_text() + "1")  # of 17, say
    watch = Mortal(1000)
    assert np.array_equal(score_to_file(path, matcher, images, texts, watch), whole)
    assert watch.before == 4


@pytest.mark.parametrize("text", ["", "{}\n", "[]\n", '{"fingerprint": "x"}\none\n'])
def test_a_damaged_journal_is_said_to_be(tmp_path: Path, text) -> None:
    (tmp_path / "scores.npy.journal").write_text(text)
    with pytest.raises(DataError, match="damaged"):
        score_to_file(tmp_path / "scores.npy", *job())


def test_what_was_begun_with_other_inputs_is_refused(tmp_path: Path) -> None:
    matcher, images, texts = job()
    path = tmp_path / "scores.npy"
    with pytest.raises(Killed):
        score_to_file(path, matcher, images, texts, Mortal(2), cells=60)
    for other in (
        (matchers["naaf"](DIM, boundary=0.2).eval(), images, texts),
        (matchers["naaf"](DIM, boundary=0.1, lambda_softmax=9.0).eval(), images, texts),
        (matcher, images[:4], texts),
        (matcher, images, side([2, 7, 1, 9, 4, 4, 0], 2)),
    ):
        assert fingerprint(*other) != fingerprint(matcher, images, texts)
        with pytest.raises(DataError, match="another model or other data"):
            score_to_file(path, *other)
    score_to_file(path, matcher, images, texts)
    assert score_to_file(path, matcher, images, texts, Mortal(0)).shape == (5, 7)  # complete


def test_scoring_leaves_no_trace_in_the_mark_of_a_matcher() -> None:
    matcher, images, texts = job()
    before = fingerprint(matcher, images, texts)
    score_matrix(matcher, images, texts)
    assert fingerprint(matcher, images, texts) == before


def test_tiles_of_whole_vectors_do_not_outgrow_the_host(monkeypatch) -> None:
    monkeypatch.setattr(score_plan, "MOST_PAIRS", 10)
    images, texts = (side([1] * 9, seed).keep("pooled") for seed in (0, 1))
    plan = plan_scores(images, texts, 1 << 40)
    sizes = [(t.rows.stop - t.rows.start) * (t.places.stop - t.places.start) for t in plan.tiles]
    assert sum(sizes) == 81
    assert max(sizes) <= 10


def test_a_file_of_somebody_else_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "scores.npy"
    np.save(path, np.zeros(3))
    with pytest.raises(DataError, match="choose another file"):
        score_to_file(path, *job())
    assert len(np.load(path)) == 3


def test_tiles_that_are_done_are_not_scored_again() -> None:
    matcher, images, texts = job()
    plan = plan_of(60)
    left = [tile.number for tile, _ in scored_tiles(matcher, images, texts, plan, {0, 3})]
    assert left == [n for n in range(len(plan.tiles)) if n not in (0, 3)]


def test_the_size_of_tiles_follows_the_free_memory(monkeypatch, tmp_path: Path) -> None:
    _, images, texts = job()
    report = tmp_path / "meminfo"
    monkeypatch.setattr(device, "MEMORY", report)
    assert free_memory(torch.device("cpu")) == device.UNKNOWN
    report.write_text("MemTotal: 9 kB\nMemAvailable:    4 kB\n")
    assert free_memory(torch.device("cpu")) == 4096
    assert plan_scores(images, texts).cells == 64  # a quarter, 16 bytes each


def test_padding_begins_after_the_last_real_fragment() -> None:
    mask = torch.tensor([[True, False, True, False], [False] * 4, [True] * 4])
    assert extents(Encoded(None, mask)).tolist() == [3, 0, 4]
    assert extents(Encoded(None, mask[:, :0])).tolist() == [0, 0, 0]


def test_a_second_process_does_not_write_into_the_scores_of_the_first(tmp_path) -> None:
    path = tmp_path / "scores.npy"
    with held(beside(path)), pytest.raises(BusyError, match="another process is writing scores"):
        score_to_file(path, *job())
    assert content(tmp_path) == {}


def test_finished_scores_are_read_without_the_lock(tmp_path) -> None:
    path = tmp_path / "scores.npy"
    matcher, images, texts = job()
    written = np.array(score_to_file(path, matcher, images, texts))
    with held(beside(path)):
        assert np.array_equal(score_to_file(path, matcher, images, texts), written)
        with pytest.raises(DataError, match="another model or other data"):
            score_to_file(path, matcher, texts, images)
