"""Loss for the trainer of sentence-transformers: any objective of this library.

Pass `ImageTextLoss` to ``SentenceTransformerTrainer(model, loss=...)``. The data set has two
columns, images and captions, and may have a ``label`` column of image ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from counterfoil.adapters.in_batch import InBatchLoss, Spec, cosines, read_ids, row_ids
from counterfoil.core.distributed import gather_rows
from counterfoil.core.errors import DataError
from counterfoil.encoders.encoded import l2_normalize
from counterfoil.matchers.fragment_matcher import single
from counterfoil.objectives.positives import Ids

PIXELS, TOKENS = "pixel_values", "input_ids"


class ImageTextLoss(InBatchLoss):
    """An objective over the cosines of all pairs of a batch.

    ``model`` is a `SentenceTransformer` of images and texts, such as CLIP. Equal images and equal
    captions are recognized by their inputs; image ids in the label column replace those of images.
    With ``gather_across_devices``, the loss and its gradients are over the global batch.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Spec = "hardest",
        *,
        gather_across_devices: bool = True,
        steps_per_epoch: int = 0,
    ) -> None:
        super().__init__(objective, steps_per_epoch)
        self.model, self.gather_across_devices = model, gather_across_devices

    def forward(
        self, sentence_features: Iterable[dict[str, Any]], labels: Ids | None = None
    ) -> Tensor:
        images, texts = _columns(sentence_features)
        ids = [_ids_of(images), _ids_of(texts)]
        if isinstance(labels, Tensor):
            labels = _whole(labels.flatten())
        if labels is not None and len(labels):
            ids[0] = read_ids(labels, ids[0], "labels")
        vectors = [
            l2_normalize(single(self.model(column)["sentence_embedding"]))
            for column in (images, texts)
        ]
        if self.gather_across_devices:
            vectors, ids = [gather_rows(x) for x in vectors], [gather_rows(x) for x in ids]
        return self.of_scores(cosines(*vectors), *ids)

    def get_config_dict(self) -> dict[str, Any]:
        """Settings of the loss for the model card."""
        return {
            "objective": self.spec,
            "gather_across_devices": self.gather_across_devices,
            "steps_per_epoch": self.steps_per_epoch,
        }


def _columns(sentence_features: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The columns of images and texts, in this order; two text columns keep their order."""
    columns = [dict(features) for features in sentence_features]
    if len(columns) != 2:
        raise DataError(
            f"expected two columns of the data set, images and captions, got {len(columns)}; "
            "negatives come from the batch: remove the others"
        )
    first, second = columns
    return (second, first) if PIXELS in second and PIXELS not in first else (first, second)


def _whole(labels: Tensor) -> Tensor:
    """Image ids of the label column, as integers; other numbers would be rounded to equal ids."""
    if labels.is_floating_point() and bool((labels != labels.round()).any()):
        raise DataError(
            "column 'label': expected image ids, integers that are equal for pairs of one image, "
            "got fractions; remove or rename the column if it holds scores"
        )
    return labels.long()


def _ids_of(features: dict[str, Any]) -> Tensor:
    if PIXELS in features:
        return row_ids(features[PIXELS])
    if TOKENS not in features:
        raise DataError(
            f"expected '{PIXELS}' or '{TOKENS}' among the inputs of the model, got: "
            f"{', '.join(sorted(features))}"
        )
    tokens = features[TOKENS] + 1  # so that token 0 differs from padding
    mask = features.get("attention_mask")
    return row_ids(tokens if mask is None else tokens * mask.to(torch.long))
