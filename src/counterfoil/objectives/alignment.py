"""Align before fuse: words find their regions before a cross-encoder's layers mix the two.

A cross-encoder from nothing has to learn at once which region a word may mean and what follows for
the pair; as long as it knows neither, nothing tells it the other. Its embeddings by themselves can
be compared at next to no cost, all images with all captions of a batch, and learn the former within
a few hundred updates. What they then hold to be alike are the pairs that the layers should be asked
about (ALBEF, Li et al. 2021, with the hard assignment of CHAN in place of pooled vectors).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from counterfoil.core.distributed import gather_counts, gather_rows, rank
from counterfoil.core.errors import ConfigError, TrainingError
from counterfoil.encoders.encoded import Encoded, l2_normalize
from counterfoil.matchers.chan import CHAN
from counterfoil.matchers.fragment_matcher import fragments
from counterfoil.objectives.base import Context, LossReport, objectives
from counterfoil.objectives.contrastive import InfoNCE, at_least_float32
from counterfoil.objectives.foils import pair_images
from counterfoil.objectives.hard_candidates import (
    Hardest,
    candidate_scores,
    hardest,
    local_negatives,
)


@objectives.register("alignment")
class Alignment(InfoNCE):
    """Align before fuse: InfoNCE on embeddings, which select the negatives of a cross-encoder.

    Before any layer, a caption is compared with an image by the mean over its words of the best
    region's cosine, at a learned ``temperature``. ``kept`` captions of each image and images of
    each caption, drawn from that softmax, are negatives of the cross-encoder, whose loss (softmax
    over a pair and its negatives, both ways) counts ``match`` times. In the first ``alone`` epochs,
    and in all where 0 are kept, the embeddings learn by themselves.
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
        self.kept, self.match, self.alone = kept, match, alone

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        services = context.services
        if services is None:
            raise TrainingError("objective.alignment works on the batches of a training run only")
        with services.autocast():
            mine = at_least_float32(
                likeness(services.images, services.texts.keep("fragments").gather())
            )
        aligned: LossReport = super().compute(gather_rows(mine), positives, context)
        diagnostics = {
            "alignment/loss": aligned.loss.detach(),
            "alignment/temperature": 1 / self.scale(mine).detach(),
        }
        if not self._fuses(context.epoch):
            return LossReport(aligned.loss, diagnostics)
        found, real = self._asked(mine.detach(), context)
        matched = softmax_of_candidates(found[:, 0], found[:, 1:], real)
        if context.logging:
            below = (found[:, 1:] < found[:, :1]) & real
            diagnostics["alignment/match"] = matched.detach()
            diagnostics["alignment/accuracy"] = below.sum() / real.sum().clamp(min=1)
        return LossReport(aligned.loss + self.match * matched, diagnostics)

    def _fuses(self, epoch: int) -> bool:
        return self.kept > 0 and epoch >= self.alone

    def _asked(self, mine: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """The cross-encoder's scores [A, 1 + 2m] of all pairs and negatives, and which are real."""
        services = context.services
        assert services is not None  # noqa: S101 - seen to by `forward`
        images = pair_images(services.batch)
        texts = torch.arange(len(images), device=images.device)
        left = sum(gather_counts(len(images), images.device)[: rank()])
        logits = mine[:, left : left + len(images)] * self.scale(mine).detach()
        negative = local_negatives(services, context)
        of_images = drawn(logits[images], negative[images], self.kept)
        of_texts = drawn(logits.T, negative.T, self.kept)
        found = candidate_scores(services, images, texts, of_images, of_texts)
        return found, gather_rows(torch.cat([of_images.real, of_texts.real], 1))

    def loss_at_equal_scores(self, anchors: int, negatives: float, epoch: int = 0) -> float | None:
        """The loss of both parts while all scores are equal."""
        alone = super().loss_at_equal_scores(anchors, negatives, epoch)
        if alone is None or not self._fuses(epoch):
            return alone
        asked = torch.tensor(1.0 + min(self.kept, negatives)).log()
        return alone + self.match * float(asked)


def likeness(images: Encoded, texts: Encoded) -> Tensor:
    """Mean over the words of each text of the highest cosine with a region, [n_images, n_texts]."""
    sides = (replace(one, fragments=l2_normalize(fragments(one))) for one in (images, texts))
    scores: Tensor = CHAN(fragments(images).shape[-1], pooling="mean")(*sides)
    return scores


def drawn(logits: Tensor, negative: Tensor, count: int) -> Hardest:
    """``count`` negatives of each row, drawn without replacement from their softmax."""
    noise = -torch.empty_like(logits).exponential_().log()  # Gumbel's: the highest are such draws
    return hardest(logits + noise, negative, count)


def softmax_of_candidates(positive: Tensor, candidates: Tensor, real: Tensor) -> Tensor:
    """Cross-entropy of each pair among its candidates, the mean of both directions.

    ``candidates`` [A, 2m] are those of one direction, then of the other.
    """
    apart = (candidates - positive[:, None]).masked_fill(~real, -torch.inf)
    own = torch.zeros_like(positive)[:, None]
    costs = [torch.cat([own, some], 1).logsumexp(1).mean() for some in apart.chunk(2, 1)]
    return (costs[0] + costs[1]) / 2
