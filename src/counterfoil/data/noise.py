"""Captions that belong to another image, put there on purpose: NCR's protocol for noisy data."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np
from numpy.typing import ArrayLike, NDArray

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.data.pairs import Split


def shuffled_captions(split: Split, ratio: float, seed: int) -> tuple[Split, NDArray[np.int64]]:
    """The split with round(ratio · n) captions moved among images, and the index that says where.

    ``index[k]`` is the number of the caption that now stands in place ``k`` of ``split.texts``:
    save it with ``np.save`` and apply it again with `with_noise_index`, since results depend on it.
    Every image keeps its number of captions. Of the captions drawn none stays with its own image,
    unless more than half of them belong to that one image (or only one was drawn): then as few
    stay as must.
    """
    if not 0.0 <= ratio <= 1.0:
        raise ConfigError(f"caption noise: expected a ratio from 0 to 1, got {ratio}")
    rng = np.random.default_rng(seed)
    owner = split.image_of
    index = np.arange(len(owner), dtype=np.int64)
    drawn = np.sort(rng.choice(len(owner), size=round(ratio * len(owner)), replace=False))
    index[drawn] = rng.permutation(drawn)
    _send_away(index, drawn, owner, rng)
    return with_noise_index(split, index), index


def with_noise_index(split: Split, index: ArrayLike) -> Split:
    """The split with caption ``index[k]`` in place ``k``.

    What the source said of its captions besides (``extras``) is left out: it would be told of the
    wrong ones.
    """
    places = _permutation(split, np.asarray(index))
    texts = [split.texts[place] for place in places]
    counts = [len(captions) for captions in split.captions]
    ends = accumulate(counts)
    captions = [texts[end - count : end] for count, end in zip(counts, ends, strict=True)]
    return replace(split, captions=captions, extras=None)


def _send_away(
    index: NDArray[np.int64],
    drawn: NDArray[np.int64],
    owner: NDArray[np.int64],
    rng: np.random.Generator,
) -> None:
    """Swap captions that stayed with their image, in place, until no swap helps.

    A partner must neither stand on that image nor belong to it. One exists as long as the image
    has at most half of the captions drawn, or more of them still than it must; so one pass is
    enough.
    """
    for place in drawn[owner[index[drawn]] == owner[drawn]]:
        image = owner[place]
        able = drawn[(owner[drawn] != image) & (owner[index[drawn]] != image)]
        # A place before may have been mended as somebody's partner.
        if owner[index[place]] == image and len(able):
            partner = rng.choice(able)
            index[place], index[partner] = index[partner], index[place]


def _permutation(split: Split, index: NDArray[np.generic]) -> NDArray[np.int64]:
    count = len(split.texts)
    if index.ndim != 1 or len(index) != count:
        raise DataError(
            f"caption noise: split '{split.name}' has {count} captions but the index has shape "
            f"{list(index.shape)}; it was made for other data"
        )
    if not np.issubdtype(index.dtype, np.integer):
        raise DataError(f"caption noise: an index holds whole numbers, not {index.dtype}")
    found: NDArray[np.int64] = index.astype(np.int64)
    if not np.array_equal(np.sort(found), np.arange(count)):
        raise DataError(
            f"caption noise: the index must name each caption from 0 to {count - 1} exactly once"
        )
    return found
