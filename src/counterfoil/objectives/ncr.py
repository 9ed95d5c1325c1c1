"""NCR: co-teaching of two networks on mismatched training pairs (Huang et al. 2021).

A mixture of two Gaussians of the losses separates clean from mismatched pairs.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from counterfoil.core.errors import ConfigError, TrainingError
from counterfoil.objectives.base import (
    Anchors,
    Context,
    LossReport,
    Objective,
    both_directions,
    objectives,
)
from counterfoil.objectives.positives import Twins
from counterfoil.objectives.services import RunSetup, TrainSplitScores
from counterfoil.objectives.triplet import hinge

Floats = NDArray[np.float64]

SoftMargin = Literal["linear", "exponential", "sin"]


@objectives.register("ncr")
class NCR(Objective):
    """Co-teaching for mismatched training pairs: mixture of losses, soft margins (NCR).

    Two copies of the model are trained jointly and score as an ensemble. In ``warmup_epochs`` both
    use every negative. Then, before each epoch, a mixture of two Gaussians is fitted to each copy's
    losses over the training split; the posterior of the lower one is the probability w that a pair
    is clean. Each copy learns from the division by the *other* one:

    - A pair above ``threshold`` gets the label w + (1 − w)·P, where P is the copy's own prediction,
      and a hinge on its hardest negatives with a margin that grows with the label.
    - A pair below it gets the mean of both copies' P as label, and is used only from epoch
      ``noisy_from`` on (None: the second half of the run).

    P compares a pair's mean cost with those of the best tenth of the batch.

    Only anchors are divided: a caption of a mismatched pair is still a valid negative for others.
    The published code draws separate batches from the two parts instead. ``form="reference"`` also
    takes the margin of row i for both directions, as that code does.
    """

    requires = "the scores of two models that are trained side by side"
    ensemble_size = 2
    clean: Tensor

    def __init__(
        self,
        *,
        margin: float = 0.2,
        warmup_epochs: int = 1,
        threshold: float = 0.5,
        soft_margin: SoftMargin = "exponential",
        noisy_from: int | None = None,
        form: Literal["paper", "reference"] = "paper",
    ) -> None:
        super().__init__()
        if warmup_epochs < 1:
            raise ConfigError("objective.ncr.warmup_epochs: at least 1, or losses say nothing yet")
        if not 0 <= threshold < 1:
            raise ConfigError(f"objective.ncr.threshold: from 0 to 1, got {threshold}")
        self._require_nonnegative(margin=margin)
        self.margin, self.threshold, self.soft_margin = margin, threshold, soft_margin
        self.warmup_epochs, self.noisy_from, self.form = warmup_epochs, noisy_from, form
        self.register_buffer("clean", torch.empty(0, 0))
        self.twins: Twins | None = None

    def prepare(self, training: RunSetup) -> None:
        self.clean = torch.ones(self.ensemble_size, len(training.train.texts))
        self.twins = training.twins
        if self.noisy_from is None:
            self.noisy_from = training.epochs // 2

    @torch.no_grad()
    def begin_epoch(self, epoch: int, survey: TrainSplitScores) -> None:
        """Divide the training split again; unreadable pairs count as clean."""
        if epoch < self.warmup_epochs:
            return
        losses = torch.full_like(self.clean, torch.nan)
        for members, image_ids, caption_ids in survey():
            positives = image_ids[:, None] == image_ids[None, :]
            twins = self.twins(image_ids, caption_ids) if self.twins is not None else None
            for member, scores in enumerate(members):
                both = both_directions(scores, positives, Context(protected=twins))
                losses[member, caption_ids] = pair_losses(both, self.margin).to(losses)
        for member, values in enumerate(losses):
            known = values.isfinite()
            probability = clean_probability(values[known].cpu().numpy())
            self.clean[member, known] = torch.from_numpy(probability).to(self.clean)

    def never_reached(self, epochs: int, steps_per_epoch: int) -> list[str]:
        if self.warmup_epochs < epochs:
            return []
        return [f"warmup_epochs={self.warmup_epochs}: no epoch divides clean from noisy pairs"]

    def hinge_margin(self, epoch: int) -> float | None:
        return self.margin

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        if len(context.members) != self.ensemble_size or context.caption_ids is None:
            raise TrainingError(
                "ncr trains two copies of a model in a run: set model.ensemble_size=2"
            )
        if self.form == "reference" and scores.shape[0] != scores.shape[1]:
            raise ConfigError(
                "objective.ncr.form=reference is defined for one caption per image: set "
                "objective.ncr.form=paper, or data.captions to another value than grouped"
            )
        both = [both_directions(member, positives, context) for member in context.members]
        if context.epoch < self.warmup_epochs:
            loss = sum(
                (pair_losses(pair, self.margin).sum() for pair in both), scores.new_zeros(())
            )
            return LossReport(loss)
        predicted = [predict(pair, self.margin).clamp(0, 1) for pair in both]
        loss = scores.new_zeros(())
        shares = []
        for member, pair in enumerate(both):
            probability = self.clean[1 - member, context.caption_ids].to(scores)
            is_clean = probability > self.threshold
            labels = probability + (1 - probability) * predicted[member]
            used = is_clean
            if context.epoch >= (self.noisy_from or 0):
                labels = torch.where(is_clean, labels, (predicted[0] + predicted[1]) / 2)
                used = torch.ones_like(is_clean)
            margins = soft_margins(labels, self.margin, self.soft_margin)
            loss = loss + soft_losses(pair, margins, self.form)[used].sum()
            shares.append(is_clean.float().mean())
        return LossReport(loss, {"ncr/clean": torch.stack(shares).mean()})


def pair_losses(directions: tuple[Anchors, Anchors], margin: float) -> Tensor:
    """Mean hinge cost [P] of each pair over the batch, both directions summed."""
    return _mean_cost(directions[0], margin) + _mean_cost(directions[1], margin)


def _mean_cost(anchors: Anchors, margin: float) -> Tensor:
    return (hinge(anchors, margin) * anchors.is_negative).sum(1) / anchors.scores.shape[1]


@torch.no_grad()
def predict(directions: tuple[Anchors, Anchors], margin: float) -> Tensor:
    """P(match) [P] of each pair from its costs, relative to the mean of the batch's best tenth."""
    saved = (margin - pair_losses(directions, margin) / 2).clamp(0, margin)
    best = saved.topk(len(saved) // 10 + 1).values.mean()
    return saved / best.clamp(min=torch.finfo(saved.dtype).tiny)


def soft_margins(labels: Tensor, margin: float, kind: SoftMargin) -> Tensor:
    """The margin of each label in 0 … 1; the full margin at 1."""
    if kind == "linear":
        return margin * labels
    if kind == "exponential":
        return margin * (10**labels - 1) / 9
    return margin * (torch.sin(torch.pi * (labels - 0.5)) / 2 + 0.5)


def soft_losses(
    directions: tuple[Anchors, Anchors], margins: Tensor, form: Literal["paper", "reference"]
) -> Tensor:
    """Hinge of each pair with its own margin against its hardest negatives, both ways.

    In reference form the margin of a caption's cost with image i is that of pair i.
    """
    by_text = margins[None, :] if form == "reference" else margins[:, None]
    return _hardest_cost(directions[0], margins[:, None]) + _hardest_cost(directions[1], by_text)


def _hardest_cost(anchors: Anchors, margins: Tensor) -> Tensor:
    costs = (margins + anchors.scores - anchors.positive[:, None]).clamp(min=0)
    return (costs * anchors.is_negative).amax(1)


def clean_probability(
    losses: NDArray[np.floating],
    *,
    iterations: int = 10,
    tolerance: float = 1e-2,
    least_variance: float = 5e-4,
) -> Floats:
    """Probability that each loss belongs to the lower of two Gaussians (NCR's division of pairs).

    Losses are scaled to 0 … 1. EM starts from a two-means split and ends when the mean
    log-likelihood grows by less than ``tolerance``. If all losses are equal, every pair counts as
    clean.
    """
    values = np.asarray(losses, dtype=np.float64)
    if not len(values) or np.ptp(values) < 1e-12:
        return np.ones(len(values))
    values = (values - values.min()) / np.ptp(values)
    upper = _two_means(values)
    share = np.stack([~upper, upper], axis=1).astype(np.float64)
    before = -np.inf
    for _ in range(iterations):
        weights, means, variances = _maximize(values, share, least_variance)
        share, likelihood = _expect(values, weights, means, variances)
        if abs(likelihood - before) < tolerance:
            break
        before = likelihood
    return np.asarray(share[:, int(np.argmin(means))])


def _two_means(values: Floats) -> NDArray[np.bool_]:
    """Mask of the values nearer to the higher of two centers; neither cluster is empty."""
    low, high = 0.0, 1.0
    for _ in range(100):
        upper = values > (low + high) / 2
        centers = values[~upper].mean(), values[upper].mean()
        if centers == (low, high):
            break
        low, high = centers
    return upper


def _maximize(values: Floats, share: Floats, least: float) -> tuple[Floats, Floats, Floats]:
    count = share.sum(0) + 1e-12
    means = (share * values[:, None]).sum(0) / count
    variances = (share * (values[:, None] - means) ** 2).sum(0) / count + least
    return count / len(values), means, variances


def _expect(
    values: Floats, weights: Floats, means: Floats, variances: Floats
) -> tuple[Floats, float]:
    """Share of each component in each value, and the mean log-likelihood."""
    log = (
        np.log(weights)
        - 0.5 * np.log(2 * np.pi * variances)
        - 0.5 * (values[:, None] - means) ** 2 / variances
    )
    total = np.logaddexp(log[:, 0], log[:, 1])
    return np.exp(log - total[:, None]), float(total.mean())
