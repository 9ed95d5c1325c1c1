"""TripletCLIP: foils and images that show them, both as negatives (Patel et al. 2024).

NegCLIP's loss on images, captions and foils (I, T, T⁻), and the same on (I⁻, T⁻, T): an image that
shows the foil contrasts it with the true captions. The paper generates I⁻ with a text-to-image
model. Here it is drawn, on drawn scenes, or retrieved: the training image that matches the foil
best.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from counterfoil.core.distributed import gather_counts, gather_rows
from counterfoil.core.errors import TrainingError
from counterfoil.data.batches.collate import NO_IMAGE, BatchExtras, ImageBatch
from counterfoil.data.batches.dataset import ExtraNegativeSource
from counterfoil.encoders.encoded import Encoded
from counterfoil.objectives.base import Anchors, Context, LossReport, at_least_float32, objectives
from counterfoil.objectives.contrastive import Scale, softmax_loss
from counterfoil.objectives.foils import (
    NO_OWNER,
    FoilBased,
    extra_items,
    foil_matrix,
    text_keys,
)
from counterfoil.objectives.negclip import negclip_loss, pair_diagnostics
from counterfoil.objectives.services import (
    BatchServices,
    NegativeImages,
    RunSetup,
    TrainSplitScores,
)


@dataclass(frozen=True)
class ShownFoils:
    """Foils that have an image, of all processes: N⁻ images and as many foils, in order.

    ``scores`` [N⁻, N⁻] of images and foils, ``of_captions`` [N⁻, T] of images and the captions of
    the batch. ``same_image`` [N⁻, N⁻] marks equal images, ``not_negative`` [N⁻, T] captions of the
    same image or with the words of its foil.
    """

    scores: Tensor
    of_captions: Tensor
    same_image: Tensor
    not_negative: Tensor


def shown_foils_loss(foils: ShownFoils, scale: Tensor) -> Tensor:
    """NegCLIP's loss on (I⁻, T⁻, T); foils of the same image are not negatives of it."""
    scores, captions = at_least_float32(foils.scores), at_least_float32(foils.of_captions)
    positive, negative = scores.diagonal(), ~foils.same_image
    by_image = Anchors(
        positive,
        torch.cat([scores, captions], 1),
        torch.cat([negative, ~foils.not_negative], 1),
    )
    by_text = Anchors(positive, scores.T, negative.T)
    return (softmax_loss(by_image, scale) + softmax_loss(by_text, scale)) / 2


@objectives.register("triplet-clip")
class TripletCLIP(FoilBased):
    """NegCLIP's loss on (image, caption, foil) + ``second`` · that on (I⁻, foil, caption).

    I⁻ is an image that shows the foil. ``images``: ``drawn`` (drawn scenes only) draws the scene
    that a foil describes, once per run. ``retrieved`` finds the training image that the model in
    training scores highest, anew before each epoch; the folder of a run retrieves with that run
    instead, once. ``auto`` draws if it can. Foils are fixed for the run; those without an image
    are negatives only. ``source`` and ``count`` as in `negclip`.
    """

    def __init__(
        self,
        *,
        source: str = "rules",
        count: int = 1,
        temperature: float = 0.07,
        learned: bool = True,
        images: str = "auto",
        second: float = 1.0,
    ) -> None:
        super().__init__(source, count)
        self._require_nonnegative(second=second)
        self.images, self.second = images, second
        self.scale = Scale.of_temperature(temperature, learned)
        self.negatives: NegativeImages | None = None

    def prepare(self, training: RunSetup) -> None:
        foils = training.foils(self.source, self.count)
        self.negatives = training.negative_images(foils, self.images)

    def extra_negatives(self) -> ExtraNegativeSource | None:
        return self.negatives

    def begin_epoch(self, epoch: int, survey: TrainSplitScores) -> None:
        if self.negatives is not None:
            self.negatives.refresh(survey)

    def get_extra_state(self) -> dict[str, Any]:
        """The retrieved images of this epoch, which a run that resumes within it needs."""
        images = None if self.negatives is None else self.negatives.images
        return {"images": None if images is None else torch.from_numpy(images.copy())}

    def set_extra_state(self, state: Any) -> None:
        images = state["images"]
        if images is not None and self.negatives is not None:
            self.negatives.images = np.asarray(images.cpu().numpy(), dtype=np.int64)

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        services, extra = extra_items(context, "triplet-clip")
        scores = at_least_float32(scores)
        scale, foils = self.scale(scores), foil_matrix(services, extra, positives)
        loss = negclip_loss(scores, positives, context, foils, scale)
        diagnostics = pair_diagnostics(scores, positives, context, foils)
        if foils is None or not any(gather_counts(len(extra.image_owners), scores.device)):
            return LossReport(loss, diagnostics)
        pictured = score_shown(services, extra, foils.encoded)
        second = shown_foils_loss(pictured, scale)
        diagnostics["triplet-clip/second"] = second.detach()
        diagnostics["triplet-clip/images"] = scores.new_tensor(float(len(pictured.scores)))
        return LossReport(loss + self.second * second, diagnostics)


def score_shown(services: BatchServices, extra: BatchExtras, foils: Encoded) -> ShownFoils:
    """Scores of the images that show foils; ``foils`` are all foils of this process, encoded."""
    batch = services.batch
    texts = _texts_of_images(extra)
    images = _images_or_placeholder(services, extra)
    encoded = services.encode_images(images)
    scores = services.matrix(encoded, foils[texts])
    of_captions = services.matrix(encoded, services.texts)
    real = gather_rows(_real(extra)).nonzero()[:, 0]
    mine = extra.image_ids if len(extra.image_ids) else texts.new_full((1,), NO_IMAGE)
    ids = gather_rows(mine)[real]
    owners, captions = gather_rows(batch.owners), gather_rows(text_keys(batch.texts))
    keys = gather_rows(_foil_keys(services, extra, texts))[real]
    same = (ids[:, None] == ids) & (ids != NO_IMAGE)[:, None]
    same = same | (keys[:, None] == keys)
    return ShownFoils(
        scores[real][:, real],
        of_captions[real],
        same,
        (ids[:, None] == owners) | (keys[:, None] == captions),
    )


def _texts_of_images(extra: BatchExtras) -> Tensor:
    """The foil that each extra image shows: image k of a pair shows its text k."""
    owners = extra.image_owners
    if not len(owners):
        return owners.new_zeros(1)
    if extra.texts is None:
        raise TrainingError("objective.triplet-clip: an image comes without the foil it shows")
    first = torch.searchsorted(extra.text_owners, owners)
    return first + _offset(owners)


def _offset(owners: Tensor) -> Tensor:
    """The position of each item among those of its owner; owners are sorted."""
    return torch.arange(len(owners), device=owners.device) - torch.searchsorted(owners, owners)


def _real(extra: BatchExtras) -> Tensor:
    """Whether the images of this process are real, not a placeholder."""
    owners = extra.image_owners
    if not len(owners):
        return owners.new_zeros(1, dtype=torch.bool)
    return owners != NO_OWNER


def _images_or_placeholder(services: BatchServices, extra: BatchExtras) -> ImageBatch:
    """The extra images; the first of the batch if this process has none."""
    return extra.images if extra.images is not None else first_image(services.batch.images)


def first_image(images: ImageBatch) -> ImageBatch:
    boxes = images.boxes[:1] if images.boxes is not None else None
    return ImageBatch(images.fragments[:1], images.mask[:1], boxes)


def _foil_keys(services: BatchServices, extra: BatchExtras, texts: Tensor) -> Tensor:
    source = services.batch.texts if extra.texts is None else extra.texts
    return text_keys(source)[texts]
