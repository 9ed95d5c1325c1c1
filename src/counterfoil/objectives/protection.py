"""False negatives: unannotated pairs that match, kept out of every objective's negatives.

Captions of the same image are never negatives anyway. Nor are captions that are identical to one of
the image's own (`Twins`). `Protection` adds two guesses: a caption that says almost the same as one
of the image's own, and a pair that a trained model scores like a true one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from counterfoil.core.errors import ConfigError, TrainingError
from counterfoil.core.registry import Registry
from counterfoil.objectives.base import Context
from counterfoil.objectives.services import RunSetup, Teacher
from counterfoil.objectives.twins import own_captions

protections: Registry[type[Protection]] = Registry("protection")


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
        if self.teacher is None or context.services is None:
            raise TrainingError("objective.protect.teacher works on batches of a training run")
        scores = self.teacher.scores(context.services.batch).to(positives.device)
        if self.above is not None:
            return scores >= self.above
        own = scores.masked_fill(~positives, -torch.inf)
        by_image, by_text = own.amax(1, keepdim=True), own.amax(0, keepdim=True)
        return scores >= torch.minimum(by_image, by_text) - self.slack
