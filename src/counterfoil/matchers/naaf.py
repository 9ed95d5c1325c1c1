"""NAAF: negative-aware attention (Zhang et al. 2022). Words that match nothing count against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from counterfoil.encoders.encoded import Encoded
from counterfoil.kernels.attention import (
    attended_cosine,
    gram,
    l2_over,
    leaky,
    masked_softmax,
    similarities,
)
from counterfoil.matchers.base import Observation, matchers
from counterfoil.matchers.boundary import MismatchBoundary
from counterfoil.matchers.local import LocalMatcher, WordParts, fragments
from counterfoil.matchers.naaf_reference import ReferenceBoundary, score_with_mining

Intra = Literal["none", "inference", "always"]


@dataclass(frozen=True)
class Branches:
    """Effects [C, Q, N] of every asking fragment of every pair, and where it looked [C, Q, N, K].

    C answering items (images, in t2i), Q asking items with N fragments each, K answering fragments.
    """

    negative: Tensor
    feature: Tensor
    relevance: Tensor
    weights: Tensor

    @property
    def total(self) -> Tensor:
        return self.negative + self.feature + self.relevance


@matchers.register("naaf")
class NAAF(LocalMatcher):
    """NAAF: mean over words of a negative and two positive effects around a learned boundary t.

    ``intra`` says when a word's match is propagated to words like it (eq. 9): at inference as in
    the paper, always, or never. ``direction`` adds the image-to-text side, where regions ask and
    words answer, with a boundary of its own. ``negative=False`` and ``mining=False`` (then t is
    ``boundary``) are the paper's ablations.

    ``form="reference"`` reproduces the public code: its boundary (recomputed caption by caption
    within a batch, with the least similar image as the wrong one), LeakyReLU in the relevance
    term, propagation only as a gate, λ = 5 in it, and μ₊ − 3σ₊ as boundary at inference.
    """

    floats_per_cell = 10

    def __init__(
        self,
        embed_size: int,
        *,
        lambda_softmax: float = 20.0,
        lambda_intra: float = 20.0,
        intra: Intra = "inference",
        direction: Literal["t2i", "i2t", "both"] = "t2i",
        negative: bool = True,
        mining: bool = True,
        boundary: float = 0.0,
        alpha: float = 2.0,
        adjust_epoch: int = 15,
        momentum: float = 0.1,
        min_samples: int = 200,
        form: Literal["paper", "reference"] = "paper",
    ) -> None:
        super().__init__(embed_size)
        self.lambda_softmax, self.lambda_intra = lambda_softmax, lambda_intra
        self.intra, self.negative, self.mining = intra, negative, mining
        self.directions = ("t2i", "i2t") if direction == "both" else (direction,)
        self.form = form
        if form == "reference":
            self.reference = ReferenceBoundary(alpha, min_samples)
            self.lambda_intra = 5.0
        else:
            self.boundaries = torch.nn.ModuleDict(
                {
                    side: MismatchBoundary(alpha, adjust_epoch, momentum, min_samples)
                    for side in self.directions
                }
            )
            for learned in self.boundaries.values():
                learned.boundary.fill_(boundary)  # type: ignore[operator]

    def boundary_of(self, side: str) -> float:
        """The boundary t now in force in one direction."""
        if self.form == "reference":
            return self.reference.thres if self.training else self.reference.thres_safe
        learned = self.boundaries[side]
        assert isinstance(learned, MismatchBoundary)  # noqa: S101
        return learned.value

    def forward(self, images: Encoded, texts: Encoded) -> Tensor:
        if self.form == "reference" and self.training and self.mining:
            return score_with_mining(self, images, texts)
        return super().forward(images, texts)

    def tile(self, images: Encoded, texts: Encoded) -> Tensor:
        scores = None
        for side in self.directions:
            asking, answering = (texts, images) if side == "t2i" else (images, texts)
            effects = self.branches(asking, answering, self.boundary_of(side)).total
            mean = effects.sum(-1) / asking.mask.sum(1).clamp(min=1)  # eq. 12; [C, Q]
            mean = mean if side == "t2i" else mean.T
            scores = mean if scores is None else scores + mean
        assert scores is not None  # noqa: S101
        return scores

    def branches(self, asking: Encoded, answering: Encoded, t: float) -> Branches:
        """Effects of each asking fragment (a word, in t2i) against each answering item."""
        u, v = fragments(asking), fragments(answering)
        answers = answering.mask[:, None, None, :]
        sims = similarities(v, u)  # [C, Q, N, K], eq. 6
        closeness = sims.masked_fill(~answers, -2.0).amax(-1) - t  # eq. 7
        asked = asking.mask[None].expand_as(closeness)
        negative = self._negative(u, asking.mask, closeness) if self.negative else closeness * 0
        weights = masked_softmax(self.lambda_softmax * (sims - t), (sims > t) & answers)  # eq. 10
        # the public code takes words as unit vectors, so no gradient flows through their length
        lengths = u.norm(dim=-1) if self.form == "paper" else torch.ones_like(u[..., 0])
        feature = attended_cosine(sims, weights, gram(v), lengths)
        relevance, looked = self._relevance(sims, asking.mask, answers)
        parts = [x.masked_fill(~asked, 0.0) for x in (negative, feature, relevance)]
        return Branches(parts[0], parts[1], parts[2], looked)

    def _negative(self, u: Tensor, mask: Tensor, closeness: Tensor) -> Tensor:
        """Eq. 8, with eq. 9 where it applies: [C, Q, N]."""
        propagate = self.intra == "always" or (self.intra == "inference" and not self.training)
        if not propagate:
            return closeness.clamp(max=0)
        kin = masked_softmax(self.lambda_intra * gram(u), mask[:, None, :])  # [Q, N, N]
        spread = torch.einsum("qnm,cqm->cqn", kin, closeness)
        if self.form == "reference":
            return closeness * (spread < 0)
        return spread.clamp(max=0)

    def _relevance(self, sims: Tensor, mask: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
        """s^r: similarities weighted by how much each fragment is this one's own."""
        raised = leaky(sims) if self.form == "reference" else sims.clamp(min=0)
        own = l2_over(raised.masked_fill(~mask[None, :, :, None], 0.0), 2)
        weights = masked_softmax(self.lambda_softmax * own, answers)
        return (weights * sims).sum(-1), weights

    @torch.no_grad()
    def observe(self, seen: Observation) -> None:
        """Discriminative mismatch mining (section 3.1.3): learn t from correctly ranked captions.

        For each caption whose own image scores highest of the batch, every word gives its highest
        similarity with that image as matched, and with one other image, drawn at random, as
        mismatched.
        """
        if self.form == "reference" or not self.mining:
            return
        scores, positives = seen.scores, seen.positives
        others = scores.masked_fill(positives, -torch.inf).amax(0)
        right = scores.diagonal() > others  # [T]
        rows = torch.arange(len(seen.images), device=scores.device)
        texts = rows + seen.first_row
        wrong = _another_image(~positives[seen.first_row :, :][: len(rows)][:, texts])
        usable = right[texts] & (wrong >= 0)
        rows, texts, wrong = rows[usable], texts[usable], wrong[usable]
        for side in self.directions:
            matched = _maxima(seen.images[rows], seen.texts[texts], side)
            mismatched = _maxima(seen.images[wrong], seen.texts[texts], side)
            learned = self.boundaries[side]
            assert isinstance(learned, MismatchBoundary)  # noqa: S101
            learned.observe(matched, mismatched, seen.epoch)

    def diagnostics(self) -> dict[str, float]:
        if self.form == "reference":
            return self.reference.diagnostics()
        side = self.directions[0]
        learned = self.boundaries[side]
        assert isinstance(learned, MismatchBoundary)  # noqa: S101
        return learned.diagnostics()

    def word_parts(self, image: Encoded, text: Encoded) -> WordParts | None:
        if self.directions != ("t2i",):
            return None
        found = self.branches(text, image, self.boundary_of("t2i"))
        words = text.mask.sum()
        return WordParts(
            positive=(found.feature + found.relevance)[0, 0] / words,
            negative=found.negative[0, 0] / words,
            weights=found.weights[0, 0],
            additive=True,
        )


def _another_image(wrong: Tensor) -> Tensor:
    """For each row of a boolean matrix a random column where it holds; -1 where none does."""
    draw = torch.rand(wrong.shape, device=wrong.device).masked_fill(~wrong, -1.0)
    best, column = draw.max(1) if wrong.shape[1] else (draw.sum(1) - 1, draw.sum(1).long())
    return torch.where(best >= 0, column, torch.full_like(column, -1))


def _maxima(images: Encoded, texts: Encoded, side: str) -> Tensor:
    """Highest similarity of each real fragment of pair k's asking side with the other side."""
    asking, answering = (texts, images) if side == "t2i" else (images, texts)
    sims = fragments(asking) @ fragments(answering).transpose(1, 2)  # [P, N, K]
    best = sims.masked_fill(~answering.mask[:, None, :], -2.0).amax(-1)
    return best[asking.mask]
