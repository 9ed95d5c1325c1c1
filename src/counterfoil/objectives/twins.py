"""Captions that stand word for word at another image, too: such pairs are no negatives."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from counterfoil.data.duplicates import identical_groups, images_of_groups, with_twin
from counterfoil.data.pairs import Split

ALONE, NO_GROUP = -1, -2
"""Group of a caption that no other image has; where an image has no more groups."""


class Twins(nn.Module):
    """Which images have a caption word for word that stands at another image, too.

    ``captions`` is the number of captions of the split that another image has, too. The buffers are
    the group of each caption, the same for identical ones, and the groups that each image has.
    """

    group: Tensor
    owned: Tensor

    def __init__(self, split: Split) -> None:
        super().__init__()
        groups = identical_groups(split.texts)
        shared = with_twin(groups, split.image_of)
        self.captions, self.total = int(shared.sum()), len(groups)
        owned, owners = images_of_groups(groups[shared], split.image_of[shared])
        order = np.argsort(owners, kind="stable")
        places = own_captions(owners[order], len(split))  # the same for groups as for captions
        self.owned_on_host = np.append(owned[order], NO_GROUP)[places]
        self.group_on_host = np.where(shared, groups, ALONE)
        self.register_buffer("owned", torch.tensor(self.owned_on_host), persistent=False)
        self.register_buffer("group", torch.tensor(self.group_on_host), persistent=False)

    def forward(self, image_ids: Tensor, caption_ids: Tensor) -> Tensor:
        """Images that have a caption identical to another's, own ones included [images, texts]."""
        groups = self.group[caption_ids]
        has = torch.zeros(len(image_ids), len(caption_ids), dtype=torch.bool, device=groups.device)
        for owned in self.owned[image_ids].unbind(1):
            has |= owned[:, None] == groups
        return has

    def has(self, image: int, caption: int) -> bool:
        """Whether an image has this caption of another image, too; for processes that read data."""
        return bool((self.owned_on_host[image] == self.group_on_host[caption]).any())

    def note(self, protected: bool) -> str:
        """What a run says of them at its start."""
        found = f"{self.captions:,} of {self.total:,} training captions also stand at another image"
        if protected:
            return f"{found}; such pairs are never used as negatives"
        return f"{found}; such pairs are used as negatives (objective.protect.identical=false)"


def find_twins(split: Split | None, device: torch.device | None = None) -> Twins | None:
    """The twins of a split; None if it has none, so that nothing is masked in its batches."""
    twins = Twins(split) if split is not None and split.texts else None
    return twins.to(device) if twins is not None and twins.captions else None


def twin_pairs(
    twins: Twins | None, image_ids: Tensor, caption_ids: Tensor, positives: Tensor
) -> Tensor | None:
    """Pairs of a batch that are no positives, although the image has the same caption."""
    return None if twins is None else twins(image_ids, caption_ids) & ~positives


def own_captions(image_of: NDArray[np.int64], images: int) -> Tensor:
    """Caption indices [images, most captions of one], -1 where an image has fewer."""
    counts = np.bincount(image_of, minlength=images)
    table = np.full((images, max(1, int(counts.max(initial=0)))), -1, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    table[image_of, np.arange(len(image_of)) - starts[image_of]] = np.arange(len(image_of))
    return torch.from_numpy(table)
