"""Adaptive offline quintuplets (AOQ): negatives from the whole training split, by a first model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.data.batches.dataset import ExtraItems, ExtraNegativeSource
from counterfoil.data.pairs import Split
from counterfoil.objectives.base import (
    Context,
    LossReport,
    NegativeSelection,
    Objective,
    both_directions,
    objectives,
)
from counterfoil.objectives.foils import extra_items, pair_images
from counterfoil.objectives.positives import Twins
from counterfoil.objectives.services import RunSetup

CAPTIONS_PER_IMAGE = 5
"""Caption candidates per image candidate: the benchmarks have five captions per image."""


@dataclass(frozen=True)
class QuintupletScores:
    """Scores [P] of each pair (I, T) and of its negatives.

    ``online`` are those of the hardest caption and the hardest image of the batch (-inf without
    negatives), ``offline`` s(I, T_off) and s(I_off, T), ``crossed`` s(I_off, T_off) and s(I2, T2).
    """

    positive: Tensor
    online: tuple[Tensor, Tensor]
    offline: tuple[Tensor, Tensor]
    crossed: tuple[Tensor, Tensor]


def quintuplet_loss(
    scores: QuintupletScores,
    *,
    margin: float = 0.2,
    offline_margin: float = 0.0,
    alpha: float = 0.3,
    beta: float = 1.5,
    detach_weight: bool = False,
) -> Tensor:
    """The sum of the costs of all pairs.

    The cost of an online negative has the weight β − (off − on) / α: the harder the offline
    negative, the lower the weight. As in the public code, gradients flow through that weight,
    unless ``detach_weight`` is set.
    """
    total = scores.positive.new_zeros(())
    for online, offline in zip(scores.online, scores.offline, strict=True):
        has_negative = online.isfinite()
        online = torch.where(has_negative, online, scores.positive.detach())
        weight = beta - (offline - online) / alpha
        cost = (margin + online - scores.positive).clamp(min=0)
        weight = weight.detach() if detach_weight else weight
        total = total + (has_negative * cost * weight).sum()
    for negative in (*scores.offline, *scores.crossed):
        total = total + (offline_margin + negative - scores.positive).clamp(min=0).sum()
    return total


@dataclass(frozen=True)
class Quintuplets:
    """Samples the offline items of each pair's quintuplet.

    ``captions`` [n_images, ·] are the candidates of each image, ``images`` [n_captions, ·] those of
    each caption, best first, padded with -1.
    """

    split: Split
    captions: NDArray[np.int32]
    images: NDArray[np.int32]
    twins: Twins | None = None
    changes: ClassVar = False

    def of(self, caption: int, rng: np.random.Generator) -> ExtraItems:
        """Images (I_off, I2) and texts (T_off, T2): T2 belongs to I_off, T_off to I2.

        T_off and I_off have the same relative rank in their lists. If T_off belongs to that image,
        which would make (I_off, T_off) a true pair, I_off is the next image in the list. If one of
        the two images has the other's caption, the next I_off is tried, then the next T_off.
        """
        captions = _present(self.captions[self.split.image_of[caption]])
        images = _present(self.images[caption])
        if not len(captions) or not len(images):
            return ExtraItems() if self.twins is None else self._own_pair(caption)
        rank = int(rng.integers(len(captions)))
        images = np.roll(images, -(rank * len(images) // len(captions)))
        if self.twins is not None:
            return self._without_twins(caption, np.roll(captions, -rank), images, rng)
        text = int(captions[rank])
        owner = int(self.split.image_of[text])
        image = int(images[int(np.argmax(images != owner))])
        others = self.split.captions[image]
        other = others[int(rng.integers(len(others)))]
        return ExtraItems((image, owner), (self.split.texts[text], other))

    def _without_twins(
        self,
        caption: int,
        captions: NDArray[np.int32],
        images: NDArray[np.int32],
        rng: np.random.Generator,
    ) -> ExtraItems:
        """The first quintuplet, in the order of both lists, whose crossed pairs are negatives.

        If there is none, the pair itself takes the place of all others and adds no negative.
        """
        for text in map(int, captions):
            owner = int(self.split.image_of[text])
            for image in map(int, images):
                if image == owner or self._has(image, text):
                    continue
                others = [t for t in self._captions_of(image) if not self._has(owner, t)]
                if others:
                    other = others[int(rng.integers(len(others)))]
                    return ExtraItems(
                        (image, owner), (self.split.texts[text], self.split.texts[other])
                    )
        return self._own_pair(caption)

    def _own_pair(self, caption: int) -> ExtraItems:
        own = int(self.split.image_of[caption])
        return ExtraItems((own, own), (self.split.texts[caption],) * 2)

    def _has(self, image: int, caption: int) -> bool:
        return self.twins is not None and self.twins.has(image, caption)

    def _captions_of(self, image: int) -> range:
        first, last = np.searchsorted(self.split.image_of, [image, image + 1]).tolist()
        return range(first, last)


def _present(row: NDArray[np.int32]) -> NDArray[np.int32]:
    return row[row >= 0]


@objectives.register("aoq")
class AOQ(Objective):
    """Hardest negatives of the batch and, by a first model, of all training data (AOQ).

    ``first`` is the folder of a run on the same data. Its model selects the ``candidates`` hardest
    captions of each image, and a fifth as many images of each caption. It scores every image with
    every caption, which is much faster with an embedding model.
    """

    requires = "the negatives that a first model finds in the whole training split"

    def __init__(
        self,
        *,
        first: str = "",
        margin: float = 0.2,
        offline_margin: float = 0.0,
        alpha: float = 0.3,
        beta: float = 1.5,
        candidates: int = 300,
        detach_weight: bool = False,
    ) -> None:
        super().__init__()
        if not first:
            raise ConfigError(
                "objective.aoq: its negatives are found by a first model; train one on the same "
                "data and name its folder: objective.aoq.first=runs/x"
            )
        if candidates < 1:
            raise ConfigError(f"objective.aoq.candidates: at least 1, got {candidates}")
        self._require_positive(alpha=alpha)
        self._require_nonnegative(margin=margin)
        self.first, self.candidates = first, candidates
        self.margin, self.offline_margin = margin, offline_margin
        self.alpha, self.beta, self.detach_weight = alpha, beta, detach_weight
        self.quintuplets: Quintuplets | None = None

    def prepare(self, training: RunSetup) -> None:
        images = max(2, self.candidates // CAPTIONS_PER_IMAGE)  # one might be the image of T_off
        of_image, of_caption = training.nearest(self.first, max(images, self.candidates))
        if np.unique(training.train.image_of[of_image[of_image >= 0]]).size < 3:
            raise DataError(
                "objective.aoq: a quintuplet takes three images, the training split "
                "has fewer that can be read and have captions of their own"
            )
        self.quintuplets = Quintuplets(
            training.train,
            of_image[:, : self.candidates].astype(np.int32),
            of_caption[:, :images].astype(np.int32),
            training.twins,
        )

    def extra_negatives(self) -> ExtraNegativeSource | None:
        return self.quintuplets

    def hinge_margin(self, epoch: int) -> float | None:
        return self.margin

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        by_image, by_text = both_directions(scores, positives, context)
        offline, crossed = self._offline(context)
        online = by_image.hardest, by_text.hardest
        loss = quintuplet_loss(
            QuintupletScores(by_image.positive, online, offline, crossed),
            margin=self.margin,
            offline_margin=self.offline_margin,
            alpha=self.alpha,
            beta=self.beta,
            detach_weight=self.detach_weight,
        )
        if not context.logging:
            return LossReport(loss)
        gap = (by_image.positive - torch.stack(offline)).mean().detach()
        return LossReport(loss, {"offline/gap": gap})

    def _offline(self, context: Context) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Offline and crossed scores of the pairs of all processes, in the order of captions."""
        services, extra = extra_items(context, "aoq")
        assert extra.images is not None  # noqa: S101 - every pair adds two images and two texts
        assert extra.texts is not None  # noqa: S101
        images, texts = services.encode_images(extra.images), services.encode_texts(extra.texts)
        own = services.images[pair_images(services.batch)]
        image_off, image_2 = images[0::2], images[1::2]
        text_off, text_2 = texts[0::2], texts[1::2]
        return (
            (services.paired(own, text_off), services.paired(image_off, services.texts)),
            (services.paired(image_off, text_off), services.paired(image_2, text_2)),
        )

    def loss_at_equal_scores(self, anchors: int, negatives: float, epoch: int = 0) -> float | None:
        return anchors * (2 * self.margin * self.beta + 4 * self.offline_margin)

    def negative_selection(self, epoch: int) -> NegativeSelection:
        return "hardest"
