"""`Objective`: a score matrix to a loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from counterfoil.registry import Registry

objectives: Registry[type[Objective]] = Registry("objective")

Reduction = Literal["sum", "mean"]


@dataclass(frozen=True)
class Context:
    """What an objective may know besides the scores."""

    epoch: int = 0
    step: int = 0
    image_ids: Tensor | None = None
    caption_ids: Tensor | None = None


@dataclass(frozen=True)
class LossReport:
    """A loss and the numbers that explain it."""

    loss: Tensor
    diagnostics: dict[str, Tensor] = field(default_factory=dict)


class Objective(nn.Module):
    """A loss of scores [n_images, n_texts] and positives [n_images, n_texts] (boolean).

    Positives come from image ids: two captions of one image are never each other's negatives.
    """

    def forward(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        raise NotImplementedError


@dataclass(frozen=True)
class Anchors:
    """One direction of retrieval: ``P`` positive pairs against the candidates of one side.

    ``positive`` [P] is the score of each pair, ``candidates`` [P, C] the scores of its query with
    every candidate, ``negative`` [P, C] says which of these are true negatives.
    """

    positive: Tensor
    candidates: Tensor
    negative: Tensor

    @property
    def hardest(self) -> Tensor:
        """Highest negative score of each anchor; -inf where it has none."""
        return self.candidates.masked_fill(~self.negative, -torch.inf).amax(1)


def both_directions(scores: Tensor, positives: Tensor) -> tuple[Anchors, Anchors]:
    """Anchors of image → text and of text → image.

    A square matrix is a batch of pairs and its diagonal holds them. Otherwise (one image with
    several texts) every positive entry is a pair.
    """
    if scores.shape[0] == scores.shape[1]:
        image = text = torch.arange(scores.shape[0], device=scores.device)
    else:
        image, text = positives.nonzero(as_tuple=True)
    positive = scores[image, text]
    image_to_text = Anchors(positive, scores[image], ~positives[image])
    text_to_image = Anchors(positive, scores.T[text], ~positives.T[text])
    return image_to_text, text_to_image
