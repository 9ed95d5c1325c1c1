"""The gated update by its kernels, in Triton's interpreter, against PyTorch in double precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from counterfoil.core.errors import ArgumentError
from counterfoil.kernels import gated_update as module
from counterfoil.kernels.gated_update import gated_update
from counterfoil.matchers import matchers
from tests.conftest import assert_close, assert_gradient_close, load_fixture
from tests.kernels.in_double import TOLERANCES, assert_as_in_double
from tests.matchers.local import encoded_pair

pytest.importorskip("triton", reason="Triton is not installed")

CASES = [  # shape of the old values, and of the context's logits without their last axis
    ((1, 2, 3, 5), (4, 2, 3)),
    ((3, 2, 1, 64), (3, 2, 1)),
    ((1, 1, 1, 1), (2, 1, 1)),
    ((2, 4, 1100), (2, 4)),
    ((1, 4, 1025), (3, 4)),
    ((0, 2, 8), (0, 2)),
    ((1, 2, 8), (0, 2)),
]


def sides(case: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[Tensor, ...]:
    """Old values, logits of the query and of the context, and a gradient from above."""
    old, leading = case
    draw = torch.Generator().manual_seed(sum(old))
    shapes = (old, (*old[:-1], 2 * old[-1]), (*leading, 2 * old[-1]), (*leading, old[-1]))
    return tuple(torch.randn(*shape, generator=draw) for shape in shapes)


def assert_agree(case, dtype: torch.dtype, device: str = "cpu") -> None:
    old, *logits, above = sides(case)
    of_query, of_context, above = (one.to(dtype) for one in (*logits, above))
    # the first step has single-precision fragments
    for kind, queries in [(dtype, dtype), (torch.float32, dtype), (dtype, torch.float32)]:
        inputs = old.to(kind), of_query.to(queries), of_context
        assert_as_in_double(gated_update, inputs, above, dtype, TOLERANCES[dtype], device)


@pytest.fixture
def by_kernel(monkeypatch) -> None:
    monkeypatch.setattr(module, "usable", lambda device, dtype: dtype != torch.float64)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", CASES)
def test_updates_and_gradients_are_pytorchs(case, dtype, by_kernel) -> None:
    assert_agree(case, dtype)


@pytest.mark.parametrize(
    ("old", "of_query", "of_context"),
    [
        ((3, 1, 8), (3, 1, 16), (3, 2, 16)),
        ((1, 3, 1, 8), (1, 3, 1, 16), (4, 3, 2, 16)),
        ((2, 3, 8), (2, 3, 16), (1, 3, 16)),
        ((1, 1, 3, 8), (1, 1, 3, 16), (3, 16)),
        ((2, 3, 8), (2, 3, 8), (2, 3, 8)),
        ((2, 3, 8), (2, 3, 16), (2, 3, 8)),
        ((1, 3, 8), (2, 3, 16), (2, 3, 16)),
    ],
)
def test_shapes_that_the_kernel_would_read_otherwise_are_refused(old, of_query, of_context) -> None:
    with pytest.raises(ArgumentError, match="leading ones of length 1"):
        gated_update(torch.zeros(old), torch.zeros(of_query), torch.zeros(of_context))


def test_a_second_derivative_is_an_error(by_kernel) -> None:
    old, of_query, of_context, _ = sides(CASES[0])
    of_context.requires_grad_()
    updated = gated_update(old, of_query, of_context).sum()
    (gradient,) = torch.autograd.grad(updated, of_context, create_graph=True)
    with pytest.raises(ArgumentError, match="second derivatives"):
        gradient.square().sum().backward()


def test_imram_by_the_kernel_is_imram(monkeypatch) -> None:
    images, texts = (one[:2] for one in encoded_pair(load_fixture("imram")))
    results = []
    for usable in (False, True):
        monkeypatch.setattr(module, "usable", lambda device, dtype, usable=usable: usable)
        torch.manual_seed(0)
        matcher = matchers["imram"](images.fragments.shape[-1])
        leaves = [side.fragments.detach().requires_grad_() for side in (images, texts)]
        pair = [replace(s, fragments=leaf) for s, leaf in zip((images, texts), leaves, strict=True)]
        scores = matcher(*pair)
        scores.square().sum().backward()
        results.append((scores.detach(), [x.grad for x in (*leaves, *matcher.parameters())]))
    assert_close(results[1][0], results[0][0])
    for mine, theirs in zip(results[1][1], results[0][1], strict=True):
        assert theirs.abs().max() > 0
        assert_gradient_close(mine, theirs)
