"""The best wrong candidates of every image and caption, from scores that are never all held.

Scores come block by block; of each image and each caption only the best few are kept. A score and
the index of its candidate are packed into one integer whose order is that of the scores and, among
equal scores, of the lower index. So what is kept does not depend on the size of the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from counterfoil.data.pairs import Split
from counterfoil.errors import DataError, TrainingError
from counterfoil.evaluation.scoring import TILE, encode_images, encode_texts
from counterfoil.models.model import Model
from counterfoil.progress import Progress, Silent

Indices = NDArray[np.int64]

Scorer = Callable[[slice, slice], Tensor]
"""Scores [images, texts] of some images, given by a slice of all, with some texts."""

SIDE = 1024
"""Most images and most texts of a block."""

NOBODY = -1
"""Stands at the end of a row where there are fewer wrong candidates than were asked for."""

_LOW = (1 << 32) - 1
_EMPTY = -(1 << 63)


def best_wrong(
    score: Scorer,
    image_of: Tensor,
    images: int,
    count: int,
    side: int = SIDE,
    progress: Progress | None = None,
) -> tuple[Tensor, Tensor]:
    """Texts [images, count] of each image and images [texts, count] of each text, best first.

    ``image_of`` [texts] is the image of each text; own pairs are left out. Of equal scores the
    lower index comes first. Rows with fewer candidates end in `NOBODY`.
    """
    progress = progress or Silent()
    texts, device = len(image_of), image_of.device
    of_image = torch.full((images, count), _EMPTY, dtype=torch.long, device=device)
    of_text = torch.full((texts, count), _EMPTY, dtype=torch.long, device=device)
    image_ids, text_ids = torch.arange(images, device=device), torch.arange(texts, device=device)
    starts = range(0, images, side)
    for top in progress.track(starts, "looking for hard negatives", len(starts)):
        rows = slice(top, min(top + side, images))
        for left in range(0, texts, side):
            columns = slice(left, min(left + side, texts))
            scores = score(rows, columns).to(device)
            own = image_of[columns] == image_ids[rows, None]
            _keep_best(of_image[rows], scores, text_ids[columns], own)
            _keep_best(of_text[columns], scores.T, image_ids[rows], own.T)
    return _unpacked(of_image), _unpacked(of_text)


def _keep_best(best: Tensor, scores: Tensor, candidates: Tensor, own: Tensor) -> None:
    """Bring new candidates into the best so far, in place."""
    new = _packed(scores, candidates).masked_fill(own, _EMPTY)
    best.copy_(torch.cat([best, new], 1).topk(best.shape[1]).values)


def _packed(scores: Tensor, candidates: Tensor) -> Tensor:
    """One integer a score: its order in the high half, the candidate counted down in the low."""
    if scores.isnan().any():
        raise TrainingError("the model that looks for hard negatives gives scores that are nan")
    bits = (scores.float() + 0.0).contiguous().view(torch.int32)  # + 0.0: no negative zero
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # floats in order are integers in order
    return (ordered.long() << 32) + (_LOW - candidates)


def _unpacked(best: Tensor) -> Tensor:
    return torch.where(best == _EMPTY, NOBODY, _LOW - (best & _LOW))


@torch.inference_mode()
def mine(
    model: Model, split: Split, count: int, progress: Progress | None = None
) -> tuple[Indices, Indices]:
    """By a model's scores, the best wrong captions of each image and images of each caption.

    Indices [n_images, count] and [n_captions, count] into the split, as `best_wrong` has them. An
    image that cannot be read or has no caption is nobody's candidate, nor are its captions; their
    own rows hold `NOBODY` alone.
    """
    progress = progress or Silent()
    encoded, kept, skipped = encode_images(model, split, progress=progress)
    if skipped:
        progress.say(f"no hard negatives among {len(skipped)} images that cannot be read")
    rows = [row for row, image in enumerate(kept) if split.captions[image]]
    images = np.array([kept[row] for row in rows], dtype=np.int64)
    texts = np.flatnonzero(np.isin(split.image_of, images))
    if not len(texts):
        raise DataError(f"split '{split.name}' has no image that can be read and has a caption")
    encoded = encoded[torch.tensor(rows, device=model.device)]
    captions = encode_texts(model, [split.texts[t] for t in texts], progress=progress)
    cells = max(1, encoded.mask.shape[1]) * max(1, captions.mask.shape[1])
    side = min(SIDE, max(1, math.isqrt(TILE // cells)))
    image_of = torch.from_numpy(np.searchsorted(images, split.image_of[texts])).to(model.device)

    def score(rows: slice, columns: slice) -> Tensor:
        scores: Tensor = model.matcher(encoded[rows], captions[columns])
        return scores

    of_image, of_text = best_wrong(score, image_of, len(images), count, side, progress)
    return (
        _in_split(of_image, images, texts, len(split)),
        _in_split(of_text, texts, images, len(split.texts)),
    )


def _in_split(found: Tensor, queries: Indices, candidates: Indices, size: int) -> Indices:
    """Candidates of some queries as indices into the split, with a row for every query of it."""
    local = found.cpu().numpy()
    table = np.full((size, local.shape[1]), NOBODY, dtype=np.int64)
    table[queries] = np.where(local == NOBODY, NOBODY, candidates[local])
    return table
