"""Word-region similarities of right and wrong pairs of a batch, for NAAF's mismatch mining.

Section 3.1.3: for each caption whose own image scores highest of the batch, every word gives its
highest similarity with that image as matched, and with one other image as mismatched. An ablation
takes its similarities with all regions of that other image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from counterfoil.data.on_host import surely_whole
from counterfoil.encoders.encoded import Encoded
from counterfoil.matchers.base import Observation
from counterfoil.matchers.fragment_matcher import fragments

BINS = 400
"""Bins of the histograms of similarities, from −1 to 1. Cosines beyond are rounding errors."""

Mismatched = Literal["max", "all"]
"""What a word gives as mismatched: its highest similarity (eq. 14), or all of them."""


@dataclass(frozen=True)
class Samples:
    """S⁺ and S⁻ of eq. 2 and 1 as one tensor [P, 2, N], and which of its values count."""

    values: Tensor
    counted: Tensor

    def moments(self) -> Tensor:
        """Number, sum and sum of squares [2, 3]."""
        return moments(self.values, self.counted, dim=(0, 2))

    def histogram(self) -> Tensor:
        """Counts [2, BINS]."""
        return histogram(self.values, self.counted)


@dataclass(frozen=True)
class Mismatches:
    """Similarities [P, 2, W, R] of an image with its own caption and with another one.

    ``words`` [P, 2, W] and ``regions`` [P, R] say which are real, ``whole`` of which of these the
    host knows that all are; ``counted`` [P, 2] says which of the pairs count.
    """

    sims: Tensor
    words: Tensor
    regions: Tensor
    whole: tuple[bool, bool]
    counted: Tensor

    @classmethod
    def of(cls, seen: Observation, shift: int) -> Mismatches:
        """Each caption with its own image; that image also with the caption ``shift`` places back.

        So which image is the wrong one of a caption does not depend on the number of processes.
        Every pair is compared, also those that do not count: to know which do, the host of a GPU
        would have to wait.
        """
        images, captions, counted = (
            _pairs(seen, shift) if len(seen.scores) == len(seen.texts) else _groups(seen, shift)
        )
        texts = seen.texts
        v, u = fragments(images), fragments(texts).index_select(0, captions)
        wide = torch.promote_types(u.dtype, v.dtype)  # mixed precision may mix the two sides'
        sims = u.view(len(v), -1, u.shape[-1]).to(wide) @ v.to(wide).mT
        words = texts.mask.index_select(0, captions).view(len(v), 2, -1)
        whole = surely_whole(texts.mask), surely_whole(images.mask)
        return cls(sims.unflatten(1, (2, -1)), words, images.mask, whole, counted)

    def samples(self, side: str, mismatched: Mismatched = "max") -> Samples:
        """Highest similarities of the asking side's real fragments; of mismatched ones, or all."""
        words, regions = self.words, self.regions[:, None]
        asking, answers, axis = (words, regions[:, :, None], -1)
        if side == "i2t":
            asking, answers, axis = (regions, words[..., None], -2)
        sims = self.sims
        if not self.whole[side == "t2i"]:
            sims = sims.masked_fill(~answers, -2.0)
        values = sims.amax(axis)  # eq. 13 in row 0, eq. 14 in row 1
        best = Samples(values, (asking & self.counted[..., None]).expand_as(values))
        return best if mismatched == "max" else self._with_all(best)

    def _with_all(self, best: Samples) -> Samples:
        """The matched maxima beside every similarity of a mismatched word with a region."""
        real = self.words[:, 1, :, None] & self.regions[:, None] & self.counted[:, 1, None, None]
        every = self.sims[:, 1].flatten(1)
        rest = (0, every.shape[1] - best.values.shape[2])
        return Samples(
            torch.stack([F.pad(best.values[:, 0], rest), every], 1),
            torch.stack([F.pad(best.counted[:, 0], rest), real.flatten(1)], 1),
        )


Chosen = tuple[Encoded, Tensor, Tensor]
"""Images [P], their own and another caption [2 P] by index, and which pairs [P, 2] count."""


def _pairs(seen: Observation, shift: int) -> Chosen:
    """Of a batch of pairs: caption k belongs to row k, and a process has its images' captions."""
    scores, not_wrong = seen.scores, seen.not_wrong
    pairs, count = len(seen.images), len(scores)
    right = scores.diagonal() > _highest_wrong(seen)  # [T]
    own = np.arange(seen.first_row, seen.first_row + pairs)
    other = (own - shift) % count
    # captions of each image, own and other, and where the latter's pair is in the matrix
    places = np.concatenate([np.stack([own, other], 1).ravel(), own * count + other])
    captions, cells = (
        torch.from_numpy(places).to(scores.device, non_blocking=True).split([2 * pairs, pairs])
    )
    good = right[seen.first_row : seen.first_row + pairs]
    bad = (right > not_wrong).flatten().index_select(0, cells)  # right and not a positive
    return seen.images, captions, torch.stack([good, bad], 1)


def _groups(seen: Observation, shift: int) -> Chosen:
    """Of images with several captions each: a caption's own row is that of its first positive.

    Captions are counted by the process that holds their image.
    """
    images = slice(seen.first_row, seen.first_row + len(seen.images))
    first, last, _ = seen.own_texts.indices(len(seen.texts))
    own = torch.arange(first, last, device=seen.scores.device)
    other = (own - shift) % len(seen.texts)
    right = _own_scores(seen) > _highest_wrong(seen)  # [T]
    positives = seen.positives[images, first:last]
    rows = positives.to(torch.int8).argmax(0)
    bad = (right > seen.not_wrong[images])[rows, other]  # right and not a positive
    counted = torch.stack([right[first:last], bad], 1) & positives.any(0)[:, None]
    return seen.images[rows], torch.stack([own, other], 1).flatten(), counted


def _own_scores(seen: Observation) -> Tensor:
    """Of each caption, the score with its first positive image."""
    rows = seen.positives.to(torch.int8).argmax(0)
    return seen.scores.gather(0, rows[None])[0]


def _highest_wrong(seen: Observation) -> Tensor:
    """Of each caption, the highest score with an image that is not its own."""
    return seen.scores.masked_fill(seen.not_wrong, -torch.inf).amax(0)


def moments(
    samples: Tensor, counted: Tensor | None = None, dim: tuple[int, ...] | None = None
) -> Tensor:
    """Number, sum and sum of squares [..., 3] of samples, or of those that are ``counted``.

    Over all axes or some (``dim``), in double precision.
    """
    if counted is None:
        counted = torch.ones_like(samples, dtype=torch.bool)
    kept, wide = torch.where(counted, samples, 0.0), torch.float64  # no product: 0 · NaN counts
    over = tuple(range(samples.ndim)) if dim is None else dim
    squares = torch.linalg.vector_norm(kept, dim=over, dtype=wide).square()
    return torch.stack([counted.sum(over, dtype=wide), kept.sum(over, dtype=wide), squares], -1)


@torch.no_grad()
def histogram(samples: Tensor, counted: Tensor | None = None) -> Tensor:
    """Counts [kinds, BINS] of samples [P, kinds, N], or of those that are ``counted``."""
    kinds = samples.shape[1]
    places = ((samples.float() + 1) * (BINS / 2)).long().clamp_(0, BINS - 1)
    places += BINS * torch.arange(kinds, device=samples.device)[:, None]
    ones = torch.ones_like(places) if counted is None else counted.to(places.dtype)
    counts = places.new_zeros(kinds * BINS)
    # not bincount, for which the host waits
    return counts.scatter_add_(0, places.flatten(), ones.flatten()).view(kinds, BINS)


def close_histogram(counts: Tensor, boundary: float, alpha: float | None) -> dict[str, Any]:
    """Counts [2, BINS] as plain values without the empty ends; the counts become zero.

    ``alpha`` is None when the boundary is μ₊ − 3σ₊. Nothing was sampled: an empty record.
    """
    matched, mismatched = ([int(count) for count in row] for row in counts.tolist())
    counts.zero_()
    filled = [k for k, pair in enumerate(zip(matched, mismatched, strict=True)) if any(pair)]
    if not filled:
        return {}
    first, last = filled[0], filled[-1] + 1
    return {
        "low": 2 * first / BINS - 1,
        "high": 2 * last / BINS - 1,
        "matched": matched[first:last],
        "mismatched": mismatched[first:last],
        "boundary": boundary,
        "alpha": alpha,
    }


def mean_and_std(number: float, total: float, squares: float) -> tuple[float, float]:
    """Of samples with these moments; the deviation is that of n - 1."""
    mean = total / number
    return mean, math.sqrt(max(0.0, (squares - number * mean**2) / max(1.0, number - 1)))
