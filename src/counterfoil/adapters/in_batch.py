"""Base class of the losses for other trainers: an objective over the scores of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from counterfoil.core.errors import ConfigError
from counterfoil.objectives import Context, create_objective
from counterfoil.objectives.composite import Composite
from counterfoil.objectives.contrastive import at_least_float32

Spec = str | Mapping[str, Any]


class InBatchLoss(nn.Module):
    """An objective by name or configuration, as in a recipe, over the scores of a batch of pairs.

    Pair ``k`` is image ``k`` with text ``k``. Pairs with the same image id are positives; identical
    texts are never negatives of each other. For the schedules of objectives, an epoch has
    ``steps_per_epoch`` training steps; 0: all steps belong to the first epoch.
    """

    def __init__(self, objective: Spec = "hardest", steps_per_epoch: int = 0) -> None:
        super().__init__()
        self.spec: Spec = objective if isinstance(objective, str) else dict(objective)
        self.objective = _create_scores_only(objective)
        if steps_per_epoch < 0:
            raise ConfigError(f"steps_per_epoch: expected at least 0, got {steps_per_epoch}")
        self.steps_per_epoch, self.step = steps_per_epoch, 0

    def of_scores(self, scores: Tensor, image_ids: Tensor, text_ids: Tensor) -> Tensor:
        """The loss of scores [B, B]; equal ids [B] mark equal images and equal texts."""
        pairs = torch.eye(len(scores), dtype=torch.bool, device=scores.device)
        positives = pairs | (image_ids[:, None] == image_ids)
        protected = None
        if self.objective.protects_identical:
            protected = (text_ids[:, None] == text_ids) & ~positives
        context = Context(
            epoch=self.step // self.steps_per_epoch if self.steps_per_epoch else 0,
            step=self.step,
            protected=protected,
            logging=False,
        )
        if self.training and torch.is_grad_enabled():
            self.step += 1
        return self.objective.compute(at_least_float32(scores), positives, context).loss


def _create_scores_only(spec: Spec) -> Composite:
    objective = create_objective(spec)
    for name, term in objective.each():
        if term.requires or not term.needs_scores or term.ensemble_size > 1 or term.held_out:
            raise ConfigError(
                f"objective '{name}' reads more than the scores of a batch, so it trains with "
                "`counterfoil train` only; objectives of scores: triplet, hardest, selhn …"
            )
    return objective


def row_ids(rows: Tensor) -> Tensor:
    """Ids [B] that are equal for equal rows [B, ...], on all processes and for any padding.

    A row is hashed to 64 bits as a weighted sum, with a fixed random weight per column; zeros
    (padding) do not contribute.
    """
    flat = rows.detach().flatten(1)
    if flat.is_floating_point():
        flat = flat.float().contiguous().view(torch.int32)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-(2**62), 2**62, (flat.shape[1],), generator=generator) * 2 + 1
    return (flat.long() * weights.to(flat.device)).sum(1)
