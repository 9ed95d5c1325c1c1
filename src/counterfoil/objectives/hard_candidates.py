"""UNITER's hard negatives: the best of many candidates, selected without gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from counterfoil.core.distributed import gather_counts, gather_rows, rank
from counterfoil.core.errors import ConfigError, TrainingError
from counterfoil.objectives.base import Context, LossReport, Objective, objectives
from counterfoil.objectives.foils import pair_images
from counterfoil.objectives.services import BatchServices


@dataclass(frozen=True)
class Hardest:
    """Indices [a, m] of the candidates of each anchor, best first; ``real`` [a, m] is a mask."""

    index: Tensor
    real: Tensor


@objectives.register("hard-candidates")
class HardCandidates(Objective):
    """UNITER: hinge on the hardest of a batch's candidates, selected without gradients.

    For the first ``anchors`` pairs of each process's batch (0: all), every other image and caption
    of that batch is a candidate. The ``kept`` best of each direction are scored again, with
    gradients. Captions of the same image and protected pairs are not candidates.
    """

    requires = "the encoded batch and the model that scores its pairs"
    needs_scores = False

    def __init__(self, *, anchors: int = 0, kept: int = 31, margin: float = 0.2) -> None:
        super().__init__()
        if anchors < 0 or kept < 1:
            raise ConfigError(
                "objective.hard-candidates: anchors must be 0 (all) or more, kept at least 1; "
                f"got {anchors} and {kept}"
            )
        self.anchors, self.kept, self.margin = anchors, kept, margin

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        services = context.services
        if services is None:
            raise TrainingError("objective.hard-candidates works on the batches of a run only")
        texts = torch.arange(len(services.batch.owners), device=positives.device)
        if self.anchors:
            texts = texts[: self.anchors]
        images = pair_images(services.batch)[texts]
        available = max(1, len(services.batch.owners) - 1, len(services.batch.image_ids) - 1)
        width = min(self.kept, max(gather_counts(available, positives.device)))
        of_images, of_texts = self._hardest(services, context, images, texts, width)
        candidates = candidate_scores(services, images, texts, of_images, of_texts)
        real = gather_rows(torch.cat([of_images.real, of_texts.real], 1))
        loss = hinge_of_candidates(candidates[:, 0], candidates[:, 1:], real, self.margin)
        return LossReport(loss, _diagnostics(candidates, real) if context.logging else {})

    def _hardest(
        self, services: BatchServices, context: Context, images: Tensor, texts: Tensor, width: int
    ) -> tuple[Hardest, Hardest]:
        """The hardest captions of each anchor's image, and images of its caption."""
        negative = local_negatives(services, context)
        with services.inference():
            all_images = services.encode_images(services.batch.images)
            all_texts = services.encode_texts(services.batch.texts)
            of_images = services.matcher(all_images[images], all_texts)
            of_texts = services.matcher(all_images, all_texts[texts]).T
        return (
            hardest(of_images, negative[images], width),
            hardest(of_texts, negative.T[texts], width),
        )

    def loss_at_equal_scores(self, anchors: int, negatives: float, epoch: int = 0) -> float | None:
        """The margin in both directions."""
        return 2 * self.margin


def hardest(scores: Tensor, negative: Tensor, width: int) -> Hardest:
    """The ``width`` best-scoring negatives of each row; fewer are real if a row has fewer."""
    ranked = scores.float().masked_fill(~negative, -torch.inf)
    order = ranked.argsort(dim=1, descending=True, stable=True)[:, :width]
    real = negative.gather(1, order)
    missing = (0, width - order.shape[1])
    pad = torch.nn.functional.pad
    return Hardest(pad(order, missing), pad(real, missing))


def hinge_of_candidates(
    positive: Tensor, candidates: Tensor, real: Tensor, margin: float
) -> Tensor:
    """Mean cost of each direction's candidates, summed.

    ``candidates`` [A, 2m] are those of one direction, then of the other.
    """
    costs = (margin + candidates - positive[:, None]).clamp(min=0).where(real, 0.0)
    halves = zip(costs.chunk(2, 1), real.chunk(2, 1), strict=True)
    means = [cost.sum() / mask.sum().clamp(min=1) for cost, mask in halves]
    return means[0] + means[1]


def local_negatives(services: BatchServices, context: Context) -> Tensor:
    """Pairs [images, captions] of this process's batch that are negatives and not protected."""
    batch = services.batch
    negative = batch.image_ids[:, None] != batch.owners[None, :]
    if context.protected is None:
        return negative
    device = negative.device
    top = sum(gather_counts(len(batch.image_ids), device)[: rank()])
    left = sum(gather_counts(len(batch.owners), device)[: rank()])
    rows, columns = negative.shape
    return negative & ~context.protected[top : top + rows, left : left + columns]


def candidate_scores(
    services: BatchServices, images: Tensor, texts: Tensor, of_images: Hardest, of_texts: Hardest
) -> Tensor:
    """Scores of each anchor's pair, its captions and its images, of all processes: [A, 1 + 2m].

    The pair itself stands in for missing candidates, so that all processes score equally many.
    """
    own_image, own_text = images[:, None], texts[:, None]
    captions = torch.where(of_images.real, of_images.index, own_text)
    pictures = torch.where(of_texts.real, of_texts.index, own_image)
    rows = torch.cat([own_image, own_image.expand_as(captions), pictures], 1)
    columns = torch.cat([own_text, captions, own_text.expand_as(pictures)], 1)
    scores = services.paired(services.images[rows.flatten()], services.texts[columns.flatten()])
    return scores.view(-1, rows.shape[1])


@torch.no_grad()
def _diagnostics(scores: Tensor, real: Tensor) -> dict[str, Tensor]:
    """Share of the hardest candidates that score below their pair, and their mean number."""
    below = (scores[:, 1:] < scores[:, :1]) & real
    return {
        "candidates/accuracy": below.sum() / real.sum().clamp(min=1),
        "candidates/kept": real.sum() / (2 * len(real)),
    }
