"""Meta-SPN: weights of the hardest negatives, learned on held-out images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from counterfoil.core.errors import ConfigError
from counterfoil.objectives.base import (
    Context,
    LossReport,
    NegativeSelection,
    Objective,
    Reduction,
    both_directions,
    objectives,
)
from counterfoil.objectives.services import Lookahead

FINITE_DIFFERENCE_NORM = 0.01
"""Norm of the step of the weights in a finite difference (the value of DARTS)."""


class WeightingNetwork(nn.Module):
    """Positive score, negative score and hinge cost of a triplet to a weight between 0 and 1.

    Initially all triplets have the same weight. Its parameters require gradients only in its own
    update, so that no other optimizer collects them.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.read = nn.Linear(3, hidden)
        self.weigh = nn.Linear(hidden, 1)
        nn.init.zeros_(self.weigh.weight)
        nn.init.zeros_(self.weigh.bias)
        self.requires_grad_(False)

    def forward(self, triplets: Tensor) -> Tensor:
        triplets = triplets.to(self.read.weight.dtype)
        return torch.sigmoid(self.weigh(torch.relu(self.read(triplets)))).squeeze(-1)


@dataclass(frozen=True)
class Triplets:
    """Indices of each pair and its hardest negative in the score matrix, in both directions.

    Triplet ``t`` is the pair ``(image[t], text[t])`` against ``(other_image[t], other_text[t])``;
    ``has_negative`` is False if the pair has no negative.
    """

    image: Tensor
    text: Tensor
    other_image: Tensor
    other_text: Tensor
    has_negative: Tensor

    def gaps(self, scores: Tensor) -> Tensor:
        """Negative minus positive score of each triplet."""
        return scores[self.other_image, self.other_text] - scores[self.image, self.text]

    def costs(self, scores: Tensor, margin: float) -> Tensor:
        """Hinge cost of each triplet, zero without a negative."""
        return (margin + self.gaps(scores)).clamp(min=0) * self.has_negative


@torch.no_grad()
def hardest_triplets(scores: Tensor, positives: Tensor, context: Context | None = None) -> Triplets:
    """Each anchor of both directions with its hardest negative."""
    by_image, by_text = both_directions(scores, positives, context)
    on_diagonal = context is None or context.on_diagonal
    if on_diagonal and scores.shape[0] == scores.shape[1]:
        image = text = torch.arange(len(scores), device=scores.device)
    else:
        image, text = positives.nonzero(as_tuple=True)
    hardest = [
        anchors.scores.masked_fill(~anchors.is_negative, -torch.inf).argmax(1)
        for anchors in (by_image, by_text)
    ]
    return Triplets(
        image.repeat(2),
        text.repeat(2),
        torch.cat([image, hardest[1]]),
        torch.cat([hardest[0], text]),
        torch.cat([by_image.is_negative.any(1), by_text.is_negative.any(1)]),
    )


@objectives.register("meta-spn")
class MetaSPN(Objective):
    """Hinge on hardest negatives, weighted by a small network trained on held-out images.

    This is the Meta Self-Paced Network (Wei et al., ACM MM 2021) as far as it is known here: the
    SelHN paper, which compares with it, says that it "automatically learns a weighting scheme" and
    that it trains an additional network to assign the weights. No public code is known. Assumed:

    - The network is an MLP with one hidden layer of ``hidden`` ReLU units and a sigmoid. It reads
      the positive score, the hardest negative's score and the hinge cost, and serves both
      directions. It learns with Adam at ``meta_lr``.
    - The meta set is ``meta_share`` of the training images, set aside. Its loss is the plain hinge
      on the hardest negative, on a batch as large as those of training, without augmentation.
    - The weights are good if one step of plain gradient descent, at the learning rate of the run
      and on this term alone, lowers the meta loss. Every ``every`` updates the network takes one
      step towards that before the update is made with its weights.
    - With ``normalize`` the weights are divided by their mean over the triplets that cost anything:
      the network then says which triplets count more, not how fast to learn.

    The gradient through the look-ahead step is not taken by autograd twice but measured: the slope
    of each triplet's cost along the meta gradient, by moving the weights a little both ways, which
    works with any matcher. An adaptation costs two forward and backward passes and two forward
    passes more. Identical captions are left out of both, other protected pairs of the update only.
    Called in another training loop, the network learns nothing: all triplets have the same weight.
    """

    def __init__(
        self,
        *,
        margin: float = 0.2,
        reduction: Reduction = "sum",
        hidden: int = 100,
        meta_lr: float = 1e-3,
        meta_share: float = 0.05,
        every: int = 1,
        normalize: bool = True,
    ) -> None:
        super().__init__()
        if not 0 < meta_share < 1:
            raise ConfigError(
                f"objective.meta-spn.meta_share: expected a share between 0 and 1, got {meta_share}"
            )
        for name, value in {"every": every, "hidden": hidden}.items():
            if value < 1:
                raise ConfigError(f"objective.meta-spn.{name}: expected at least 1, got {value}")
        self._require_nonnegative(margin=margin)
        self.margin, self.reduction, self.every = margin, reduction, every
        self.normalize, self.held_out = normalize, meta_share
        self.network = WeightingNetwork(hidden)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=meta_lr)

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        triplets = hardest_triplets(scores, positives, context)
        costs = triplets.costs(scores, self.margin)
        weights = self.weights(triplets, scores)
        loss = self._reduced(weights.to(costs) * costs)
        counted = weights[costs > 0]
        if not context.logging or not len(counted):
            return LossReport(loss)
        return LossReport(loss, {"weight/least": counted.min(), "weight/most": counted.max()})

    def weights(self, triplets: Triplets, scores: Tensor) -> Tensor:
        """Weight of each triplet; only the network gets gradients."""
        scores = scores.detach()
        costs = triplets.costs(scores, self.margin)
        positive = scores[triplets.image, triplets.text]
        negative = scores[triplets.other_image, triplets.other_text]
        weights: Tensor = self.network(torch.stack([positive, negative, costs], dim=-1))
        if not self.normalize:
            return weights
        counted = costs > 0
        return weights * counted.sum() / (weights * counted).sum().clamp(min=1e-12)

    def before_step(self, trial: Lookahead) -> None:
        if trial.step % self.every:
            return
        gradient = self.meta_gradient(trial)
        if gradient is None:
            return
        for parameter, grad in zip(self.network.parameters(), gradient, strict=True):
            parameter.grad = grad
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def meta_gradient(self, trial: Lookahead) -> list[Tensor] | None:
        """Gradient of the meta loss after the coming step with respect to the network.

        With the triplets' costs ℓ, the step η and the meta gradient v after it, this is
        -η Σ ∂w/∂φ ⟨∇ℓ, v⟩. None if the meta gradient is zero or not finite.
        """
        scores, positives = trial.scores()
        triplets = hardest_triplets(scores, positives, Context(protected=trial.protected()))
        costs = triplets.costs(scores, self.margin)
        step = trial.gradient(self._reduced(self.weights(triplets, scores).to(costs) * costs))
        with trial.moved(step, -trial.rate):
            batch = trial.held_out_batch()
            meta_scores, meta_positives = trial.scores(batch)
            protected = Context(protected=trial.protected(batch))
            meta = hardest_triplets(meta_scores, meta_positives, protected)
            direction = trial.gradient(self._reduced(meta.costs(meta_scores, self.margin)))
        size = float(torch.stack([part.square().sum() for part in direction]).sum().sqrt())
        if not 0 < size < float("inf"):
            return None
        slopes = self._slopes(trial, triplets, direction, FINITE_DIFFERENCE_NORM / size) * (
            costs > 0
        )
        return self._gradient_of_network(triplets, scores, slopes * -trial.rate)

    @torch.no_grad()
    def _slopes(
        self, trial: Lookahead, triplets: Triplets, direction: list[Tensor], amount: float
    ) -> Tensor:
        """⟨∇(negative − positive), direction⟩ of each triplet, by central differences.

        The triplets are those of the current weights, so that neither the hinge nor the selection
        of the hardest changes between the two steps.
        """
        with trial.moved(direction, amount):
            above = triplets.gaps(trial.scores()[0])
        with trial.moved(direction, -amount):
            below = triplets.gaps(trial.scores()[0])
        return (above - below) / (2 * amount)

    def _gradient_of_network(
        self, triplets: Triplets, scores: Tensor, slopes: Tensor
    ) -> list[Tensor]:
        parameters = list(self.network.parameters())
        self.network.requires_grad_(True)
        try:
            weights = self.weights(triplets, scores)
            outcome = self._reduced(weights * slopes.to(weights))
            return list(torch.autograd.grad(outcome, parameters))
        finally:
            self.network.requires_grad_(False)

    def _reduced(self, costs: Tensor) -> Tensor:
        return costs.sum() if self.reduction == "sum" else costs.sum() / max(1, len(costs))

    def loss_at_equal_scores(self, anchors: int, negatives: float, epoch: int = 0) -> float | None:
        if not self.normalize:
            return None
        return self.margin if self.reduction == "mean" else 2 * anchors * self.margin

    def hinge_margin(self, epoch: int) -> float | None:
        return self.margin

    def negative_selection(self, epoch: int) -> NegativeSelection:
        return "hardest"

    def get_extra_state(self) -> dict[str, Any]:
        """The state of the network's own optimizer, which a resumed run needs as well."""
        return self.optimizer.state_dict()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)
