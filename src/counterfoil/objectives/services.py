"""What training offers to objectives that need more than a score matrix.

The objective says what it needs; training, which stands above it and knows models and data on
disk, does the work. Each protocol here is implemented in `counterfoil.training`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from counterfoil.core.errors import ConfigError
from counterfoil.data.batches.collate import ImageBatch, PairBatch, TextBatch
from counterfoil.data.batches.dataset import ExtraNegativeSource
from counterfoil.data.pairs import Split
from counterfoil.data.text.tokenizers import TextProcessor
from counterfoil.encoders.encoded import Encoded
from counterfoil.matchers.base import Matcher
from counterfoil.objectives.twins import Twins

MaskUnit = Literal["graph", "word"]
MaskShare = Literal["units", "sentence"]


class BatchServices(Protocol):
    """The batch that is being trained on, with the model, for objectives that score more than it.

    ``images`` and ``texts`` are this process's share as encoded for the scores, with gradients.
    """

    batch: PairBatch
    images: Encoded
    texts: Encoded

    @property
    def text_encoder(self) -> nn.Module: ...

    @property
    def matcher(self) -> Matcher: ...

    def encode_images(self, images: ImageBatch) -> Encoded: ...

    def encode_texts(self, texts: TextBatch) -> Encoded: ...

    def paired(self, images: Encoded, texts: Encoded) -> Tensor:
        """Scores [n] of image ``k`` with text ``k``, those of all processes in order.

        Each process brings at least one pair.
        """
        ...

    def autocast(self) -> AbstractContextManager[Any]:
        """Inside, the matcher works in the precision of the run."""
        ...

    def inference(self) -> AbstractContextManager[None]:
        """Inside, the model is asked, not trained: no gradients, no dropout."""
        ...


class Teacher(Protocol):
    """A trained model that is asked, not trained."""

    def scores(self, batch: PairBatch) -> Tensor:
        """Scores [n_images, n_texts] of the global batch, without gradients."""
        ...


class Guide(Protocol):
    """What several trained models think of every image with every caption of the training split."""

    def scores(self, image_ids: Tensor, caption_ids: Tensor, device: torch.device) -> Tensor:
        """Mean scores [n_images, n_texts] in full precision, without gradients.

        Ids are indices into the training split, the same on every process. Not a number where an
        image could not be read.
        """
        ...


@dataclass(frozen=True)
class GeneratorOptions:
    """K ``masks`` of a caption by ``unit``, L ``samples`` each, of which ``kept`` become foils.

    ``run`` is the folder of the frozen model that fills the masks (static), or empty for the model
    that is being trained (dynamic). Only the first ``anchors`` captions of a batch get foils, all
    of them where it is 0. ``share`` is what 15 % are masked of: the words in units (public code),
    or all words of the sentence (the paper).
    """

    masks: int
    samples: int
    kept: int
    temperature: float
    unit: MaskUnit
    extractor: str
    run: str = ""
    anchors: int = 0
    share: MaskShare = "units"

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"foils: the temperature must be above 0, got {self.temperature}")


@dataclass(frozen=True)
class MaskedBatch:
    """Masked versions [B, K, W] of the first B captions of a batch, all as long as these.

    The labels are the true token where one was masked, −1 elsewhere.
    """

    captions: TextBatch
    masked: Tensor
    masked_labels: Tensor


@dataclass(frozen=True)
class Generated(MaskedBatch):
    """Masked versions, and the selected ``foils`` [B, m, W], best first, where ``real`` [B, m].

    The labels of foils are those of the versions that they were filled into.
    """

    foils: Tensor
    foil_labels: Tensor
    real: Tensor


class Generator(Protocol):
    """Masks the captions of a batch, and writes foils for them."""

    def mask(self, services: BatchServices, step: int) -> MaskedBatch: ...

    def __call__(self, services: BatchServices, step: int) -> Generated: ...


class RunSetup(Protocol):
    """A run before its first step: its data, its model's shape, and other runs."""

    train: Split
    text: TextProcessor
    embed_size: int
    seed: int
    epochs: int
    twins: Twins | None
    """Pairs of the split that are no negatives, as their captions are identical to own ones."""

    def teacher(self, run: str) -> Teacher: ...

    def guide(self, folder: str) -> Guide:
        """A guide that was built for the training split of this run."""
        ...

    def nearest(self, run: str, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """By another run's scores over the whole training split, the best wrong candidates.

        Captions [n_images, count] of each image and images [n_captions, count] of each caption,
        best first, own pairs and twins excluded.
        """
        ...

    def foils(self, source: str, count: int) -> ExtraNegativeSource:
        """Foil captions of each caption: by ``"rules"``, or from a JSONL file."""
        ...

    def generator(self, options: GeneratorOptions, heads: Sequence[str]) -> Generator:
        """What writes foils with the model itself, or with a frozen one; it must have ``heads``."""
        ...


class TrainSplitScores(Protocol):
    """A look at the whole training split before an epoch, without gradients and augmentation."""

    def __call__(self) -> Iterator[tuple[tuple[Tensor, ...], Tensor, Tensor]]:
        """Batch by batch: scores of each copy of the model, image ids and caption ids.

        Scores are [n, n] and pair ``k`` stands on the diagonal.
        """
        ...


class Lookahead(Protocol):
    """An update that is tried before it is made (for objectives that learn how to weigh).

    ``step`` counts the updates made so far. Nothing a trial does stays: weights, running
    statistics, gradients and random numbers are as before when it is over. Every scoring draws the
    same random numbers, those of the coming update, so that two of them differ by the weights
    alone; and all of them are in full precision, whatever the run trains in.
    """

    step: int

    def scores(self, batch: PairBatch | None = None) -> tuple[Tensor, Tensor]:
        """Scores and positives of the coming batch (or another) with the weights as they are."""
        ...

    def protected(self, batch: PairBatch | None = None) -> Tensor | None:
        """Which pairs of the coming batch (or another) are no negatives: identical captions."""
        ...

    def held_out_batch(self) -> PairBatch:
        """A batch of the images set aside, another at each step."""
        ...

    def gradient(self, loss: Tensor) -> list[Tensor]:
        """Gradient of a loss with respect to the trained weights of the model."""
        ...

    def moved(self, direction: list[Tensor], amount: float) -> AbstractContextManager[None]:
        """Inside, the weights are moved by ``amount`` times ``direction``."""
        ...

    @property
    def rate(self) -> float:
        """The learning rate of the coming update."""
        ...
