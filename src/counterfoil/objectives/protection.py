"""Protection from false negatives: unannotated pairs that match are excluded from the negatives.

Captions of the same image are never negatives, nor are captions identical to one of the image's own
(`positives.Twins`). `Protection` adds two heuristics: captions similar to one of the image's own,
and pairs that a trained model scores as high as a true pair.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from counterfoil.core.errors import ConfigError, TrainingError
from counterfoil.core.registry import Registry
from counterfoil.objectives.base import Context
from counterfoil.objectives.positives import own_captions
from counterfoil.objectives.services import RunSetup, Teacher

protections: Registry[type[Protection]] = Registry("protection")


@protections.register("protect")
class Protection(nn.Module):
    """Pairs of a batch that no objective uses as negatives.

    ``identical``: captions identical to one of the image's own (on by default; `Twins`).
    ``captions``: captions whose TF-IDF similarity with one of the image's own is at least this
    (for example 0.8); 0 disables it. ``teacher``: the folder of a run whose model scores the pairs.
    A pair is protected if its score is at least that of the image's or the caption's own pair minus
    ``slack``, or at least ``above`` if that is set.
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
    def is_heuristic(self) -> bool:
        """Whether it protects more than identical captions, which training handles."""
        return bool(self.captions or self.run)

    def prepare(self, training: RunSetup) -> None:
        if self.captions:
            from counterfoil.data.text.tfidf import caption_space

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
            protected = protected | self._by_teacher(positives, context)
        return protected & ~positives

    def _similarity(self, context: Context) -> Tensor:
        """Highest TF-IDF similarity [n_images, n_texts] of each caption with an image's own."""
        if context.image_ids is None or context.caption_ids is None or not len(self.own):
            raise TrainingError("objective.protect.captions works on batches of a training run")
        own = self.own[context.image_ids]
        vectors = self.vectors[own.clamp(min=0)]
        similarity = torch.einsum("ikd,td->ikt", vectors, self.vectors[context.caption_ids])
        return similarity.masked_fill(own[..., None] < 0, -1.0).amax(1)

    def _by_teacher(self, positives: Tensor, context: Context) -> Tensor:
        if self.teacher is None or context.services is None:
            raise TrainingError("objective.protect.teacher works on batches of a training run")
        scores = self.teacher.scores(context.services.batch).to(positives.device)
        if self.above is not None:
            return scores >= self.above
        own = scores.masked_fill(~positives, -torch.inf)
        by_image, by_text = own.amax(1, keepdim=True), own.amax(0, keepdim=True)
        return scores >= torch.minimum(by_image, by_text) - self.slack
