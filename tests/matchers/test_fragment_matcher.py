"""Scores in mixed precision on a CPU: single precision, so that pairs do not tie."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from counterfoil.encoders import Encoded, l2_normalize
from counterfoil.kernels import tiled
from counterfoil.matchers import fragment_matcher, matchers
from counterfoil.matchers.fragment_matcher import ALIGNED, aligned
from tests.matchers.test_conformance import DIM, FORMS, side

NAMES = [*matchers, *FORMS, "naaf/both"]
OPTIONS = {
    **FORMS,
    "naaf/both": {"direction": "both"},
    "uniter": {"layers": 1, "heads": 2},
    **{name: {"sim_dim": 16} for name in ("saf", "sgr", "sgraf")},  # 256 in bf16 take seconds
}


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("training", [False, True], ids=["asked", "training"])
@pytest.mark.parametrize("name", NAMES)
def test_scores_under_bf16_autocast_on_a_cpu_are_not_rounded_to_bf16(name, training, half) -> None:
    torch.manual_seed(0)
    matcher = matchers[name.split("/")[0]](DIM, **OPTIONS.get(name, {})).train(training)
    images, texts = side([6] * 8, 6, 1), side([7] * 8, 7, 2)
    sides = []
    for encoded in (images, texts):
        pooled = l2_normalize(encoded.fragments.mean(1))
        fragments = encoded.fragments
        if half:
            pooled, fragments = pooled.bfloat16(), fragments.bfloat16()
        sides.append(replace(encoded, fragments=fragments, pooled=pooled))
    with torch.set_grad_enabled(training), torch.autocast("cpu", torch.bfloat16):
        scores = matcher(*sides).detach()
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()
    assert (scores == scores.bfloat16().float()).float().mean() < 0.2


TILE_MATCHERS = ["saf", "sgr", "gsmn", "imram"]


def texts_of_all_lengths(seed: int) -> tuple[Encoded, Encoded]:
    """Images, and texts of all lengths, some empty, some with padding before the words."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 16, (70,), generator=generator).tolist()
    images, texts = side([6, 1, 4], 6, seed), side(lengths, 18, seed + 1)
    padded_before = torch.arange(70) % 3 == 0
    rolled = {
        name: torch.where(padded_before.view(-1, *[1] * (x.ndim - 1)), x.roll(2, 1), x)
        for name, x in (
            ("fragments", texts.fragments),
            ("mask", texts.mask),
            ("boxes", texts.boxes),
        )
    }
    return images, replace(texts, graph=None, **rolled)


def scores_and_gradients(name: str, images: Encoded, texts: Encoded) -> list[Tensor]:
    """Scores in double precision, and their gradients by images and texts."""
    torch.manual_seed(0)
    matcher = matchers[name](DIM, **OPTIONS.get(name, {})).double().eval()
    leaves = [one.fragments.double().requires_grad_() for one in (images, texts)]
    scores = matcher(
        *(replace(one, fragments=x) for one, x in zip((images, texts), leaves, strict=True))
    )
    return [scores.detach(), *torch.autograd.grad(scores.square().sum(), leaves)]


@pytest.mark.parametrize("cells", [1 << 30, 1 << 17], ids=["whole", "tiled"])
@pytest.mark.parametrize("name", TILE_MATCHERS)
def test_texts_scored_in_groups_have_the_scores_and_gradients_of_one_tile(
    name, cells, monkeypatch
) -> None:
    images, texts = texts_of_all_lengths(seed=3)
    sizes: list[int] = []
    tile = matchers[name].tile
    monkeypatch.setattr(
        matchers[name], "tile", lambda self, x, y: sizes.append(len(y)) or tile(self, x, y)
    )
    monkeypatch.setattr(tiled, "CPU_CELLS", cells)
    actual = scores_and_gradients(name, images, texts)
    assert len(sizes) >= 4
    assert max(sizes) < len(texts)
    sizes.clear()
    monkeypatch.setattr(tiled, "CPU_CELLS", 1 << 30)
    monkeypatch.setattr(fragment_matcher, "SMALLEST_GROUP", len(texts))
    expected = scores_and_gradients(name, images, texts)
    assert sizes == [len(texts)]
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", TILE_MATCHERS)
def test_equal_texts_have_equal_scores_among_texts_of_other_lengths(name) -> None:
    images, texts = side([6, 4], 6, 5), side([5 + k % 9 for k in range(64)], 13, 6)
    copies = slice(20, 50)
    fields = {name: getattr(texts, name).clone() for name in ("fragments", "mask", "boxes")}
    for x in fields.values():
        x[copies] = x[20].clone()
    torch.manual_seed(0)
    matcher = matchers[name](DIM, **OPTIONS.get(name, {})).eval()
    with torch.no_grad():
        scores = matcher(images, Encoded(pooled=None, **fields))[:, copies]
    assert (scores == scores[:, :1]).all()


def test_groups_hold_all_texts_once_and_split_no_length_that_memory_can_hold() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        count, max_texts = int(generator.integers(1, 300)), int(generator.integers(1, 300))
        lengths = -np.sort(-generator.integers(0, int(generator.integers(1, 20)), count))
        most = int(generator.integers(1, 6))
        groups = list(fragment_matcher._length_groups(lengths, max_texts, most))
        assert [0, *(right for _, right in groups)] == [*(left for left, _ in groups), count]
        for left, right in groups:
            assert 0 < right - left <= max_texts
            cut = right < count and lengths[right] == lengths[right - 1]
            assert not cut or right - left == max_texts


@pytest.mark.parametrize("name", ["saf", "sgr", "gsmn", "imram"])
def test_keys_aligned_for_a_gpu_have_the_same_scores_and_gradients(name, monkeypatch) -> None:
    def padded(keys):
        return keys.pad_to(keys.mask.shape[1] + -keys.mask.shape[1] % ALIGNED)

    torch.manual_seed(0)
    matcher = matchers[name](DIM, **OPTIONS.get(name, {})).double().eval()
    results = []
    for align in (aligned, padded):
        monkeypatch.setattr(sys.modules[type(matcher).__module__], "aligned", align)
        images, texts = side([6, 5, 3], 6, 1), side([7, 1, 4, 2], 7, 2)
        leaves = [each.fragments.double().requires_grad_() for each in (images, texts)]
        sides = [
            replace(each, fragments=leaf, pooled=l2_normalize(leaf.mean(1)))
            for each, leaf in zip((images, texts), leaves, strict=True)
        ]
        scores = matcher(*sides)
        results.append([scores, *torch.autograd.grad((scores * scores.exp()).sum(), leaves)])
    for plain, wide in zip(*results, strict=True):
        torch.testing.assert_close(wide, plain, rtol=1e-12, atol=1e-12)
