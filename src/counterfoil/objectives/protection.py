"""False negatives: unannotated pairs that match, kept out of every objective's negatives.

Captions of the same image are never negatives anyway. Nor are captions that are identical to one of
the image's own (`Twins`). `Protection` adds two guesses: a caption that says almost the same as one
of the image's own, and a pair that a trained model scores like a true one.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from counterfoil.data.duplicates import identical_groups, images_of_groups, with_twin
from counterfoil.data.pairs import Split
from counterfoil.errors import ConfigError, TrainingError
from counterfoil.objectives.base import Context
from counterfoil.objectives.services import Preparation, Teacher
from counterfoil.registry import Registry

protections: Registry[type[Protection]] = Registry("protection")


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


@protections.register("protect")
class Protection(nn.Module):
    """Which pairs of a batch are protected from being negatives.

    ``identical``: captions that stand word for word at the image, too; on by default, and done by
    training itself (`Twins`). ``captions``: a caption whose TF-IDF similarity with one of the
    image's own captions reaches this (0.8, say); 0 turns it off. ``teacher``: the folder of a run;
    a pair is protected where that model scores it at least as high as the image's (or the
    caption's) own pair, less ``slack``; with ``above``, at least that high, whatever the own pair's
    score.
    """

    own: Tensor
    vectors: Tensor

    def __init__(
        self,
        *,
        identical: bool = True,
        captions: float = 0.0,
        teacher: str = "",
        slack: float = 0.0,
        above: float | None = None,
        dim: int = 256,
    ) -> None:
        super().__init__()
        if not teacher and (slack or above is not None):
            raise ConfigError("objective.protect: slack and above are about a teacher: name one")
        if not 0.0 <= captions <= 1.0:
            raise ConfigError(f"objective.protect.captions: from 0 to 1, got {captions}")
        self.captions, self.run, self.slack, self.above = captions, teacher, slack, above
        self.dim, self.identical = dim, identical
        self.teacher: Teacher | None = None
        self.register_buffer("vectors", torch.empty(0, 0), persistent=False)
        self.register_buffer("own", torch.empty(0, 0, dtype=torch.long), persistent=False)

    @property
    def guesses(self) -> bool:
        """Whether it protects more than identical captions, which training knows by itself."""
        return bool(self.captions or self.run)

    def prepare(self, training: Preparation) -> None:
        if self.captions:
            from counterfoil.data.semantics import caption_space

            space = caption_space(training.train.texts, self.dim, seed=0)
            self.vectors = torch.nn.functional.normalize(torch.as_tensor(space.vectors), dim=1)
            self.own = own_captions(training.train.image_of, len(training.train))
        if self.run:
            self.teacher = training.teacher(self.run)

    def forward(self, positives: Tensor, context: Context) -> Tensor:
        """Protected pairs [n_images, n_texts]."""
        protected = torch.zeros_like(positives)
        if self.captions:
            protected = protected | (self._similarity(context) >= self.captions)
        if self.run:
            protected = protected | self._taught(positives, context)
        return protected & ~positives

    def _similarity(self, context: Context) -> Tensor:
        """Highest similarity of each caption with any caption of each image."""
        if context.image_ids is None or context.caption_ids is None or not len(self.own):
            raise TrainingError("objective.protect.captions works on batches of a training run")
        own = self.own[context.image_ids]
        vectors = self.vectors[own.clamp(min=0)]
        similarity = torch.einsum("ikd,td->ikt", vectors, self.vectors[context.caption_ids])
        return similarity.masked_fill(own[..., None] < 0, -1.0).amax(1)

    def _taught(self, positives: Tensor, context: Context) -> Tensor:
        if self.teacher is None or context.live is None:
            raise TrainingError("objective.protect.teacher works on batches of a training run")
        scores = self.teacher.scores(context.live.batch).to(positives.device)
        if self.above is not None:
            return scores >= self.above
        own = scores.masked_fill(~positives, -torch.inf)
        by_image, by_text = own.amax(1, keepdim=True), own.amax(0, keepdim=True)
        return scores >= torch.minimum(by_image, by_text) - self.slack


def own_captions(image_of: NDArray[np.int64], images: int) -> Tensor:
    """Caption indices [images, most captions of one], -1 where an image has fewer."""
    counts = np.bincount(image_of, minlength=images)
    table = np.full((images, max(1, int(counts.max(initial=0)))), -1, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    table[image_of, np.arange(len(image_of)) - starts[image_of]] = np.arange(len(image_of))
    return torch.from_numpy(table)
