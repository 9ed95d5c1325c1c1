"""One training step: a batch, on however many processes, to a loss over the global batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from counterfoil.collectives import gather_counts, gather_rows, rank
from counterfoil.data.batches import PairBatch
from counterfoil.matchers import Observation
from counterfoil.models.model import Model
from counterfoil.objectives import Context, LossReport, Objective


class TrainingStep(nn.Module):
    """Each process encodes its share and scores its images with the texts of all.

    The rows are then gathered, so negatives come from the global batch, every process sees the same
    score matrix, and the cost of scoring is divided among them.
    """

    def __init__(self, model: Model, objective: Objective, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.model, self.objective, self.dtype = model, objective, dtype

    def forward(self, batch: PairBatch, epoch: int, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        device = batch.image_ids.device.type
        with torch.autocast(device, self.dtype, enabled=self.dtype is not None):
            images = self.model.encode_images(batch.images)
            texts = self.model.encode_texts(batch.texts).gather()
            scores = gather_rows(self.model.matcher(images, texts))
        image_ids = gather_rows(batch.image_ids)
        context = Context(epoch, step, image_ids, gather_rows(batch.caption_ids))
        positives = image_ids[:, None] == image_ids[None, :]
        if scores.dtype in (torch.float16, torch.bfloat16):
            scores = scores.float()
        first_row = sum(gather_counts(len(images), scores.device)[: rank()])
        self.model.matcher.observe(
            Observation(images, texts, scores.detach(), positives, first_row, epoch)
        )
        report: LossReport = self.objective(scores, positives, context)
        return report.loss, report.diagnostics
