"""One training step: scores and loss of the global batch, on one or several processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from counterfoil.core.distributed import gather_counts, gather_rows, rank
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.batches.collate import ImageBatch, PairBatch, TextBatch
from counterfoil.encoders import Encoded
from counterfoil.encoders.encoded import Needs
from counterfoil.encoders.recurrent import cuda_graphs
from counterfoil.matchers import Matcher, Observation
from counterfoil.matchers.base import paired_scores
from counterfoil.matchers.ensemble import EnsembleMatcher
from counterfoil.models.model import Model
from counterfoil.objectives import Context, Objective, both_directions
from counterfoil.objectives.positives import Twins, twin_pairs
from counterfoil.scoring.engine import fallback
from counterfoil.training.diagnostics import (
    margin_histogram,
    score_diagnostics,
    separation,
    tangential_gradients,
)
from counterfoil.training.gradient_cache import GradientCache

PRECISIONS = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

HISTOGRAM = "margins"
MARGIN_RANGE = (-1.0, 1.0)
"""Range of the margin histogram."""


@dataclass(frozen=True)
class Scored:
    """This process's encoded share of a batch, and the scores of the global batch.

    ``all_texts`` are the texts of all processes, ``members`` the scores of each ensemble member,
    ``scores`` their mean.
    """

    images: Encoded
    texts: Encoded
    all_texts: Encoded
    members: tuple[Tensor, ...]
    scores: Tensor


def score_batch(
    model: Model,
    batch: PairBatch,
    dtype: torch.dtype | None = None,
    needs: Needs | None = None,
    scored: bool = True,
    chunk_size: int = 0,
) -> Scored:
    """Each process encodes its share and scores its images with the texts of all processes.

    The rows are then gathered, so every process has the same score matrix and scoring is divided
    among them. With ``scored=False`` the batch is only encoded, and all scores are NaN.
    ``chunk_size`` items are encoded at a time (`gradient_cache`); 0 means all.
    """
    cache = GradientCache(model, chunk_size)
    device = batch.image_ids.device.type
    with torch.autocast(device, dtype, enabled=dtype is not None):
        images = cache.images(batch.images, needs)
        texts = cache.texts(batch.texts, needs)
        all_texts = texts.keep(model.matcher.needs).gather()
        matcher = model.matcher
        members: tuple[Tensor, ...]
        if not scored:
            members = (
                images.mask.new_full((len(images), len(all_texts)), torch.nan, dtype=torch.float32),
            )
        elif isinstance(matcher, EnsembleMatcher):
            members = matcher.each(images, all_texts)
        else:
            members = (matcher(images, all_texts),)
    members = tuple(_full_precision(gather_rows(scores)) for scores in members)
    scores = members[0] if len(members) == 1 else torch.stack(members).mean(0)
    return Scored(images, texts, all_texts, members, scores)


def _full_precision(scores: Tensor) -> Tensor:
    return scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores


class TrainingBatchServices:
    """Access of objectives to the batch of the current step and to the model."""

    def __init__(
        self,
        model: Model,
        batch: PairBatch,
        scored: Scored,
        dtype: torch.dtype | None,
        chunk_size: int = 0,
    ) -> None:
        self.model, self.batch, self.dtype = model, batch, dtype
        self.cache = GradientCache(model, chunk_size)
        self.images, self.texts = scored.images, scored.texts

    @property
    def text_encoder(self) -> nn.Module:
        return self.model.text_encoder

    @property
    def matcher(self) -> Matcher:
        return self.model.matcher

    # without CUDA graphs: the number of other items than the batch's varies
    def encode_images(self, images: ImageBatch) -> Encoded:
        with self.autocast(), cuda_graphs(False):
            return self.cache.images(images)

    def encode_texts(self, texts: TextBatch, needs: Needs | None = None) -> Encoded:
        with self.autocast(), cuda_graphs(False):
            return self.cache.texts(texts, needs)

    def paired(self, images: Encoded, texts: Encoded) -> Tensor:
        counts = gather_counts(len(images), images.mask.device)
        rows = torch.arange(max(counts), device=images.mask.device)
        mine = rows.clamp(max=len(images) - 1)  # padded to the same number on every process
        with self.autocast():
            scores = paired_scores(self.model.matcher, images[mine], texts[mine])
        real = torch.cat([rows < count for count in counts])
        return gather_rows(_full_precision(scores))[real]

    def matrix(self, images: Encoded, texts: Encoded) -> Tensor:
        with self.autocast():
            all_texts = texts.keep(self.model.matcher.needs).gather()
            scores = self.model.matcher(images, all_texts)
        return gather_rows(_full_precision(scores))

    def autocast(self) -> torch.autocast:
        device = self.batch.image_ids.device.type
        return torch.autocast(device, self.dtype, enabled=self.dtype is not None)

    @contextmanager
    def inference(self) -> Iterator[None]:
        with eval_mode(self.model), torch.no_grad(), self.autocast():
            yield


class TrainingStep(nn.Module):
    """Scores of the global batch, statistics of the matcher, and the loss."""

    def __init__(
        self,
        model: Model,
        objective: Objective,
        dtype: torch.dtype | None,
        chunk_size: int = 0,
        twins: Twins | None = None,
    ) -> None:
        super().__init__()
        self.model, self.objective, self.dtype = model, objective, dtype
        self.chunk_size, self.twins = chunk_size, twins

    def forward(
        self, batch: PairBatch, epoch: int, step: int, logging: bool = True
    ) -> tuple[Tensor, dict[str, Tensor]]:
        objective = self.objective
        scored = score_batch(
            self.model,
            batch,
            self.dtype,
            objective.needs,
            scored=objective.needs_scores,
            chunk_size=self.chunk_size,
        )
        image_ids, owners = gather_rows(batch.image_ids), gather_rows(batch.owners)
        positives = image_ids[:, None] == owners[None, :]
        caption_ids = gather_rows(batch.caption_ids)
        protected = twin_pairs(self.twins, image_ids, caption_ids, positives)
        if objective.needs_scores:
            self._observe(scored, positives, protected, epoch)
        context = Context(
            epoch,
            step,
            image_ids,
            caption_ids,
            protected,
            members=scored.members if len(scored.members) > 1 else (),
            services=TrainingBatchServices(self.model, batch, scored, self.dtype, self.chunk_size),
            logging=logging,
        )
        report = objective.compute(scored.scores, positives, context)
        if not logging:
            return report.loss, {}
        common = {}
        if objective.needs_scores:
            common = self._diagnose(scored, positives, replace(context, protected=report.protected))
        return report.loss, {**common, **report.diagnostics}

    def _observe(
        self, scored: Scored, positives: Tensor, protected: Tensor | None, epoch: int
    ) -> None:
        first_row = first_text = sum(gather_counts(len(scored.images), positives.device)[: rank()])
        texts = len(scored.texts)
        if len(scored.scores) != len(scored.all_texts):  # the same in every process
            first_text = sum(gather_counts(texts, positives.device)[: rank()])
        own_texts = slice(first_text, first_text + texts)
        scores = scored.scores.detach()
        self.model.matcher.observe(
            Observation(
                scored.images,
                scored.all_texts,
                scores,
                positives,
                first_row,
                epoch,
                own_texts,
                protected,
            )
        )

    @torch.no_grad()
    def _diagnose(self, scored: Scored, positives: Tensor, context: Context) -> dict[str, Tensor]:
        """Diagnostics that every run logs, whatever its objective."""
        directions = both_directions(scored.scores, positives, context)
        diagnostics = {**score_diagnostics(directions), **separation(directions)}
        low, high = MARGIN_RANGE
        diagnostics[HISTOGRAM] = margin_histogram(directions, low=low, high=high)
        if self.model.spec.matcher["name"] == "cosine" and self.model.spec.ensemble_size == 1:
            images, texts = scored.images.pooled, scored.all_texts.pooled
            if images is not None and texts is not None:
                margin = self.objective.hinge_margin(context.epoch)
                diagnostics |= tangential_gradients(
                    gather_rows(images),
                    texts,
                    positives,
                    context,
                    **({} if margin is None else {"margin": margin}),
                )
        return diagnostics


def anchors_and_negatives(batch: PairBatch, twins: Twins | None = None) -> tuple[int, float]:
    """Pairs of the global batch, and the mean number of negatives over both directions."""
    images, owners = gather_rows(batch.image_ids), gather_rows(batch.owners)
    positives = images[:, None] == owners[None, :]
    negatives = ~positives
    protected = twin_pairs(twins, images, gather_rows(batch.caption_ids), positives)
    if protected is not None:
        negatives &= ~protected
    by_image, by_text = negatives.sum(1).float(), negatives.sum(0).float()
    if len(images) == len(owners):
        return len(owners), float((by_image + by_text).mean() / 2)
    row = positives.int().argmax(0)
    return len(owners), float((by_image[row] + by_text).mean() / 2)


def batch_notes(step: TrainingStep, batch: PairBatch) -> list[str]:
    """Notes on the first batch: negatives per anchor, chunks, and a slower scoring path."""
    pairs, negatives = anchors_and_negatives(batch, step.twins)
    line = f"an anchor sees {negatives:.4g} negatives: batches of {pairs} pairs"
    if step.chunk_size:
        line += f", encoded {step.chunk_size} at a time"
        whole = GradientCache(step.model).whole()
        if whole:
            line += f" (but the {' and '.join(whole)} side at once: it needs the whole batch)"
    slower = fallback(step.model, training=True)
    return [line, slower] if slower else [line]
