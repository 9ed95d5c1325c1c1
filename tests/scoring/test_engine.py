"""All pairs scored tile by tile are scored as by one call, whatever becomes of the tiles."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from counterfoil.core.tensors import device
from counterfoil.core.tensors.device import free_memory
from counterfoil.encoders import Encoded
from counterfoil.kernels.spec import WORDS
from counterfoil.matchers import matchers
from counterfoil.scoring import plan as score_plan
from counterfoil.scoring.engine import (
    _threads_for,
    score_matrix,
    score_on_device,
    scored_tiles,
)
from counterfoil.scoring.plan import plan_for_kernels, plan_scores

DIM = 8


def side(lengths: list[int], seed: int, spread: bool = False, dim: int = DIM) -> Encoded:
    """Unit fragments; ``spread`` lets the real ones stand anywhere."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(1, *lengths) + 2
    x = F.normalize(torch.randn(len(lengths), longest, dim, generator=generator), dim=-1)
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
    result = score_matrix(matcher, images, texts, plan=plan)
    # a caption without words scores what its matcher says, be that minus infinity
    assert torch.allclose(result, direct, atol=2e-5, rtol=1e-5, equal_nan=True)


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
    result = score_on_device(matcher, images, texts, plan=plan)
    assert torch.allclose(result, score_matrix(matcher, images, texts), atol=2e-5, equal_nan=True)


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
    places = [tile.texts for tile in plan.tiles]
    scored = sum(plan.lengths[at.stop - 1] * (at.stop - at.start) for at in places)
    assert sum(lengths) <= scored <= 1.1 * sum(lengths)
    assert all(at.stop - at.start >= 128 for at in places[:-1])


def job():
    matcher = matchers["naaf"](DIM, boundary=0.1).eval()
    return matcher, side([3, 5, 1, 4, 4], 0), side([2, 7, 1, 9, 4, 4, 0], 1)


def test_tiles_of_whole_vectors_do_not_outgrow_the_host(monkeypatch) -> None:
    monkeypatch.setattr(score_plan, "MAX_TILE_PAIRS", 10)
    images, texts = (side([1] * 9, seed).keep("pooled") for seed in (0, 1))
    plan = plan_scores(images, texts, 1 << 40)
    sizes = [(t.rows.stop - t.rows.start) * (t.texts.stop - t.texts.start) for t in plan.tiles]
    assert sum(sizes) == 81
    assert max(sizes) <= 10


def test_the_size_of_tiles_follows_the_free_memory(monkeypatch, tmp_path: Path) -> None:
    _, images, texts = job()
    report = tmp_path / "meminfo"
    monkeypatch.setattr(device, "MEMORY", report)
    assert free_memory(torch.device("cpu")) == device.UNKNOWN_FREE
    report.write_text("MemTotal: 9 kB\nMemAvailable:    4 kB\n")
    assert free_memory(torch.device("cpu")) == 4096
    assert plan_scores(images, texts).cells == 64  # a quarter, 16 bytes each


def test_padding_begins_after_the_last_real_fragment() -> None:
    mask = torch.tensor([[True, False, True, False], [False] * 4, [True] * 4])
    assert Encoded(None, mask).extents().tolist() == [3, 0, 4]
    assert Encoded(None, mask[:, :0]).extents().tolist() == [0, 0, 0]


def threads_of_a_new_thread() -> int:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["naaf", "scan-t2i", "bfan", "chan", "cosine", "imram", "saf"])
def test_threads_score_the_same_bits_in_the_same_order(name) -> None:
    torch.manual_seed(0)
    matcher = matchers[name](64).eval()
    images, texts = side([36] * 20, 0, dim=64), side([12] * 30, 1, dim=64)
    plan = plan_scores(images, texts, cells=25_000)
    assert len(plan.tiles) >= 8
    with threads(4):
        assert _threads_for(plan, torch.device("cpu")) == 4
        side_by_side = list(scored_tiles(matcher, images, texts, plan))
        assert torch.get_num_threads() == threads_of_a_new_thread() == 4
        with ThreadPoolExecutor(1) as pool:  # not in the main thread: one after the other
            assert pool.submit(_threads_for, plan, torch.device("cpu")).result() == 1
            work = pool.submit(lambda: list(scored_tiles(matcher, images, texts, plan)))
            alone = work.result()
    assert [tile for tile, _ in side_by_side] == [tile for tile, _ in alone] == plan.tiles
    for (_, ours), (_, theirs) in zip(side_by_side, alone, strict=True):
        assert torch.equal(ours, theirs)


def test_few_tiles_and_autocast_are_scored_one_after_the_other() -> None:
    images, texts = side([5] * 9, 0), side([6] * 30, 1)
    with threads(4):
        few = plan_scores(images, texts, cells=2000)
        assert 1 < len(few.tiles) < 8
        assert _threads_for(few, torch.device("cpu")) == 1
        with torch.autocast("cpu", torch.bfloat16):
            many = plan_scores(images, texts, cells=60)
            assert _threads_for(many, torch.device("cpu")) == 1
        assert _threads_for(many, torch.device("cpu")) == 4


def test_an_error_in_a_thread_is_raised_and_leaves_the_threads_as_they_were() -> None:
    class Broken(torch.nn.Module):
        def score_block(self, images, texts, job):
            raise ValueError("broken")

    images, texts = side([5] * 9, 0), side([6] * 30, 1)
    plan = plan_scores(images, texts, cells=60)
    with threads(2):
        with pytest.raises(ValueError, match="broken"):
            list(scored_tiles(Broken(), images, texts, plan))
        assert torch.get_num_threads() == threads_of_a_new_thread() == 2
        tiles = scored_tiles(matchers["naaf"](DIM).eval(), images, texts, plan)
        next(tiles)
        tiles.close()  # nobody wants the rest
        assert torch.get_num_threads() == threads_of_a_new_thread() == 2
