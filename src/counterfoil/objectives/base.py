"""`Objective`: a score matrix to a loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from counterfoil.core.errors import ArgumentError
from counterfoil.core.registry import Registry
from counterfoil.data.batches.collate import BatchExtras
from counterfoil.data.batches.dataset import ExtraNegativeSource
from counterfoil.encoders.encoded import Needs
from counterfoil.objectives.positives import Ids, check_mask, read_positives
from counterfoil.objectives.services import BatchServices, Lookahead, RunSetup, TrainSplitScores

objectives: Registry[type[Objective]] = Registry("objective")

Reduction = Literal["sum", "mean"]

NegativeSelection = Literal["all", "hardest", "adaptive"]


@dataclass(frozen=True)
class Context:
    """What an objective may know besides the scores.

    ``image_ids`` and ``caption_ids`` are indices into the training split: of each row's image, and
    of each column's caption. ``protected`` [n_images, n_texts] marks pairs that are not annotated
    as positive, but are (the caption is identical to one of the image's) or are likely to be: they
    are no negatives. ``members`` are the scores of each copy of a model that has several.
    ``services`` and ``extra`` are there for objectives that score more than the batch. Diagnostics
    are only read where ``logging`` is true.
    """

    epoch: int = 0
    step: int = 0
    image_ids: Tensor | None = None
    caption_ids: Tensor | None = None
    protected: Tensor | None = None
    members: tuple[Tensor, ...] = ()
    services: BatchServices | None = None
    extra: BatchExtras | None = None
    logging: bool = True


@dataclass(frozen=True)
class LossReport:
    """A loss and the numbers that explain it, and which pairs were protected."""

    loss: Tensor
    diagnostics: dict[str, Tensor] = field(default_factory=dict)
    protected: Tensor | None = None


class Objective(nn.Module):
    """A loss of scores [n_images, n_texts], callable in any training loop.

    >>> import counterfoil as cf
    >>> scores = torch.tensor([[0.6, 0.5, 0.1], [0.3, 0.7, 0.2], [0.0, 0.1, 0.4]])
    >>> loss = cf.objectives.SelHN(margin=0.2)(scores)  # pairs are on the diagonal
    >>> round(float(loss), 4)
    0.0167
    >>> loss = cf.objectives.SelHN()(scores, image_ids=["a", "a", "b"])  # two texts of image a

    Two captions of one image are never each other's negatives. Most objectives need no more than
    this; one that does says so by a class attribute and by overriding the hooks below. ``requires``
    says what it reads besides scores, ``needs`` what it reads of the encoded batch beyond what the
    matcher reads, ``ensemble_size`` how many models it trains side by side, ``held_out`` which
    share of the training images it keeps for itself. ``needs_scores=False`` says that it scores
    the pairs it wants itself, for models too expensive to score every pair of a batch with
    gradients; it is then given a matrix of NaN. A subclass implements `compute`,
    which training calls with a `Context`.
    """

    requires: str = ""
    needs_scores: bool = True
    needs: Needs | None = None
    ensemble_size: int = 1
    held_out: float = 0.0

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        """The loss of a batch whose positives are a boolean matrix; nothing is checked."""
        raise NotImplementedError

    def forward(
        self,
        scores: Tensor,
        positives: Tensor | Ids | None = None,
        *,
        image_ids: Ids | None = None,
        text_ids: Ids | None = None,
        protected: Tensor | None = None,
        epoch: int = 0,
        step: int = 0,
    ) -> Tensor:
        """The loss, a scalar tensor.

        ``positives`` is a boolean matrix of the scores' shape or one id per pair, ``image_ids`` the
        ids of the rows, ``text_ids`` the image of each column (by default that of its row). Without
        them, pairs are on the diagonal. ``protected`` pairs are no negatives. ``epoch`` and
        ``step`` count from 0, for objectives that warm up or sample.
        """
        return self._report(
            scores,
            positives,
            image_ids,
            text_ids,
            Context(epoch, step, protected=protected, logging=False),
        ).loss

    def report(
        self,
        scores: Tensor,
        positives: Tensor | Ids | None = None,
        *,
        image_ids: Ids | None = None,
        text_ids: Ids | None = None,
        protected: Tensor | None = None,
        epoch: int = 0,
        step: int = 0,
    ) -> LossReport:
        """The loss with its diagnostics; arguments as for a call."""
        context = Context(epoch, step, protected=protected)
        return self._report(scores, positives, image_ids, text_ids, context)

    def _report(
        self,
        scores: Tensor,
        positives: Tensor | Ids | None,
        image_ids: Ids | None,
        text_ids: Ids | None,
        context: Context,
    ) -> LossReport:
        if self.requires:
            raise ArgumentError(
                f"{type(self).__name__} cannot be computed from scores alone: it reads "
                f"{self.requires}; train with it by counterfoil.train or `counterfoil train`"
            )
        matrix = read_positives(scores, positives, image_ids, text_ids)
        if context.protected is not None:
            check_mask(context.protected, scores, "protected")
        return self.compute(scores, matrix, context)

    def prepare(self, training: RunSetup) -> None:
        """Once, before the first step and before the optimiser looks for parameters."""

    def extra_negatives(self) -> ExtraNegativeSource | None:
        """What else each caption brings into its batch."""
        return None

    def begin_epoch(self, epoch: int, survey: TrainSplitScores) -> None:
        """Before each epoch, with a way to look at the whole training split."""

    def before_step(self, trial: Lookahead) -> None:
        """Before each update, with a way to try one."""

    def loss_at_equal_scores(self, anchors: int, negatives: float, epoch: int = 0) -> float | None:
        """The loss when all similarities are equal, where that says anything.

        ``anchors`` pairs with ``negatives`` negatives each, on average over both directions.
        """
        return None

    def hinge_margin(self, epoch: int) -> float | None:
        """The margin up to which a negative costs something; None for other losses than a hinge."""
        return None

    def negative_selection(self, epoch: int) -> NegativeSelection:
        """Which negatives count while scores are equal, and so whether a gradient leads out."""
        return "all"


@dataclass(frozen=True)
class Anchors:
    """One direction of retrieval: ``P`` positive pairs against the candidates of one side.

    ``positive`` [P] is the score of each pair, ``scores`` [P, C] the scores of its query with
    every candidate, ``is_negative`` [P, C] says which of these are true negatives.
    """

    positive: Tensor
    scores: Tensor
    is_negative: Tensor

    @property
    def hardest(self) -> Tensor:
        """Highest negative score of each anchor; -inf where it has none."""
        return self.scores.masked_fill(~self.is_negative, -torch.inf).amax(1)


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
