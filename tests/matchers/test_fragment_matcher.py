"""Scores in mixed precision on a CPU: single precision, so that pairs do not tie."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from counterfoil.encoders import l2_normalize
from counterfoil.matchers import matchers
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
