"""Batch sampling: which captions form which batch, as a function of seed and epoch alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from counterfoil.core.errors import ConfigError
from counterfoil.data.batches.dataset import TEXT_ONLY
from counterfoil.data.pairs import Split


@dataclass(frozen=True)
class BatchPlan:
    """Global batches of an epoch; every process computes the same plan and takes its own share.

    Per epoch, ``captions="all"`` visits every caption once, ``"one"`` one random caption per image,
    ``"grouped"`` every image once with all its captions. ``views`` is the number of differently
    augmented copies of an item in its batch (1 in grouped batches).
    """

    split: Split
    batch_size: int
    seed: int = 0
    captions: Literal["all", "one", "grouped"] = "all"
    drop_last: bool = True
    views: int = 1

    def __post_init__(self) -> None:
        if not self.split.texts:
            raise ConfigError(f"split '{self.split.name}' has no captions to train on")
        if self.batch_size < 2:
            raise ConfigError("train.batch_size: at least 2, or there is no negative to learn from")
        if self.captions == "grouped" and self.views > 1:
            raise ConfigError("data.views: grouped captions already show an image several times")

    @property
    def items(self) -> int:
        if self.captions == "all":
            return len(self.split.texts)
        return int(np.unique(self.split.image_of).size)

    def __len__(self) -> int:
        """Batches per epoch; a split smaller than one batch still gives one."""
        full, rest = divmod(self.items, self.batch_size)
        return max(1, full) if self.drop_last or not rest else full + 1

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Captions of an epoch in visiting order (grouped: the first caption of each image)."""
        rng = np.random.default_rng([self.seed, epoch])
        if self.captions == "all":
            return rng.permutation(len(self.split.texts))
        image_of = self.split.image_of
        images, first, counts = np.unique(image_of, return_index=True, return_counts=True)
        if self.captions == "grouped":
            return np.asarray(rng.permutation(first))
        chosen = first + (rng.random(len(images)) * counts).astype(np.int64)
        return np.asarray(rng.permutation(chosen))

    def batch(self, order: NDArray[np.int64], number: int) -> NDArray[np.int64]:
        return order[number * self.batch_size : (number + 1) * self.batch_size]

    def entries(self, caption: int) -> list[tuple[int, int]]:
        """(caption, view) of all entries that one item adds to its batch."""
        if self.captions != "grouped":
            return [(caption, view) for view in range(self.views)]
        count = len(self.split.captions[int(self.split.image_of[caption])])
        return [(caption, 0), *((caption + k, TEXT_ONLY) for k in range(1, count))]


class RankBatches(Sampler["list[tuple[int, int, int]]"]):
    """The share of one process in each global batch of an epoch, from batch ``start`` on."""

    def __init__(
        self, plan: BatchPlan, epoch: int, start: int = 0, rank: int = 0, world: int = 1
    ) -> None:
        self.plan, self.epoch, self.start, self.rank, self.world = plan, epoch, start, rank, world

    def __len__(self) -> int:
        return len(self.plan) - self.start

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        order = self.plan.order(self.epoch)
        for number in range(self.start, len(self.plan)):
            share = np.array_split(self.plan.batch(order, number), self.world)[self.rank]
            yield [
                (self.epoch, *entry)
                for caption in share
                for entry in self.plan.entries(int(caption))
            ]
