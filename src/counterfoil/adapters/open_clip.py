"""Loss for OpenCLIP's training loop: any objective of this library in place of `ClipLoss`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from counterfoil.adapters.in_batch import (
    InBatchLoss,
    Spec,
    check_features,
    cosines,
    read_ids,
    row_ids,
)
from counterfoil.core.distributed import gather_rows
from counterfoil.core.errors import ArgumentError, ConfigError
from counterfoil.objectives.positives import Ids


class ObjectiveLoss(InBatchLoss):
    """A drop-in for `open_clip.ClipLoss`: same arguments, same call.

    Features must have unit length, as OpenCLIP's models return them. Objectives read cosines;
    ``scaled=True`` multiplies them by the model's ``logit_scale``, as `ClipLoss` does. Equal
    features in a batch are not negatives. Pass ids to ``forward`` if augmentation or dropout makes
    the features of one image or text differ.

    The loss is over the global batch of all processes. With ``gather_with_grad``, the mean gradient
    of the processes is exactly its gradient. Without it, each process has gradients of its own
    features only, and the mean is smaller by the number of processes, as in `ClipLoss`.
    ``local_loss`` computes the rows of the score matrix on separate processes and gathers them.
    """

    def __init__(
        self,
        objective: Spec = "hardest",
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
        *,
        scaled: bool = False,
        steps_per_epoch: int = 0,
    ) -> None:
        super().__init__(objective, steps_per_epoch)
        if use_horovod:
            raise ConfigError("use_horovod: not supported; start the processes with torchrun")
        self.local_loss, self.gather_with_grad = local_loss, gather_with_grad
        self.cache_labels = cache_labels  # labels are ids here: nothing to cache
        self.rank, self.world_size, self.scaled = rank, world_size, scaled

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | None,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
        *,
        image_ids: Ids | None = None,
        text_ids: Ids | None = None,
    ) -> Tensor | dict[str, Tensor]:
        check_features(image_features, text_features)
        if self.scaled and logit_scale is None:
            raise ArgumentError("logit_scale: expected a number, as scaled=True multiplies by it")
        ids = (
            _ids(image_ids, image_features, "image_ids"),
            _ids(text_ids, text_features, "text_ids"),
        )
        scores = self._scores(image_features, text_features)
        if self.scaled:
            assert logit_scale is not None  # noqa: S101 - refused above
            scores = logit_scale * scores + (0.0 if logit_bias is None else logit_bias)
        if self.world_size > 1:
            ids = gather_rows(ids[0]), gather_rows(ids[1])
        loss = self.of_scores(scores, *ids)
        # DistributedDataParallel needs a gradient of every parameter
        if not self.scaled and logit_scale is not None:
            unused = logit_scale if logit_bias is None else logit_scale + logit_bias
            loss = loss + 0.0 * torch.as_tensor(unused).sum().to(loss)
        return {"contrastive_loss": loss} if output_dict else loss

    def _scores(self, images: Tensor, texts: Tensor) -> Tensor:
        """Cosines of the global batch."""
        if self.world_size == 1:
            return cosines(images, texts)
        all_texts = self._gather(texts)
        if self.local_loss:
            return self._gather(cosines(images, all_texts))
        return cosines(self._gather(images), all_texts)

    def _gather(self, rows: Tensor) -> Tensor:
        if self.gather_with_grad:
            return gather_rows(rows)
        parts = [torch.empty_like(rows) for _ in range(self.world_size)]
        dist.all_gather(parts, rows.detach().contiguous())
        parts[self.rank] = rows
        return torch.cat(parts)


def _ids(given: Ids | None, features: Tensor, name: str) -> Tensor:
    """The given ids [B], checked before they are gathered; by default those of equal features."""
    return row_ids(features) if given is None else read_ids(given, features, name)
