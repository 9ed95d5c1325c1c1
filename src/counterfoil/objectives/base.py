"""`Objective`: a score matrix to a loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from counterfoil.core.registry import Registry
from counterfoil.data.batches.collate import ExtraBatch
from counterfoil.data.batches.dataset import Companions
from counterfoil.encoders.encoded import Needs
from counterfoil.objectives.services import Live, Preparation, Survey, Trial

objectives: Registry[type[Objective]] = Registry("objective")

Reduction = Literal["sum", "mean"]

Manner = Literal["every", "hardest", "selective"]


@dataclass(frozen=True)
class Context:
    """What an objective may know besides the scores.

    ``image_ids`` and ``caption_ids`` are indices into the training split: of each row's image, and
    of each column's caption. ``protected`` [n_images, n_texts] marks pairs that are not annotated
    as positive, but are (the caption is identical to one of the image's) or are likely to be: they
    are no negatives. ``members`` are the scores of each copy of a model that has several. ``live``
    and ``extra`` are there for objectives that score more than the batch. Diagnostics are only read
    where ``logging`` is true.
    """

    epoch: int = 0
    step: int = 0
    image_ids: Tensor | None = None
    caption_ids: Tensor | None = None
    protected: Tensor | None = None
    members: tuple[Tensor, ...] = ()
    live: Live | None = None
    extra: ExtraBatch | None = None
    logging: bool = True


@dataclass(frozen=True)
class LossReport:
    """A loss and the numbers that explain it, and which pairs were protected."""

    loss: Tensor
    diagnostics: dict[str, Tensor] = field(default_factory=dict)
    protected: Tensor | None = None


class Objective(nn.Module):
    """A loss of scores [n_images, n_texts] and positives [n_images, n_texts] (boolean).

    Positives come from image ids: two captions of one image are never each other's negatives.
    Most objectives need no more than this; one that does says so by a class attribute and by
    overriding the hooks below. ``needs_batch`` tells that scores alone are not enough, ``needs``
    what it reads of the encoded batch beyond what the matcher reads, ``copies`` how many models it
    trains side by side, ``held_out`` which share of the training images it keeps for itself.
    ``needs_scores=False`` says that it scores the pairs it wants itself, for models that are too
    dear to score every pair of a batch with gradients; it is then given a matrix of NaN.
    """

    needs_batch: bool = False
    needs_scores: bool = True
    needs: Needs | None = None
    copies: int = 1
    held_out: float = 0.0

    def forward(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        raise NotImplementedError

    def prepare(self, training: Preparation) -> None:
        """Once, before the first step and before the optimiser looks for parameters."""

    def companions(self) -> Companions | None:
        """What else each caption brings into its batch."""
        return None

    def begin_epoch(self, epoch: int, survey: Survey) -> None:
        """Before each epoch, with a way to look at the whole training split."""

    def before_step(self, trial: Trial) -> None:
        """Before each update, with a way to try one."""

    def uninformed(self, anchors: int, negatives: float, epoch: int = 0) -> float | None:
        """The loss when all similarities are equal, where that says anything.

        ``anchors`` pairs with ``negatives`` negatives each, on average over both directions.
        """
        return None

    def hinge_margin(self, epoch: int) -> float | None:
        """The margin up to which a negative costs something; None for other losses than a hinge."""
        return None

    def manner(self, epoch: int) -> Manner:
        """Which negatives count while scores are equal, and so whether a gradient leads out."""
        return "every"


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


def both_directions(
    scores: Tensor, positives: Tensor, context: Context | None = None
) -> tuple[Anchors, Anchors]:
    """Anchors of image → text and of text → image.

    A square matrix is a batch of pairs and its diagonal holds them. Otherwise (one image with
    several texts) every positive entry is a pair. Protected pairs are not negatives.
    """
    negative = ~positives
    if context is not None and context.protected is not None:
        negative = negative & ~context.protected
    if scores.shape[0] == scores.shape[1]:  # views: nothing is copied, nothing to be scattered back
        positive = scores.diagonal()
        return Anchors(positive, scores, negative), Anchors(positive, scores.T, negative.T)
    image, text = positives.nonzero(as_tuple=True)
    positive = scores[image, text]
    image_to_text = Anchors(positive, scores[image], negative[image])
    text_to_image = Anchors(positive, scores.T[text], negative.T[text])
    return image_to_text, text_to_image
