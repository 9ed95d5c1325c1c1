"""The sample of scores that a first stage is fitted to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from counterfoil.data.pairs import Split
from counterfoil.encoders import Encoded
from counterfoil.errors import DataError
from counterfoil.evaluation.scoring import encode_images, encode_texts, score_all
from counterfoil.models.model import Model
from counterfoil.progress import Progress
from counterfoil.search.fit import Fit, features, solve
from counterfoil.search.proxy import pooled_vectors

SAMPLE, LEAST = 1024, 64
"""Images, with a caption each, that are scored for a fit: at most, and at least."""


def enough_to_fit(splits: Sequence[Split]) -> bool:
    return sum(1 for split in splits for texts in split.captions if texts) >= LEAST


@torch.inference_mode()
def fit_first_stage(model: Model, splits: Sequence[Split], dim: int, progress: Progress) -> Fit:
    """Score a sample of captions with a sample of images, and fit."""
    rng = np.random.default_rng(0)
    where = [
        (split, image)
        for split in splits
        for image, texts in enumerate(split.captions)
        if len(texts)
    ]
    if len(where) < LEAST:
        raise DataError(f"a fitted first stage needs {LEAST} images with captions: use pooled")
    chosen = rng.permutation(len(where))[:SAMPLE]
    images, texts = [], []
    for split in splits:
        here = [where[i][1] for i in chosen if where[i][0] is split]
        if here:
            part = split.select(here)
            encoded, kept, _ = encode_images(model, part, progress=progress)
            images.append(encoded)
            texts += [part.captions[i][int(rng.integers(len(part.captions[i])))] for i in kept]
    # in no order, so that what is held out is of all splits
    order = torch.from_numpy(rng.permutation(len(texts)))
    shown = Encoded.cat(images)[order.to(model.device)]
    said = encode_texts(model, [texts[i] for i in order.tolist()])
    scores = score_all(model, shown, said, progress).T.double()
    asked, answers = (features(model, side).double().cpu() for side in (said, shown))
    pooled = pooled_vectors(model, said).rows @ pooled_vectors(model, shown).rows.T
    return solve(asked, answers, scores - scores.mean(), torch.from_numpy(pooled).double(), dim)
