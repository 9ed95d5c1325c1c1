"""What objectives share that bring more images and texts into the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from counterfoil.data.batches import ExtraBatch, PairBatch
from counterfoil.errors import TrainingError
from counterfoil.objectives.base import Context
from counterfoil.objectives.services import Live


def brought(context: Context, name: str) -> tuple[Live, ExtraBatch]:
    """The batch with its model, and what the objective ``name`` brought into it."""
    if context.live is None or context.extra is None:
        raise TrainingError(f"objective.{name} works on the batches of a training run only")
    return context.live, context.extra


def pair_images(batch: PairBatch) -> Tensor:
    """Row of the image of each caption of a batch."""
    if len(batch.image_ids) == len(batch.owners):
        return torch.arange(len(batch.owners), device=batch.owners.device)
    return (batch.owners[:, None] == batch.image_ids).int().argmax(1)
