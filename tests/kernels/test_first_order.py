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


@pytest.mark.parametrize(
    "score", [cf.matchers.SCAN(), cf.matchers.NAAF(), cf.matchers.CHAN(), cf.maxsim]
)
def test_a_penalty_on_a_gradient_is_an_error(score) -> None:
    regions, words = sides()
    scores = score(regions, words)
    (gradient,) = torch.autograd.grad(scores.sum(), regions, create_graph=True)
    with pytest.raises(ArgumentError, match="second derivatives"):
        (scores.mean() + gradient.square().sum()).backward()


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
