"""Contexts of unit length: of ordinary attention, and where a context is zero or nearly cancels."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from counterfoil.kernels.attention import unit_contexts

PRECISIONS = {
    "float64": (torch.float64, None),
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "autocast-bfloat16": (torch.float32, torch.bfloat16),
    "autocast-float16": (torch.float32, torch.float16),
}
every_precision = pytest.mark.parametrize("precision", PRECISIONS)


def contexts(precision: str, weights: Tensor, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The contexts, and the gradients of their sum by weights and images."""
    dtype, autocast = PRECISIONS[precision]
    leaves = [x.to(dtype).requires_grad_() for x in (weights, images)]
    with torch.autocast("cpu", autocast) if autocast else nullcontext():
        result = unit_contexts(*leaves)
    result.float().sum().backward()
    return result.detach(), *(leaf.grad for leaf in leaves)


def random_attention() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = F.normalize(torch.randn(3, 6, 32, generator=generator, dtype=torch.float64), dim=-1)
    weights = torch.randn(3, 4, 5, 6, generator=generator, dtype=torch.float64).softmax(-1)
    return weights, images


@every_precision
def test_contexts_are_attended_regions_of_unit_length(precision) -> None:
    weights, images = random_attention()
    result, *_ = contexts(precision, weights, images)
    expected = F.normalize(torch.einsum("itwr,ird->itwd", weights, images), dim=-1)
    error = 1e-6 if precision in ("float64", "float32") else 2e-2
    torch.testing.assert_close(result.double(), expected, atol=error, rtol=0.0)


@every_precision
def test_an_image_of_zeros_has_contexts_of_zeros_and_finite_gradients(precision) -> None:
    weights, images = random_attention()
    images[1] = 0.0
    result, by_weight, by_image = contexts(precision, weights, images)
    assert not result[1].any()
    assert not by_weight[1].any()
    assert not by_image[1].any()
    assert result[[0, 2]].any()
    assert by_image.isfinite().all()


@every_precision
@pytest.mark.parametrize("difference", [0.0, 1e-6, 1e-5, 1e-4, 1e-3])
def test_contexts_that_cancel_are_finite_and_at_most_of_unit_length(precision, difference) -> None:
    region = F.normalize(torch.randn(64, generator=torch.Generator().manual_seed(1)), dim=0)
    images = torch.stack([region, -region])[None]
    weights = torch.tensor([0.5 + difference, 0.5 - difference]).view(1, 1, 1, 2)
    result, by_weight, by_image = contexts(precision, weights, images)
    assert result.double().norm() <= 1.01
    assert by_weight.isfinite().all()
    assert by_image.isfinite().all()
