"""LSEH: a margin that grows with the semantic similarity of two captions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from counterfoil.core.errors import ConfigError, TrainingError
from counterfoil.objectives.base import (
    Anchors,
    Context,
    LossReport,
    Objective,
    Reduction,
    both_directions,
    objectives,
)
from counterfoil.objectives.services import RunSetup


@dataclass(frozen=True)
class _Direction:
    """Anchors with a margin [P, C] for each of their candidates."""

    anchors: Anchors
    margins: Tensor


@objectives.register("lseh")
class LSEH(Objective):
    """Hinge whose margin grows with the semantic similarity of the captions (LSEH).

    Captions i and j have the margin ``margin + scale · Z_ij``, where Z_ij is the inner product of
    their latent vectors divided by the largest in row i. ``dim`` is the size of these vectors,
    which come from the training captions (see `counterfoil.data.text.tfidf`). With ``hardest``
    only the negative with the highest cost counts per anchor. With ``form="reference"`` other pairs
    of the same image stay negatives, with margin 0, as in the public code.
    """

    requires = "vectors of the training captions, and which caption each column is"
    vectors: Tensor

    def __init__(
        self,
        *,
        margin: float = 0.185,
        scale: float = 0.025,
        dim: int = 400,
        hardest: bool = True,
        reduction: Reduction = "sum",
        form: Literal["paper", "reference"] = "paper",
    ) -> None:
        super().__init__()
        if dim < 1:
            raise ConfigError(f"objective.lseh.dim: expected at least 1, got {dim}")
        self._require_nonnegative(margin=margin)
        self.margin, self.scale, self.dim = margin, scale, dim
        self.hardest, self.reduction, self.form = hardest, reduction, form
        self.register_buffer("vectors", torch.empty(0, dim), persistent=False)

    def prepare(self, training: RunSetup) -> None:
        from counterfoil.data.text.tfidf import caption_space

        self.vectors = caption_space(training.train.texts, self.dim).vectors.to(self.vectors.device)

    def hinge_margin(self, epoch: int) -> float | None:
        return self.margin

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        margins = self.margin + self.scale * self._closeness(scores, context)
        directions = self._directions(scores, positives, margins, context)
        losses = [self._loss(direction) for direction in directions]
        loss = losses[0] + losses[1]
        diagnostics = {"lseh/margin": margins.mean()} if context.logging else {}
        return LossReport(loss if self.reduction == "sum" else loss / 2, diagnostics)

    def _closeness(self, scores: Tensor, context: Context) -> Tensor:
        """Z [n_texts, n_texts] of the batch's captions."""
        if context.caption_ids is None:
            raise TrainingError(
                "objective 'lseh' needs to know which training captions a batch holds "
                "(caption_ids), and this batch does not say"
            )
        if not len(self.vectors):
            raise TrainingError(
                "objective 'lseh' has no caption vectors: call prepare() with the training split "
                "before the first step"
            )
        vectors = self.vectors[context.caption_ids.to(self.vectors.device)].to(scores)
        return semantic_similarity(vectors)

    def _directions(
        self, scores: Tensor, positives: Tensor, margins: Tensor, context: Context
    ) -> tuple[_Direction, _Direction]:
        """Anchors of both directions and the margins of their candidates.

        One matrix serves both: score (i, j) has the margin of captions i and j, where caption i
        represents image i. A candidate image with several captions has the largest of their
        margins.
        """
        by_text, by_image = both_directions(scores, positives, context)
        if context.on_diagonal and scores.shape[0] == scores.shape[1]:
            image = text = torch.arange(len(scores), device=scores.device)
            of_images = margins.T
        else:
            image, text = positives.nonzero(as_tuple=True)
            of_images = _largest_of_each_image(margins.T, positives)
        directions = _Direction(by_text, margins[text]), _Direction(by_image, of_images[text])
        if self.form == "paper":
            return directions
        return (
            _with_own_image(directions[0], positives[image], text),
            _with_own_image(directions[1], positives.T[text], image),
        )

    def _loss(self, direction: _Direction) -> Tensor:
        anchors = direction.anchors
        costs = (direction.margins + anchors.scores - anchors.positive[:, None]).clamp(min=0)
        costs = costs.masked_fill(~anchors.is_negative, 0.0)
        if not costs.numel():
            return costs.sum()
        if self.hardest:
            per_anchor = costs.max(1).values
        elif self.reduction == "mean":
            per_anchor = costs.sum(1) / anchors.is_negative.sum(1).clamp(min=1)
        else:
            per_anchor = costs.sum(1)
        return per_anchor.sum() if self.reduction == "sum" else per_anchor.mean()


def semantic_similarity(vectors: Tensor) -> Tensor:
    """Inner products [n, n] of caption vectors over the largest of each row.

    A row whose largest is 0 (a caption without known words) is unchanged.
    """
    products = vectors @ vectors.T
    largest = products.amax(1, keepdim=True)
    return products / largest.where(largest != 0, 1.0)


def _largest_of_each_image(margins: Tensor, positives: Tensor) -> Tensor:
    """Margins [n_texts, n_images] from those between texts; texts without an image are ignored."""
    images, texts = positives.shape
    owner = torch.where(positives.any(0), positives.int().argmax(0), images)
    largest = margins.new_zeros(texts, images + 1)  # the last column is for texts without an image
    index = owner.expand(texts, texts)
    return largest.scatter_reduce(1, index, margins, "amax", include_self=False)[:, :images]


def _with_own_image(direction: _Direction, same_image: Tensor, own: Tensor) -> _Direction:
    """Other candidates of the anchor's image become negatives as well, with margin 0."""
    anchors = direction.anchors
    negative = anchors.is_negative | same_image
    negative[torch.arange(len(own), device=own.device), own] = False
    return _Direction(
        Anchors(anchors.positive, anchors.scores, negative),
        direction.margins.masked_fill(same_image, 0.0),
    )
