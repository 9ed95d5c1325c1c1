"""Weighted sums by their kernels, in Triton's interpreter, against PyTorch in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from counterfoil.core.errors import ArgumentError
from counterfoil.encoders import Encoded
from counterfoil.kernels import weighted_sums as module
from counterfoil.kernels.weighted_sums import weighted_sums
from counterfoil.matchers import matchers
from tests.conftest import assert_close, assert_gradient_close
from tests.kernels.in_double import TOLERANCES, assert_as_in_double, with_gradients
from tests.matchers.local import mask_of

pytest.importorskip("triton", reason="Triton is not installed")

CASES = [  # shapes of the values, and of the weights
    ((5, 7), (5, 7)),
    ((2, 3, 4, 40), (2, 3, 4, 40)),
    ((16, 3, 2, 5, 16), (1, 3, 2, 5, 16)),
    ((4, 6, 16, 36), (4, 6, 1, 36)),
    ((2, 3, 4, 5, 9), (2, 1, 1, 5, 9)),
    ((3, 4, 8), (1, 1, 8)),
    ((1, 1), (1, 1)),
    ((130, 3), (130, 3)),
    ((2, 3, 300), (2, 1, 300)),
    ((0, 3, 4), (0, 1, 4)),
    ((2, 0, 4), (2, 1, 4)),
    ((2, 3, 0), (2, 3, 0)),
]


def assert_agree(case, dtype: torch.dtype, device: str = "cpu") -> None:
    draw = torch.Generator().manual_seed(sum(case[0]))
    shapes = (*case, case[0][:-1])
    values, weights, above = (torch.randn(*shape, generator=draw) for shape in shapes)
    for kind in {dtype, torch.float32}:  # attention weights are in single precision
        inputs = values.to(dtype), weights.to(kind)
        assert_as_in_double(weighted_sums, inputs, above.to(kind), kind, TOLERANCES[dtype], device)


@pytest.fixture
def by_kernel(monkeypatch) -> None:
    monkeypatch.setattr(module, "usable", lambda device, dtype: dtype != torch.float64)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", CASES)
def test_sums_and_gradients_are_pytorchs(case, dtype, by_kernel) -> None:
    assert_agree(case, dtype)


def test_rows_that_are_not_contiguous(by_kernel) -> None:
    inputs = torch.randn(6, 5, 4).transpose(0, 1), torch.randn(4, 6).T[None]
    above = torch.randn(6, 5).T
    exact = with_gradients(weighted_sums, [one.double() for one in inputs], above.double())
    for mine, theirs in zip(with_gradients(weighted_sums, inputs, above), exact, strict=True):
        assert torch.allclose(mine.double(), theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("values", "weights"),
    [
        ((3, 8), (4, 8)),
        ((3, 8), (3, 1)),
        ((3, 8), (8,)),
        ((1, 8), (3, 8)),
        ((2, 3, 4, 8), (1, 3, 1, 8)),
        ((2, 3, 8), (1, 2, 8)),
    ],
)
def test_shapes_that_the_kernel_would_read_otherwise_are_refused(values, weights) -> None:
    with pytest.raises(ArgumentError, match="neighboring axes"):
        weighted_sums(torch.zeros(values), torch.zeros(weights))


def test_second_derivatives(by_kernel) -> None:
    def penalty(dtype: torch.dtype) -> list[Tensor]:
        draw = torch.Generator().manual_seed(0)
        leaves = [
            torch.randn(*shape, generator=draw).to(dtype).requires_grad_()
            for shape in ((3, 4, 8), (3, 1, 8))
        ]
        sums = weighted_sums(*leaves).square().sum()
        gradients = torch.autograd.grad(sums, leaves, create_graph=True)
        sum(one.square().sum() for one in gradients).backward()
        return [leaf.grad for leaf in leaves]

    for mine, theirs in zip(penalty(torch.float32), penalty(torch.float64), strict=True):
        assert theirs.abs().max() > 0
        assert_gradient_close(mine, theirs, tolerance=1e-6)


def random_sides() -> tuple[Encoded, Encoded]:
    """Three images and four captions, padded, whose fragments want gradients."""
    draw = torch.Generator().manual_seed(0)
    regions, words = (torch.randn(*shape, 32, generator=draw) for shape in ((3, 5), (4, 6)))
    corners = torch.rand(3, 5, 2, generator=draw)
    boxes = torch.cat([corners, 1 + corners], -1) / 2
    return (
        Encoded(regions.requires_grad_(), mask_of(torch.tensor([5, 3, 4]), 5), boxes=boxes),
        Encoded(words.requires_grad_(), mask_of(torch.tensor([6, 1, 4, 4]), 6)),
    )


@pytest.mark.parametrize("name", ["gsmn", "saf", "sgr", "imram"])
def test_matchers_by_the_kernel_are_themselves(name, monkeypatch) -> None:
    results = []
    for usable in (False, True):
        monkeypatch.setattr(module, "usable", lambda device, dtype, usable=usable: usable)
        torch.manual_seed(0)
        images, texts = random_sides()
        matcher = matchers[name](32).eval()
        leaves = [side.fragments for side in (images, texts)]
        scores = matcher(images, texts)
        scores.square().sum().backward()
        results.append((scores.detach(), [x.grad for x in (*leaves, *matcher.parameters())]))
    assert_close(results[1][0], results[0][0])
    for mine, theirs in zip(results[1][1], results[0][1], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs.abs().max() > 1e-6:  # a bias before a softmax has none
            assert_gradient_close(mine, theirs)
