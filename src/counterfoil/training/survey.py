"""A look at the whole training split between epochs (`objectives.services.Survey`)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from counterfoil.collectives import gather_rows, rank, world_size
from counterfoil.config import RunConfig
from counterfoil.data.batches import Augmentation, CaptionItems, Collate, PairBatch
from counterfoil.data.pairs import Split
from counterfoil.data.sampling import BatchPlan
from counterfoil.errors import TrainingError
from counterfoil.models.asking import asked
from counterfoil.models.model import Model
from counterfoil.parallel import begin_loader_worker, bounded_workers
from counterfoil.progress import Progress
from counterfoil.training.step import score_batch


class TrainingSurvey:
    """Every caption with its image, batch by batch, in evaluation mode and without augmentation.

    The batches are those of training: as large, and mixed anew in each epoch by the run's seed.
    """

    epoch = 0

    def __init__(
        self,
        model: Model,
        split: Split,
        config: RunConfig,
        device: torch.device,
        progress: Progress,
    ) -> None:
        self.model, self.device, self.progress = model, device, progress
        self.workers, self.chunk_size = config.data.workers, config.train.chunk_size
        self.items = CaptionItems(split, model.text, Augmentation(), config.seed)
        self.plan = BatchPlan(split, config.train.batch_size, config.seed, drop_last=False)

    @torch.no_grad()
    def __call__(self) -> Iterator[tuple[tuple[Tensor, ...], Tensor, Tensor]]:
        with asked(self.model):
            label = "looking at the training split"
            for batch in self.progress.track(self._loader(), label, len(self.plan)):
                if not isinstance(batch, PairBatch):
                    if world_size() > 1:
                        raise TrainingError(
                            f"no usable item in the share of process {rank()}: {batch}"
                        )
                    continue
                batch = batch.to(self.device)
                members = score_batch(self.model, batch, chunk_size=self.chunk_size).members
                yield members, gather_rows(batch.image_ids), gather_rows(batch.caption_ids)

    def _shares(self) -> list[list[tuple[int, int, int]]]:
        """This process's share of each batch; all batches are about as large, none is a rest."""
        shares = []
        for batch in np.array_split(self.plan.order(self.epoch), len(self.plan)):
            share = np.array_split(batch, world_size())[rank()]
            shares.append([(self.epoch, int(caption), 0) for caption in share])
        return shares

    def _loader(self) -> DataLoader[PairBatch | tuple[str, ...]]:
        return DataLoader(
            self.items,  # type: ignore[arg-type]
            batch_sampler=self._shares(),
            num_workers=bounded_workers(self.workers, "data.workers"),
            worker_init_fn=begin_loader_worker,
            collate_fn=Collate(self.model.text.pad),
            generator=torch.Generator(),
        )
