"""Scores without second derivatives say so, instead of dropping or falsifying them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import counterfoil as cf
from counterfoil.core.errors import ArgumentError


def sides() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    draws = (torch.randn(2, 3, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    return [F.normalize(draw, dim=-1).requires_grad_() for draw in draws]


def by_backward(loss: torch.Tensor, regions: torch.Tensor, _words: torch.Tensor) -> None:
    loss.backward()


def by_backward_to_one_side(loss: torch.Tensor, regions: torch.Tensor, _: torch.Tensor) -> None:
    loss.backward(inputs=[regions])


def by_grad(loss: torch.Tensor, regions: torch.Tensor, _words: torch.Tensor) -> None:
    torch.autograd.grad(loss, regions)


def by_grad_of_the_other_side(loss: torch.Tensor, _: torch.Tensor, words: torch.Tensor) -> None:
    torch.autograd.grad(loss, words)


SCORES = [cf.matchers.SCAN(), cf.matchers.BFAN(), cf.matchers.NAAF(), cf.matchers.CHAN(), cf.maxsim]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    "differentiate", [by_backward, by_backward_to_one_side, by_grad, by_grad_of_the_other_side]
)
def test_a_penalty_on_a_gradient_is_an_error(score, differentiate) -> None:
    regions, words = sides()
    scores = score(regions, words)
    (gradient,) = torch.autograd.grad(scores.sum(), regions, create_graph=True)
    with pytest.raises(ArgumentError, match="second derivatives"):
        differentiate(scores.mean() + gradient.square().sum(), regions, words)


@pytest.mark.parametrize("kernel", [True, False])
def test_a_penalty_through_a_layer_before_the_kernels_is_an_error(kernel, monkeypatch) -> None:
    """As in a WGAN with a gradient penalty: derivatives by the weights of a layer."""
    if kernel:  # in Triton's interpreter
        monkeypatch.setattr("counterfoil.kernels.maxsim.usable", lambda *_: True)
    layer = torch.nn.Linear(16, 16)
    queries = layer(torch.randn(2, 3, 16)).transpose(0, 1).transpose(0, 1)
    documents = layer(torch.randn(3, 2, 16)).transpose(0, 1)  # not contiguous
    scores = cf.maxsim(queries, documents)
    (gradient,) = torch.autograd.grad(scores.sum(), documents, create_graph=True)
    with pytest.raises(ArgumentError, match="second derivatives"):
        torch.autograd.grad(gradient.square().sum(), list(layer.parameters()))


@pytest.mark.parametrize("score", [cf.matchers.SCAN(), cf.maxsim])
def test_gradients_are_the_same_with_a_graph(score) -> None:
    regions, words = sides()
    plain = torch.autograd.grad(score(regions, words).sum(), (regions, words))
    kept = torch.autograd.grad(score(regions, words).sum(), (regions, words), create_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(plain, kept, strict=True))
    assert torch.autograd.gradcheck(score, (regions, words))


def test_a_matcher_of_plain_operations_has_second_derivatives() -> None:
    regions, words = sides()

    def penalty(regions: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        scores = cf.matchers.Cosine()(regions.mean(1), words.mean(1))
        (gradient,) = torch.autograd.grad(scores.sum(), regions, create_graph=True)
        return gradient.square().sum()

    assert torch.autograd.gradcheck(penalty, (regions, words))
