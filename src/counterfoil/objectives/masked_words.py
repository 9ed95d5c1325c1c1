"""UNITER's masked language model by itself: what the foils of TAGS are later written with."""

from __future__ import annotations

from torch import Tensor

from counterfoil.errors import TrainingError
from counterfoil.objectives.base import Context, LossReport, Objective, objectives
from counterfoil.objectives.extras import pair_images
from counterfoil.objectives.services import (
    Generator,
    GeneratorOptions,
    MaskShare,
    MaskUnit,
    Preparation,
)
from counterfoil.objectives.tags import fill_losses, global_mean


@objectives.register("mlm")
class MaskedWords(Objective):
    """UNITER's masked language model: fill masked words given the image; beside another objective.

    Captions are masked as by `tags`, ``masks`` times each; nothing is written or ranked.
    """

    needs_batch = True
    needs_scores = False

    def __init__(
        self,
        *,
        masks: int = 1,
        unit: MaskUnit = "graph",
        extractor: str = "rules",
        mask_share: MaskShare = "units",
    ) -> None:
        super().__init__()
        self.options = GeneratorOptions(masks, 1, 1, 1.0, unit, extractor, share=mask_share)
        self._generator: Generator | None = None

    def prepare(self, training: Preparation) -> None:
        self._generator = training.generator(self.options, ("mlm",))

    def forward(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        live = context.live
        if live is None or self._generator is None:
            raise TrainingError("objective.mlm works on the batches of a training run only")
        images = live.images[pair_images(live.batch)]
        loss = global_mean(fill_losses(live, images, self._generator.mask(live, context.step)))
        return LossReport(loss, {"mlm/loss": loss.detach()})
