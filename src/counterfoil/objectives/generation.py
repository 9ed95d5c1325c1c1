"""What a generator of foils gives to the objectives that learn from it (TAGS, Algorithm 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from counterfoil.data.batches import TextBatch
from counterfoil.errors import ConfigError
from counterfoil.objectives.services import Live

MaskUnit = Literal["graph", "word"]
MaskShare = Literal["units", "sentence"]


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

    def mask(self, live: Live, step: int) -> MaskedBatch: ...

    def __call__(self, live: Live, step: int) -> Generated: ...
