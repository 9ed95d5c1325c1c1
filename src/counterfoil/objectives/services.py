"""Protocols of the services that training provides to objectives that need more than scores.

Each protocol is implemented in `counterfoil.training`, which knows models and files.
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
from counterfoil.encoders.encoded import Encoded, Needs
from counterfoil.matchers.base import Matcher
from counterfoil.objectives.positives import Twins

MaskUnit = Literal["graph", "word"]
MaskShare = Literal["units", "sentence"]


class BatchServices(Protocol):
    """The current batch and the model, for objectives that score more than the batch.

    ``images`` and ``texts`` are this process's share of the encoded batch, with gradients.
    """

    batch: PairBatch
    images: Encoded
    texts: Encoded

    @property
    def text_encoder(self) -> nn.Module: ...

    @property
    def matcher(self) -> Matcher: ...

    def encode_images(self, images: ImageBatch) -> Encoded: ...

    def encode_texts(self, texts: TextBatch, needs: Needs | None = None) -> Encoded:
        """Encoded texts, with the parts that the matcher and ``needs`` name."""
        ...

    def paired(self, images: Encoded, texts: Encoded) -> Tensor:
        """Scores [n] of image ``k`` with text ``k``, gathered from all processes in order.

        Each process must pass at least one pair.
        """
        ...

    def matrix(self, images: Encoded, texts: Encoded) -> Tensor:
        """Scores [n_images, n_texts] of the images and the texts of all processes, in order.

        Each process must pass at least one image and one text.
        """
        ...

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of the run."""
        ...

    def inference(self) -> AbstractContextManager[None]:
        """Evaluation mode: no gradients, no dropout."""
        ...


class Teacher(Protocol):
    """A trained model with frozen weights."""

    def scores(self, batch: PairBatch) -> Tensor:
        """Scores [n_images, n_texts] of the global batch, without gradients."""
        ...


class Guide(Protocol):
    """Mean scores of several trained models for all pairs of the training split."""

    def scores(self, image_ids: Tensor, caption_ids: Tensor, device: torch.device) -> Tensor:
        """Mean scores [n_images, n_texts] in full precision, without gradients.

        Ids are indices into the training split, the same on every process. Scores of unreadable
        images are NaN.
        """
        ...


@dataclass(frozen=True)
class GeneratorOptions:
    """K ``masks`` of a caption, L ``samples`` of each; the ``kept`` best become foils.

    Masks cover one ``unit`` each. ``run`` is the folder of the frozen model that fills the masks
    (static), or empty for the model in training (dynamic). Only ``anchors`` captions of a
    global batch get foils (0: all). ``share`` is the base of the 15 % that are masked: the words in
    units (public code), or all words of the sentence (the paper). ``judge`` is the folder of a run:
    what it scores as high as the caption is no foil.
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
    judge: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"foils: the temperature must be above 0, got {self.temperature}")


@dataclass(frozen=True)
class MaskedBatch:
    """Masked versions [B, K, W] of B captions of a batch, its ``rows`` [B], padded like these.

    Labels are the true tokens at masked positions, −1 elsewhere.
    """

    rows: Tensor
    captions: TextBatch
    masked: Tensor
    masked_labels: Tensor


@dataclass(frozen=True)
class Generated(MaskedBatch):
    """Masked versions, and the selected ``foils`` [B, m, W], best first; ``real`` [B, m] is a mask.

    The labels of a foil are those of the masked version that it fills.
    """

    foils: Tensor
    foil_labels: Tensor
    real: Tensor


class Generator(Protocol):
    """Masks the captions of a batch, and generates foils of them."""

    def mask(self, services: BatchServices, step: int) -> MaskedBatch: ...

    def __call__(self, services: BatchServices, step: int) -> Generated: ...


class NegativeImages(ExtraNegativeSource, Protocol):
    """Foils of each caption, fixed for a run, with the images that show them.

    Image ``k`` of a pair shows its text ``k``; texts without an image come last. ``images`` [F] are
    indices of the retrieved images, None if they are drawn.
    """

    images: NDArray[np.int64] | None

    def refresh(self, survey: TrainSplitScores) -> None:
        """Retrieve the images again, with the model in training, if it is the retriever."""
        ...


class RunSetup(Protocol):
    """A run before its first step: its data, the shape of its model, and access to other runs."""

    train: Split
    text: TextProcessor
    embed_size: int
    seed: int
    epochs: int
    twins: Twins | None
    """Pairs of the split with identical captions, which are not negatives."""

    def teacher(self, run: str) -> Teacher: ...

    def guide(self, folder: str) -> Guide:
        """Load a guide that was built for the training split of this run."""
        ...

    def nearest(self, run: str, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The hardest negatives in the whole training split, by another run's scores.

        Captions [n_images, count] of each image and images [n_captions, count] of each caption,
        best first, own pairs and twins excluded.
        """
        ...

    def foils(self, source: str, count: int) -> ExtraNegativeSource:
        """Foil captions of each caption: by ``"rules"``, from a JSONL file, or by a run."""
        ...

    def negative_images(self, foils: ExtraNegativeSource, images: str) -> NegativeImages:
        """Foils with images that show them: ``"drawn"``, ``"retrieved"`` or by a run.

        ``"auto"`` draws false scenes if the split is drawn, and retrieves otherwise.
        """
        ...

    def generator(self, options: GeneratorOptions, heads: Sequence[str]) -> Generator:
        """A generator of foils with the model in training or a frozen one that has ``heads``."""
        ...


class TrainSplitScores(Protocol):
    """Scores of the whole training split before an epoch, without gradients and augmentation."""

    def __call__(self) -> Iterator[tuple[tuple[Tensor, ...], Tensor, Tensor]]:
        """Per batch: scores [n, n] of each member of the ensemble, image ids and caption ids.

        Pairs are on the diagonal.
        """
        ...

    def nearest_images(self, texts: Sequence[str], owners: NDArray[np.int64]) -> NDArray[np.int64]:
        """The best-scoring image of the split for each text, other than its owner; -1: none."""
        ...


class Lookahead(Protocol):
    """A trial of the next update, for objectives that learn weights of pairs.

    ``step`` counts the updates made so far. A trial changes nothing: afterwards weights, running
    statistics, gradients and random states are restored. All scores use the random numbers of the
    next update, so that two of them differ only by the weights. They are in full precision.
    """

    step: int

    def scores(self, batch: PairBatch | None = None) -> tuple[Tensor, Tensor]:
        """Scores and positives of the next batch (or another) with the current weights."""
        ...

    def protected(self, batch: PairBatch | None = None) -> Tensor | None:
        """Pairs of the next batch (or another) with identical captions."""
        ...

    def held_out_batch(self) -> PairBatch:
        """A batch of held-out images, a different one at each step."""
        ...

    def gradient(self, loss: Tensor) -> list[Tensor]:
        """Gradient of a loss with respect to the trained weights of the model."""
        ...

    def moved(self, direction: list[Tensor], amount: float) -> AbstractContextManager[None]:
        """Temporarily add ``amount`` times ``direction`` to the weights."""
        ...

    @property
    def rate(self) -> float:
        """The learning rate of the next update."""
        ...
