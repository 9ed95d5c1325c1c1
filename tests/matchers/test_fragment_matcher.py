"""Scores in mixed precision on a CPU: single precision, so that pairs do not tie."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from counterfoil.encoders import l2_normalize
from counterfoil.matchers import matchers
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


@pytest.mark.parametrize("name", ["saf", "sgr", "gsmn", "imram"])
def test_keys_aligned_for_a_gpu_have_the_same_scores_and_gradients(name, monkeypatch) -> None:
    def padded(keys):
        return keys.pad_to(keys.mask.shape[1] + -keys.mask.shape[1] % ALIGNED)

    torch.manual_seed(0)
    matcher = matchers[name](DIM, **OPTIONS.get(name, {})).double().eval()
    found = []
    for align in (aligned, padded):
        monkeypatch.setattr(sys.modules[type(matcher).__module__], "aligned", align)
        images, texts = side([6, 5, 3], 6, 1), side([7, 1, 4, 2], 7, 2)
        leaves = [each.fragments.double().requires_grad_() for each in (images, texts)]
        sides = [
            replace(each, fragments=leaf, pooled=l2_normalize(leaf.mean(1)))
            for each, leaf in zip((images, texts), leaves, strict=True)
        ]
        scores = matcher(*sides)
        found.append([scores, *torch.autograd.grad((scores * scores.exp()).sum(), leaves)])
    for plain, wide in zip(*found, strict=True):
        torch.testing.assert_close(wide, plain, rtol=1e-12, atol=1e-12)
