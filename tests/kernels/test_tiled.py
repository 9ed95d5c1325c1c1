"""The backward pass over chosen pairs gives the gradients of the one over all pairs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.core.tensors.device import free_memory, free_on_gpu
from counterfoil.encoders import Encoded
from counterfoil.kernels import tiled
from counterfoil.kernels.tiled import plan_tiles
from counterfoil.matchers import matchers
from counterfoil.matchers.fragment_matcher import CrossAttentionMatcher
from counterfoil.objectives import Context, create_objective

TILED = [
    name
    for name in matchers
    if issubclass(matchers[name], CrossAttentionMatcher) and name != "naaf-reference"
]
"""All but the one that scores its training batches caption by caption."""


def encoded(generator: torch.Generator, items: int, longest: int, empty: bool) -> Encoded:
    fragments = torch.randn(items, longest, 8, generator=generator, dtype=torch.float64)
    lengths = torch.randint(0 if empty else 1, longest + 1, (items,), generator=generator)
    mask = torch.arange(longest)[None] < lengths[:, None]
    fragments = torch.nn.functional.normalize(fragments, dim=-1).masked_fill(~mask[..., None], 0)
    return Encoded(fragments.requires_grad_(), mask)


def gradients(name, sides, upstream, share, monkeypatch) -> list[torch.Tensor]:
    monkeypatch.setattr(tiled, "MAX_CHOSEN_SHARE", share)
    torch.manual_seed(0)
    matcher = matchers[name](8).double().train()
    scores = matcher(*sides)
    leaves = [side.fragments for side in sides]
    return list(torch.autograd.grad(scores, leaves, upstream))


@pytest.mark.parametrize("name", TILED)
@pytest.mark.parametrize("empty", [False, True])
def test_few_pairs_and_all_pairs_give_the_same_gradients(name, empty, monkeypatch) -> None:
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        sides = encoded(generator, 9, 6, empty), encoded(generator, 11, 7, empty)
        upstream = torch.randn(9, 11, generator=generator, dtype=torch.float64)
        upstream *= torch.rand(9, 11, generator=generator) < 0.2
        few = gradients(name, sides, upstream, 1.0, monkeypatch)
        every = gradients(name, sides, upstream, -1.0, monkeypatch)
        for mine, whole in zip(few, every, strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-9, atol=1e-11)
        assert any(float(part.abs().sum()) > 0 for part in few)


@pytest.mark.parametrize("name", ["scan-t2i", "scan-i2t", "naaf", "chan"])
def test_the_loss_of_hardest_negatives_takes_the_short_way(name, monkeypatch) -> None:
    looked: list[int] = []
    short = tiled.pairs_backward

    def remember(score, sides, block, pairs, grad):
        looked.append(len(pairs))
        return short(score, sides, block, pairs, grad)

    monkeypatch.setattr(tiled, "pairs_backward", remember)
    generator = torch.Generator().manual_seed(1)
    images, texts = encoded(generator, 40, 5, False), encoded(generator, 40, 6, False)
    scores = matchers[name](8).double().train()(images, texts)
    create_objective("hardest").compute(scores, torch.eye(40).bool(), Context()).loss.backward()
    assert looked
    assert 40 <= looked[0] <= 120
    looked.clear()
    scores = matchers[name](8).double().train()(images, texts)
    scores.sum().backward()
    assert looked == []


@given(
    counts=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_rows_of_any_number_find_their_fragments(counts, seed) -> None:
    """Against a loop: v[c] += slopeᵀ · packed[row], packed[row] += slope · v[c]."""
    from counterfoil.kernels.attention import Sides

    generator = torch.Generator().manual_seed(seed)
    items, width, fragments = len(counts) + 1, 3, 4
    packed = torch.randn(7, width, generator=generator, dtype=torch.float64)
    v = torch.randn(items, fragments, width, generator=generator, dtype=torch.float64)
    owners = torch.tensor([c for c, count in enumerate(counts) for _ in range(count)])
    rows = torch.randint(0, 7, (len(owners),), generator=generator)
    slopes = torch.randn(len(owners), fragments, generator=generator, dtype=torch.float64)
    sides = Sides(packed, packed[:, 0], None, v, v, None, [7])
    into, key_gradient = torch.zeros_like(packed), torch.zeros_like(v)
    shuffled = torch.randperm(len(owners), generator=generator)
    tiled._into_fragments(
        sides, into, key_gradient, rows[shuffled], owners[shuffled], slopes[shuffled]
    )
    expected, there = torch.zeros_like(packed), torch.zeros_like(v)
    for row, owner, slope in zip(rows.tolist(), owners.tolist(), slopes, strict=True):
        expected[row] += slope @ v[owner]
        there[owner] += slope[:, None] * packed[row][None]
    torch.testing.assert_close(into, expected)
    torch.testing.assert_close(key_gradient, there)


GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 100 bytes: 40 are free, and of the 30 that this process has, tensors take 10."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10)


def test_what_this_process_keeps_for_new_tensors_is_free(gpu) -> None:
    assert free_on_gpu(GPU) == free_memory(GPU) == 60


def test_a_tile_takes_a_quarter_of_what_is_free(gpu) -> None:
    plan = plan_tiles(3, 5, cells_per_pair=1, floats_per_cell=1, device=GPU)
    assert (plan.rows, plan.columns) == (3, 1)  # 60 / 4 bytes are three numbers
    plan = plan_tiles(1, 5, cells_per_pair=1, floats_per_cell=1, device=GPU)
    assert (plan.rows, plan.columns) == (1, 3)
