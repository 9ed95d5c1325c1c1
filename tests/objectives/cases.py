"""Batches to try objectives on, and their anchors found by plain loops."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from counterfoil.objectives import Context, Objective


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
