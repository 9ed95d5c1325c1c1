"""UNITER's hard negatives: the best of many candidates, selected without gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from counterfoil.core.distributed import gather_rows, own_slice
from counterfoil.core.errors import ConfigError, TrainingError
from counterfoil.encoders.encoded import Encoded
from counterfoil.objectives.base import Context, LossReport, Objective, objectives
from counterfoil.objectives.foils import anchor_rows, pair_images
from counterfoil.objectives.services import BatchServices


@dataclass(frozen=True)
class Hardest:
    """Candidates [a, m] of each anchor, best first; ``real`` [a, m] is a mask.

    ``index`` are rows of the global batch.
    """

    index: Tensor
    real: Tensor


@objectives.register("hard-candidates")
class HardCandidates(Objective):
    """UNITER: hinge on the hardest of a batch's candidates, selected without gradients.

    For ``anchors`` pairs, evenly spaced over a batch (0: all), every other image and caption of the
    batch is a candidate. The ``kept`` best of each direction are scored again, with gradients.
    Captions of the same image and protected pairs are not candidates. Several processes divide the
    anchors among them; candidates are those of the global batch.
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
        self._require_nonnegative(margin=margin)
        self.anchors, self.kept, self.margin = anchors, kept, margin

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        services = context.services
        if services is None:
            raise TrainingError("objective.hard-candidates works on the batches of a run only")
        texts = anchor_rows(services.batch, self.anchors)
        images = pair_images(services.batch)[texts]
        width = min(self.kept, max(1, max(positives.shape) - 1))
        negative = candidate_mask(positives, context)
        of_images, of_texts = self._hardest(services, negative, images, texts, width)
        candidates = candidate_scores(services, images, texts, of_images, of_texts)
        real = gather_rows(torch.cat([of_images.real, of_texts.real], 1))
        loss = hinge_of_candidates(candidates[:, 0], candidates[:, 1:], real, self.margin)
        return LossReport(loss, _diagnostics(candidates, real) if context.logging else {})

    def _hardest(
        self, services: BatchServices, negative: Tensor, images: Tensor, texts: Tensor, width: int
    ) -> tuple[Hardest, Hardest]:
        """The hardest captions of each anchor's image, and images of its caption."""
        with services.inference():
            own_images = services.encode_images(services.batch.images)
            own_texts = services.encode_texts(services.batch.texts)
            all_images, all_texts = _gather(services, own_images, own_texts)
            of_images = services.matcher(own_images[images], all_texts)
            of_texts = services.matcher(all_images, own_texts[texts]).T
        rows = own_slice(len(own_images), negative.device)
        columns = own_slice(len(own_texts), negative.device)
        return (
            hardest(of_images, negative[rows][images], width),
            hardest(of_texts, negative.T[columns][texts], width),
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


def candidate_mask(positives: Tensor, context: Context) -> Tensor:
    """Pairs [images, captions] of the global batch that are negatives and not protected."""
    return ~positives if context.protected is None else ~(positives | context.protected)


def candidate_scores(
    services: BatchServices, images: Tensor, texts: Tensor, of_images: Hardest, of_texts: Hardest
) -> Tensor:
    """Scores of each anchor's pair, its captions and its images, of all processes: [A, 1 + 2m].

    ``images`` and ``texts`` are the anchors of this process, as rows of its share. The pair itself
    stands in for missing candidates, so that all processes score equally many.
    """
    device = images.device
    own_image = images[:, None] + own_slice(len(services.images), device).start
    own_text = texts[:, None] + own_slice(len(services.texts), device).start
    captions = torch.where(of_images.real, of_images.index, own_text)
    pictures = torch.where(of_texts.real, of_texts.index, own_image)
    rows = torch.cat([own_image, own_image.expand_as(captions), pictures], 1)
    columns = torch.cat([own_text, captions, own_text.expand_as(pictures)], 1)
    all_images, all_texts = _gather(services, services.images, services.texts)
    scores = services.paired(all_images[rows.flatten()], all_texts[columns.flatten()])
    return scores.view(-1, rows.shape[1])


def _gather(services: BatchServices, images: Encoded, texts: Encoded) -> tuple[Encoded, Encoded]:
    """The images and texts of all processes, with the tensors that the matcher reads."""
    needs = services.matcher.needs
    return images.keep(needs).gather(), texts.keep(needs).gather()


@torch.no_grad()
def _diagnostics(scores: Tensor, real: Tensor) -> dict[str, Tensor]:
    """Share of the hardest candidates that score below their pair, and their mean number."""
    below = (scores[:, 1:] < scores[:, :1]) & real
    return {
        "candidates/accuracy": below.sum() / real.sum().clamp(min=1),
        "candidates/kept": real.sum() / (2 * len(real)),
    }
