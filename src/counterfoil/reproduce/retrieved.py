"""Captions of other images as foils: the one of a batch or of the split that scores highest."""

from __future__ import annotations

import random

import torch

from counterfoil.data.pairs import Split
from counterfoil.evaluation.foil_sets import FoilPair, FoilSet, choose_captions
from counterfoil.evaluation.foil_sources import FoilChoice
from counterfoil.evaluation.scoring import score_split
from counterfoil.models.model import Model
from counterfoil.progress import Progress

BATCH = 128
"""Captions of a batch, as many as a usual batch of training has."""


def retrieved_set(
    model: Model, split: Split, choice: FoilChoice, of_batch: bool, progress: Progress
) -> FoilSet:
    """The negative caption of each caption's image that the model scores highest.

    Batches are drawn from all captions of the split by ``choice.seed``. Captions that are equal to
    one of the image's own are no negatives of it.
    """
    scored = score_split(model, split, progress=progress)
    row_of = {image: row for row, image in enumerate(scored.images)}
    column_of = {caption: column for column, caption in enumerate(scored.texts)}
    groups = _batches(scored.texts, choice.seed) if of_batch else [list(scored.texts)]
    group_of = {caption: group for group in groups for caption in group}
    pairs: list[FoilPair] = []
    chosen = choose_captions(split, choice.captions, choice.seed)
    for caption in chosen:
        if caption not in column_of:  # its image cannot be read
            continue
        image = int(split.image_of[caption])
        own = set(split.captions[image])
        others = [other for other in group_of[caption] if split.texts[other] not in own]
        if others:
            columns = torch.tensor([column_of[other] for other in others])
            best = int(scored.scores[row_of[image], columns].argmax())
            pairs.append(FoilPair(caption, split.texts[others[best]]))
    name = "the hardest of a batch" if of_batch else "the hardest of the split"
    return FoilSet.of(name, pairs, len(chosen))


def _batches(captions: list[int], seed: int) -> list[list[int]]:
    shuffled = random.Random(f"{seed}/batches").sample(captions, len(captions))
    return [shuffled[start : start + BATCH] for start in range(0, len(shuffled), BATCH)]
