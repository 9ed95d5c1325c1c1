"""Align before fuse: contrastive learning of word and region embeddings below a cross-encoder.

A randomly initialized cross-encoder must learn both which region a word refers to and whether the
pair matches, and neither helps to learn the other. Its input embeddings can be compared cheaply,
all images with all captions of a batch, and align within a few hundred updates. Pairs with similar
embeddings are then the hard negatives of the cross-encoder. This is ALBEF (Li et al. 2021), with
the hard assignment of CHAN in place of pooled vectors.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from counterfoil.core.distributed import gather_rows, own_slice
from counterfoil.core.errors import ConfigError, TrainingError
from counterfoil.encoders.encoded import Encoded, l2_normalize
from counterfoil.matchers.chan import CHAN
from counterfoil.matchers.fragment_matcher import fragments
from counterfoil.objectives.base import (
    Context,
    LossReport,
    at_least_float32,
    batch_generator,
    objectives,
)
from counterfoil.objectives.contrastive import InfoNCE
from counterfoil.objectives.foils import pair_images
from counterfoil.objectives.hard_candidates import (
    Hardest,
    candidate_mask,
    candidate_scores,
    hardest,
)
from counterfoil.objectives.services import BatchServices, RunSetup


@objectives.register("alignment")
class Alignment(InfoNCE):
    """Align before fuse: InfoNCE on embeddings, which select the negatives of a cross-encoder.

    The embeddings of a caption and an image are compared before any layer: the mean over words of
    the best region's cosine, at a learned ``temperature``. ``kept`` captions per image and images
    per caption, sampled from that softmax, are negatives of the cross-encoder. Its loss (softmax
    over a pair and its negatives, both directions) has the weight ``match``. Only the embeddings
    are trained in the first ``alone`` epochs, or always if ``kept=0``.
    """

    requires = "the encoded words and regions of the batch"
    needs_scores = False

    def __init__(
        self, *, temperature: float = 0.1, kept: int = 0, match: float = 1.0, alone: int = 0
    ) -> None:
        super().__init__(temperature=temperature)
        if min(kept, alone) < 0:
            raise ConfigError(
                f"objective.alignment: kept and alone must be 0 or more, got {kept} and {alone}"
            )
        self._require_nonnegative(match=match)
        self.kept, self.match, self.alone, self.seed = kept, match, alone, 0

    def prepare(self, training: RunSetup) -> None:
        self.seed = training.seed

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        services = context.services
        if services is None:
            raise TrainingError("objective.alignment works on the batches of a training run only")
        _require_fragments(services.images, services.texts)
        with services.autocast():
            texts = services.texts.keep("fragments").gather()
            own_rows = at_least_float32(mean_max_cosine(services.images, texts))
        similarity = gather_rows(own_rows)
        alignment: LossReport = super().compute(similarity, positives, context)
        diagnostics = {
            "alignment/loss": alignment.loss.detach(),
            "alignment/temperature": 1 / self.scale(own_rows).detach(),
        }
        if not self._trains_layers(context.epoch):
            return LossReport(alignment.loss, diagnostics)
        negatives = self._sample(similarity.detach(), positives, context, services)
        candidates, real = self._candidate_scores(services, *negatives)
        match = softmax_of_candidates(candidates[:, 0], candidates[:, 1:], real)
        if context.logging:
            below = (candidates[:, 1:] < candidates[:, :1]) & real
            diagnostics["alignment/match"] = match.detach()
            diagnostics["alignment/accuracy"] = below.sum() / real.sum().clamp(min=1)
        return LossReport(alignment.loss + self.match * match, diagnostics)

    def _trains_layers(self, epoch: int) -> bool:
        return self.kept > 0 and epoch >= self.alone

    def never_reached(self, epochs: int, steps_per_epoch: int) -> list[str]:
        if not self.kept or self.alone < epochs:
            return []
        return [f"alone={self.alone}: no epoch trains the cross-encoder"]

    def _sample(
        self, similarity: Tensor, positives: Tensor, context: Context, services: BatchServices
    ) -> tuple[Hardest, Hardest]:
        """Negatives of this process's pairs, with its rows of the global batch's random numbers."""
        logits = similarity * self.scale(similarity).detach()
        top = own_slice(len(services.images), logits.device).start
        images = gather_rows(pair_images(services.batch) + top)
        negative = candidate_mask(positives, context)
        generator = batch_generator(context, self.seed, logits.device)
        own = own_slice(len(services.texts), logits.device)
        return (
            sample_negatives(logits, negative, self.kept, generator, images, own),
            sample_negatives(logits.T, negative.T, self.kept, generator, own=own),
        )

    def _candidate_scores(
        self, services: BatchServices, of_images: Hardest, of_texts: Hardest
    ) -> tuple[Tensor, Tensor]:
        """The cross-encoder's scores [A, 1 + 2m] of pairs and sampled negatives, and a mask."""
        images = pair_images(services.batch)
        texts = torch.arange(len(images), device=images.device)
        scores = candidate_scores(services, images, texts, of_images, of_texts)
        return scores, gather_rows(torch.cat([of_images.real, of_texts.real], 1))

    def loss_at_equal_scores(self, anchors: int, negatives: float, epoch: int = 0) -> float | None:
        alignment = super().loss_at_equal_scores(anchors, negatives, epoch)
        if alignment is None or not self._trains_layers(epoch):
            return alignment
        return alignment + self.match * float(torch.tensor(1.0 + min(self.kept, negatives)).log())


def _require_fragments(*sides: Encoded) -> None:
    """Refuse a model that compares whole images with whole captions."""
    if any(side.fragments is None for side in sides):
        raise ConfigError(
            "objective.alignment compares words with regions, but this model has one vector per "
            "image and caption: set model.name to a cross-encoder (uniter-small, uniter-base or "
            "uniter-large), or choose another objective, such as infonce"
        )


def mean_max_cosine(images: Encoded, texts: Encoded) -> Tensor:
    """Mean over the words of a text of the highest cosine with a region, [n_images, n_texts]."""
    sides = (replace(side, fragments=l2_normalize(fragments(side))) for side in (images, texts))
    scores: Tensor = CHAN(fragments(images).shape[-1], pooling="mean")(*sides)
    return scores


def sample_negatives(
    logits: Tensor,
    negative: Tensor,
    count: int,
    generator: torch.Generator | None = None,
    rows: Tensor | None = None,
    own: slice = slice(None),
) -> Hardest:
    """``count`` negatives per row, sampled without replacement from a softmax (Gumbel top-k).

    Numbers are drawn for all ``rows`` (default: each row once), but only the ``own`` of these are
    ranked: processes draw the same numbers, and each ranks its share.
    """
    rows = torch.arange(len(logits), device=logits.device) if rows is None else rows
    # not `empty_like`, which is filled in the memory order of the logits
    exponential = logits.new_empty(len(rows), logits.shape[1]).exponential_(generator=generator)
    noise = -exponential[own].log()
    return hardest(logits[rows[own]] + noise, negative[rows[own]], count)


def softmax_of_candidates(positive: Tensor, candidates: Tensor, real: Tensor) -> Tensor:
    """Cross-entropy of each pair among its candidates, the mean of both directions.

    ``candidates`` [A, 2m] are those of one direction, then of the other.
    """
    logits = (candidates - positive[:, None]).masked_fill(~real, -torch.inf)
    own = torch.zeros_like(positive)[:, None]
    costs = [torch.cat([own, half], 1).logsumexp(1).mean() for half in logits.chunk(2, 1)]
    return (costs[0] + costs[1]) / 2
