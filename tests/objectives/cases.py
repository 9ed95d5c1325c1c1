"""Batches to try objectives on, and their anchors found by plain loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from counterfoil.encoders import Encoded
from counterfoil.objectives import Context, Objective
from counterfoil.objectives.foils import FoilMatrix


@dataclass(frozen=True)
class Case:
    """A score matrix whose columns belong to ``owners``; its rows to the same, or to each image."""

    scores: Tensor
    positives: Tensor
    protected: Tensor

    @property
    def context(self) -> Context:
        return Context(protected=self.protected)

    def loss(self, objective: Objective) -> Tensor:
        return objective.compute(self.scores, self.positives, self.context).loss

    def loss_and_gradient(self, objective: Objective) -> tuple[Tensor, Tensor]:
        scores = self.scores.clone().requires_grad_()
        loss = objective.compute(scores, self.positives, self.context).loss
        return loss.detach(), torch.autograd.grad(loss, scores)[0]

    def anchors(self) -> list[tuple[float, list[float]]]:
        """Each anchor of both directions: its positive and its negatives."""
        rows, columns = self.scores.shape
        pairs = [
            (i, j)
            for i in range(rows)
            for j in range(columns)
            if (i == j if rows == columns else bool(self.positives[i, j]))
        ]
        scores = self.scores.tolist()
        negative = (~self.positives & ~self.protected).tolist()
        by_image = [
            (scores[i][j], [scores[i][k] for k in range(columns) if negative[i][k]])
            for i, j in pairs
        ]
        by_text = [
            (scores[i][j], [scores[k][j] for k in range(rows) if negative[k][j]]) for i, j in pairs
        ]
        return by_image + by_text


def make_case(
    owners: list[int], *, square: bool = True, seed: int = 0, protected: float = 0.0, scale=0.5
) -> Case:
    """A random case; ``square=False`` gives each image one row, however many texts it has."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.tensor(owners)
    rows = columns if square else torch.tensor(list(dict.fromkeys(owners)))
    positives = rows[:, None] == columns[None, :]
    shape = tuple(positives.shape)
    scores = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    shield = torch.rand(shape, generator=generator) < protected
    return Case(scores, positives, shield & ~positives)


def make_foils(case: Case, counts: list[int], *, seed: int = 0, false: float = 0.8) -> FoilMatrix:
    """Random scores of ``counts[p % len]`` foils per pair with every image of a case."""
    generator = torch.Generator().manual_seed(seed)
    pairs = case.scores.shape[1]
    owners = torch.tensor([p for p in range(pairs) for _ in range(counts[p % len(counts)])]).long()
    shape = (len(case.scores), len(owners))
    scores = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5
    negative = torch.rand(shape, generator=generator) < false
    return FoilMatrix(scores, owners, negative, Encoded(None, torch.zeros(0, 0)), owners)


def rows_of(case: Case) -> list[int]:
    """The image of each pair, by a plain loop; pairs are in the order of the columns."""
    rows, columns = case.scores.shape
    if rows == columns:
        return list(range(rows))
    return [i for i in range(rows) for j in range(columns) if case.positives[i, j]]


def check_gradients(loss: Callable[..., Tensor], naive: Callable[..., Tensor], *inputs: Tensor):
    """Both give the same value and the same gradients, to 1e-6."""
    results = []
    for function in (loss, naive):
        given = [x.clone().requires_grad_() for x in inputs]
        value = function(*given)
        grads = torch.autograd.grad(value, given, allow_unused=True)
        zeros = [torch.zeros_like(x) if g is None else g for x, g in zip(given, grads, strict=True)]
        results.append([value.detach(), *zeros])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-9)


def cases(scale: float = 0.5) -> st.SearchStrategy[Case]:
    """Batches with repeated images, protected pairs, and images with several texts."""
    return st.builds(
        make_case,
        st.lists(st.integers(0, 4), min_size=1, max_size=7),
        square=st.booleans(),
        seed=st.integers(0, 10_000),
        protected=st.sampled_from([0.0, 0.3, 1.0]),
        scale=st.just(scale),
    )
