"""The `Objective` base class: losses of a score matrix, with the context that training gives."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from counterfoil.core.errors import ArgumentError
from counterfoil.core.registry import Registry, options_repr, short_repr
from counterfoil.data.batches.collate import BatchExtras
from counterfoil.data.batches.dataset import ExtraNegativeSource
from counterfoil.encoders.encoded import Needs
from counterfoil.objectives.positives import Ids, Mask, read_mask, read_positives
from counterfoil.objectives.services import BatchServices, Lookahead, RunSetup, TrainSplitScores

objectives: Registry[type[Objective]] = Registry("objective")

Reduction = Literal["sum", "mean"]

NegativeSelection = Literal["all", "hardest", "adaptive"]


@dataclass(frozen=True)
class Context:
    """Inputs of an objective besides scores and positives.

    ``image_ids`` and ``caption_ids`` are indices into the training split, of each row's image and
    of each column's caption. ``protected`` [n_images, n_texts] marks pairs that must not be
    negatives: not annotated as positive, but certainly or likely matching. ``members`` are the
    scores of each member of an ensemble. ``on_diagonal``: the pairs of square scores are on the
    diagonal; if not, every positive entry is a pair. ``services`` and ``extra`` are for objectives
    that score more than the batch. Diagnostics are computed only if ``logging`` is true.
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
    on_diagonal: bool = True


@dataclass(frozen=True)
class LossReport:
    """A loss, its diagnostics, and the pairs that were protected."""

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

    Captions of one image are never each other's negatives. A subclass implements `compute`, which
    training calls with a `Context`, and overrides the hooks below if scores are not enough.

    Class attributes: ``requires`` describes the inputs besides scores. ``needs`` names the parts of
    the encoded batch that it reads in addition to the matcher's. ``ensemble_size`` is the number of
    models it trains jointly, ``held_out`` the share of training images it sets aside.
    ``needs_scores=False``: it scores selected pairs itself, for models too expensive to score every
    pair of a batch with gradients; `compute` then gets a matrix of NaN. ``may_be_infinite`` names
    options for which infinity has a meaning.
    """

    requires: str = ""
    needs_scores: bool = True
    needs: Needs | None = None
    ensemble_size: int = 1
    held_out: float = 0.0
    may_be_infinite: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """The options, without the layers that it may have."""
        return options_repr(self)

    def _require_nonnegative(self, **options: float) -> None:
        """Refuse options below 0."""
        for name, value in options.items():
            if not value >= 0:
                raise ArgumentError(f"{self._key()}.{name}: at least 0, got {value:g}")

    def _require_positive(self, **options: float) -> None:
        """Refuse options that are not above 0."""
        for name, value in options.items():
            if not value > 0:
                raise ArgumentError(f"{self._key()}.{name}: more than 0, got {value:g}")

    def _key(self) -> str:
        """The key of its options in a config; of a class without a name there, its own name."""
        names = (name for name in objectives if objectives[name] is type(self))
        return next((f"objective.{name}" for name in names), type(self).__name__)

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        """The loss of a batch with a boolean matrix of positives; arguments are not checked."""
        raise NotImplementedError

    def forward(
        self,
        scores: Tensor,
        positives: Mask | Ids | None = None,
        *,
        image_ids: Ids | None = None,
        text_ids: Ids | None = None,
        protected: Mask | None = None,
        epoch: int = 0,
        step: int = 0,
    ) -> Tensor:
        """The loss, a scalar tensor in float32, or in float64 if the scores are.

        ``positives`` is a boolean matrix of the scores' shape or one id per pair, ``image_ids`` the
        ids of the rows, ``text_ids`` the image of each column (default: that of its row). Without
        them, pairs are on the diagonal. ``protected`` pairs are not negatives. ``epoch`` and
        ``step`` count from 0, for objectives that warm up or sample.

        If the whole diagonal of square scores is positive, as in a batch of pairs, only the
        diagonal counts as pairs. Other positives, such as a second caption of an image, are not
        negatives, and have no cost of their own (except in `SEL` and `SigLIP`). Otherwise every
        positive is a pair.
        """
        context = Context(epoch, step, logging=False)
        return self._report(scores, positives, image_ids, text_ids, protected, context).loss

    def report(
        self,
        scores: Tensor,
        positives: Mask | Ids | None = None,
        *,
        image_ids: Ids | None = None,
        text_ids: Ids | None = None,
        protected: Mask | None = None,
        epoch: int = 0,
        step: int = 0,
    ) -> LossReport:
        """The loss with its diagnostics; arguments as for a call."""
        context = Context(epoch, step)
        return self._report(scores, positives, image_ids, text_ids, protected, context)

    def _report(
        self,
        scores: Tensor,
        positives: Mask | Ids | None,
        image_ids: Ids | None,
        text_ids: Ids | None,
        protected: Mask | None,
        context: Context,
    ) -> LossReport:
        if self.requires:
            raise ArgumentError(
                f"{type(self).__name__} cannot be computed from scores alone: it reads "
                f"{self.requires}; train with it by counterfoil.train or `counterfoil train`"
            )
        matrix = read_positives(scores, positives, image_ids, text_ids)
        scores = at_least_float32(scores)
        context = replace(
            context,
            epoch=_read_count("epoch", context.epoch),
            step=_read_count("step", context.step),
            protected=None if protected is None else read_mask(protected, scores, "protected"),
            on_diagonal=bool(matrix.diagonal().all()),
        )
        report = self.checked_report(scores, matrix, context)
        if report.protected is None:  # a single objective protects no others
            report = replace(report, protected=context.protected)
        return report

    def checked_report(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        """What `compute` returns, checked: it may be an objective of one's own."""
        report = self.compute(scores, positives, context)
        if not isinstance(report, LossReport):
            raise ArgumentError(
                f"{type(self).__name__}.compute: expected a LossReport, got "
                f"{type(report).__name__}; end it with: return LossReport(loss)"
            )
        loss: object = report.loss
        if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
            got = f"one of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ArgumentError(
                f"{type(self).__name__}.compute: expected the loss to be a tensor with one number "
                f"and no dimension, such as losses.mean(), got {got}"
            )
        return report

    def prepare(self, training: RunSetup) -> None:
        """Called once, before the first step and before the optimizer collects parameters."""

    def extra_negatives(self) -> ExtraNegativeSource | None:
        """The source of extra items that each caption adds to its batch."""
        return None

    def begin_epoch(self, epoch: int, survey: TrainSplitScores) -> None:
        """Called before each epoch; ``survey`` scores the whole training split."""

    def before_step(self, trial: Lookahead) -> None:
        """Called before each update; ``trial`` can try the update and undo it."""

    def never_reached(self, epochs: int, steps_per_epoch: int) -> list[str]:
        """Warnings for options by which a run of this length ends within a warm-up."""
        return []

    def loss_at_equal_scores(self, anchors: int, negatives: float, epoch: int = 0) -> float | None:
        """The loss of a collapsed model, for which all scores are equal; None if unknown.

        ``anchors`` pairs with ``negatives`` negatives each, on average over both directions.
        """
        return None

    def hinge_margin(self, epoch: int) -> float | None:
        """The margin of a hinge loss; None for other losses."""
        return None

    def negative_selection(self, epoch: int) -> NegativeSelection:
        """The negatives that count at equal scores; they decide if a collapsed model recovers."""
        return "all"


def _read_count(name: str, value: Any) -> int:
    """An epoch or a step as a plain integer; raise unless it is a whole number from 0 on."""
    try:
        count = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = -1
    if count < 0:
        raise ArgumentError(
            f"{name}: expected a whole number of at least 0, got {short_repr(value)}"
        )
    return count


def at_least_float32(scores: Tensor) -> Tensor:
    """Scores in float32 or float64: half precision is too coarse for exponentials and sums."""
    return scores if scores.dtype == torch.float64 else scores.float()


def batch_generator(context: Context, seed: int, device: torch.device) -> torch.Generator:
    """A generator seeded with the run, the step and the batch: all processes draw the same numbers.

    The first caption tells batches apart whose gradients are accumulated in one step.
    """
    first = 0 if context.caption_ids is None else int(context.caption_ids[0])
    (state,) = np.random.SeedSequence([seed, context.step, first]).generate_state(1, np.uint64)
    return torch.Generator(device).manual_seed(int(state >> np.uint64(1)))


@dataclass(frozen=True)
class Anchors:
    """One direction of retrieval: ``P`` positive pairs against the candidates of one side.

    ``positive`` [P] is the score of each pair, ``scores`` [P, C] the scores of its query with
    every candidate, ``is_negative`` [P, C] marks the true negatives.
    """

    positive: Tensor
    scores: Tensor
    is_negative: Tensor

    @property
    def hardest(self) -> Tensor:
        """Highest negative score [P] of each anchor; -inf without negatives."""
        return self.scores.masked_fill(~self.is_negative, -torch.inf).amax(1)


def both_directions(
    scores: Tensor, positives: Tensor, context: Context | None = None
) -> tuple[Anchors, Anchors]:
    """Anchors of image → text and of text → image.

    The pairs of a square matrix are on its diagonal, unless the context says otherwise. For other
    shapes (images with several texts), every positive entry is a pair. Protected pairs are not
    negatives.
    """
    negative = ~positives
    if context is not None and context.protected is not None:
        negative = negative & ~context.protected
    on_diagonal = context is None or context.on_diagonal
    if on_diagonal and scores.shape[0] == scores.shape[1]:  # views: no copy, no scatter in backward
        positive = scores.diagonal()
        return Anchors(positive, scores, negative), Anchors(positive, scores.T, negative.T)
    image, text = positives.nonzero(as_tuple=True)
    positive = scores[image, text]
    image_to_text = Anchors(positive, scores[image], negative[image])
    text_to_image = Anchors(positive, scores.T[text], negative.T[text])
    return image_to_text, text_to_image
