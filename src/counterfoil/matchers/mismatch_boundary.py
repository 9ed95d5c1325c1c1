"""NAAF's mismatch mining: the boundary between similarities of matched and mismatched words.

Section 3.1.3: only captions whose own image scores highest in the batch are sampled. The highest
similarity of each word with that image is a matched sample, with one other image a mismatched one.
An ablation samples the similarities with all regions of that other image.

Section 3.1.1 (eq. 3–5): both distributions are modeled as normal. The boundary t first minimizes
α·P(mismatched > t) + P(matched < t), and is μ₊ − 3σ₊ later in training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from counterfoil.core.distributed import sum_over_processes
from counterfoil.core.tensors.host_mirror import HostScalarCache, PendingCopy, known_unpadded
from counterfoil.encoders.encoded import Encoded
from counterfoil.matchers.base import Observation
from counterfoil.matchers.fragment_matcher import fragments

BINS = 400
"""Bins of the histograms of similarities, from −1 to 1. Cosines beyond are rounding errors."""

Mismatched = Literal["max", "all"]
"""Mismatched samples of a word: its highest similarity (eq. 14), or all of them."""

SampledPairs = tuple[Encoded, Tensor, Tensor]
"""Images [P], indices [2 P] of their own and another caption, and which pairs [P, 2] count."""

SMALLEST_STD = 1e-4
ESTIMATES = ("mean_pos", "std_pos", "mean_neg", "std_neg")


@dataclass(frozen=True)
class Samples:
    """S⁺ and S⁻ (eq. 2 and 1) as one tensor [P, 2, N], and a mask of the values that count."""

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

    ``words`` [P, 2, W] and ``regions`` [P, R] are masks of the real ones, ``counted`` [P, 2] of the
    pairs that count. ``unpadded``: whether words, and regions, are known to have no padding.
    """

    sims: Tensor
    words: Tensor
    regions: Tensor
    unpadded: tuple[bool, bool]
    counted: Tensor

    @classmethod
    def of(cls, batch: Observation, shift: int) -> Mismatches:
        """Each image with its own caption, and with the caption ``shift`` positions before it.

        The mismatched image of a caption therefore does not depend on the number of processes.
        Pairs that do not count are compared as well: leaving them out would need a host sync.
        """
        select = _select_pairs if len(batch.scores) == len(batch.texts) else _select_from_groups
        images, captions, counted = select(batch, shift)
        texts = batch.texts
        v, u = fragments(images), fragments(texts).index_select(0, captions)
        wide = torch.promote_types(u.dtype, v.dtype)  # in mixed precision the sides may differ
        sims = u.view(len(v), -1, u.shape[-1]).to(wide) @ v.to(wide).mT
        words = texts.mask.index_select(0, captions).view(len(v), 2, -1)
        unpadded = known_unpadded(texts.mask), known_unpadded(images.mask)
        return cls(sims.unflatten(1, (2, -1)), words, images.mask, unpadded, counted)

    def samples(self, side: str, mismatched: Mismatched = "max") -> Samples:
        """Highest similarities of the real query fragments (eq. 13 and 14)."""
        words, regions = self.words, self.regions[:, None]
        query_mask, key_mask, axis = (words, regions[:, :, None], -1)
        if side == "i2t":
            query_mask, key_mask, axis = (regions, words[..., None], -2)
        sims = self.sims
        if not self.unpadded[side == "t2i"]:
            sims = sims.masked_fill(~key_mask, -2.0)
        values = sims.amax(axis)  # eq. 13 in row 0, eq. 14 in row 1
        maxima = Samples(values, (query_mask & self.counted[..., None]).expand_as(values))
        return maxima if mismatched == "max" else self._with_all_mismatched(maxima)

    def _with_all_mismatched(self, maxima: Samples) -> Samples:
        """Matched maxima, and every similarity of a mismatched word with a region."""
        real = self.words[:, 1, :, None] & self.regions[:, None] & self.counted[:, 1, None, None]
        every = self.sims[:, 1].flatten(1)
        padding = (0, every.shape[1] - maxima.values.shape[2])
        return Samples(
            torch.stack([F.pad(maxima.values[:, 0], padding), every], 1),
            torch.stack([F.pad(maxima.counted[:, 0], padding), real.flatten(1)], 1),
        )


def _select_pairs(batch: Observation, shift: int) -> SampledPairs:
    """From a batch of pairs: caption k belongs to row k, and a process has its images' captions."""
    pairs, count, first = len(batch.images), len(batch.scores), batch.first_row
    ranked_first = batch.scores.diagonal() > _highest_mismatched(batch)  # [T]
    own = np.arange(first, first + pairs)
    other = (own - shift) % count
    # one copy to the device: captions of each image, and the other pair's cell in the matrix
    index = np.concatenate([np.stack([own, other], 1).ravel(), own * count + other])
    captions, cells = (
        torch.from_numpy(index).to(batch.scores.device, non_blocking=True).split([2 * pairs, pairs])
    )
    matched = ranked_first[first : first + pairs]
    mismatched = (ranked_first > batch.not_mismatched).flatten().index_select(0, cells)
    return batch.images, captions, torch.stack([matched, mismatched], 1)


def _select_from_groups(batch: Observation, shift: int) -> SampledPairs:
    """From images with several captions each: a caption belongs to the row of its first positive.

    Each process counts the captions of its own images.
    """
    images = slice(batch.first_row, batch.first_row + len(batch.images))
    first, last, _ = batch.own_texts.indices(len(batch.texts))
    own = torch.arange(first, last, device=batch.scores.device)
    other = (own - shift) % len(batch.texts)
    own_rows = batch.positives.to(torch.int8).argmax(0)
    own_scores = batch.scores.gather(0, own_rows[None])[0]
    ranked_first = own_scores > _highest_mismatched(batch)  # [T]
    positives = batch.positives[images, first:last]
    rows = positives.to(torch.int8).argmax(0)
    mismatched = (ranked_first > batch.not_mismatched[images])[rows, other]
    counted = torch.stack([ranked_first[first:last], mismatched], 1) & positives.any(0)[:, None]
    return batch.images[rows], torch.stack([own, other], 1).flatten(), counted


def _highest_mismatched(batch: Observation) -> Tensor:
    """The highest score [T] of each caption with an image that is not its own."""
    return batch.scores.masked_fill(batch.not_mismatched, -torch.inf).amax(0)


def moments(
    samples: Tensor, counted: Tensor | None = None, dim: tuple[int, ...] | None = None
) -> Tensor:
    """Number, sum and sum of squares [..., 3] of the ``counted`` samples (None: all).

    Taken over the axes ``dim`` (None: all), in double precision.
    """
    if counted is None:
        counted = torch.ones_like(samples, dtype=torch.bool)
    values, wide = torch.where(counted, samples, 0.0), torch.float64  # a product would keep NaN
    over = tuple(range(samples.ndim)) if dim is None else dim
    squares = torch.linalg.vector_norm(values, dim=over, dtype=wide).square()
    return torch.stack([counted.sum(over, dtype=wide), values.sum(over, dtype=wide), squares], -1)


@torch.no_grad()
def histogram(samples: Tensor, counted: Tensor | None = None) -> Tensor:
    """Counts [kinds, BINS] of the ``counted`` samples [P, kinds, N] (None: all)."""
    kinds = samples.shape[1]
    bins = ((samples.float() + 1) * (BINS / 2)).long().clamp_(0, BINS - 1)
    bins += BINS * torch.arange(kinds, device=samples.device)[:, None]
    ones = torch.ones_like(bins) if counted is None else counted.to(bins.dtype)
    counts = bins.new_zeros(kinds * BINS)
    # bincount would need a host sync
    return counts.scatter_add_(0, bins.flatten(), ones.flatten()).view(kinds, BINS)


def close_histogram(counts: Tensor, boundary: float, alpha: float | None) -> dict[str, Any]:
    """Counts [2, BINS] as plain values without empty bins at the ends; resets the counts.

    ``alpha`` is None when the boundary is μ₊ − 3σ₊. The record is empty without samples.
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
    """Mean and sample standard deviation (n − 1) of samples with these moments."""
    mean = total / number
    return mean, math.sqrt(max(0.0, (squares - number * mean**2) / max(1.0, number - 1)))


def optimal_boundary(
    mean_pos: float, std_pos: float, mean_neg: float, std_neg: float, alpha: float
) -> float | None:
    """The minimum of eq. 3, α·P(mismatched > t) + P(matched < t), on [0, 1].

    It is at a stationary point (eq. 4) or at an end: a root of eq. 4 may be a maximum, lie outside
    [0, 1], or be worse than an end. Similarities are cosines, hence t ≤ 1. If the two weighted
    densities never cross, the minimum is at an end. None if matched similarities are not higher on
    average: eq. 3 then separates nothing, and the caller keeps its boundary.

    >>> round(optimal_boundary(0.6, 0.1, 0.2, 0.1, alpha=1.0), 4)
    0.4
    """
    if mean_pos <= mean_neg:
        return None
    std_pos, std_neg = max(std_pos, SMALLEST_STD), max(std_neg, SMALLEST_STD)
    numbers = (mean_pos, std_pos, mean_neg, std_neg, alpha)
    inside = [t for t in _stationary_points(*numbers) if 0.0 < t < 1.0]
    return min([*inside, 0.0, 1.0], key=lambda t: weighted_error(t, *numbers))


def weighted_error(
    t: float, mean_pos: float, std_pos: float, mean_neg: float, std_neg: float, alpha: float
) -> float:
    """Eq. 3 at a boundary t."""
    mismatched_above = 0.5 * math.erfc((t - mean_neg) / (std_neg * math.sqrt(2)))
    matched_below = 0.5 * math.erfc((mean_pos - t) / (std_pos * math.sqrt(2)))
    return alpha * mismatched_above + matched_below  # eq. 3


def _stationary_points(
    mean_pos: float, std_pos: float, mean_neg: float, std_neg: float, alpha: float
) -> list[float]:
    """The real roots of eq. 4, with α inside the logarithm."""
    beta_1 = std_pos**2 - std_neg**2
    beta_2 = 2 * (mean_pos * std_neg**2 - mean_neg * std_pos**2)
    beta_3 = (std_pos * mean_neg) ** 2 - (std_neg * mean_pos) ** 2
    beta_3 += 2 * (std_pos * std_neg) ** 2 * math.log(std_neg / (alpha * std_pos))
    discriminant = beta_2**2 - 4 * beta_1 * beta_3
    if discriminant < 0:
        return []
    # the stable form of eq. 4: nearly equal deviations make β₁ nearly zero
    q = -(beta_2 + math.copysign(math.sqrt(discriminant), beta_2)) / 2
    return [numerator / divisor for numerator, divisor in ((beta_3, q), (q, beta_1)) if divisor]


def cautious_boundary(mean_pos: float, std_pos: float) -> float:
    """The boundary that α* of eq. 5 leads to: μ₊ − 3σ₊, within [0, 1].

    Few matched words fall below it. It is computed directly, without α*: if
    σ₊(μ₊ − μ₋) < 3(σ₊² − σ₋²), eq. 3 has a maximum at this root of eq. 4 (with α*).

    >>> round(cautious_boundary(0.4, 0.12), 4)
    0.04
    """
    return min(1.0, max(0.0, mean_pos - 3 * std_pos))  # the limit that eq. 5 aims at


class MismatchBoundary(nn.Module):
    """Running estimates of both distributions, and the boundary between them.

    All state is in buffers, so it is saved, resumed and moved with the model. Samples of all
    processes accumulate until there are ``min_samples`` of each kind. The estimates then move
    towards those of the samples by ``momentum``; the first update takes them unchanged. From
    ``adjust_epoch`` on, α* replaces α: the boundary is μ₊ − 3σ₊. Before that, the boundary stays
    unchanged while matched similarities are not higher on average. With ``update_mismatched=False``
    the mismatched estimates stay those of the first update.

    Another buffer is the histogram of all samples of the current epoch (`close_epoch`).

    Samples on a GPU are copied to the host asynchronously and take effect at the next read
    (`flush`), so that no training step needs a host sync.
    """

    mean_pos: Tensor
    std_pos: Tensor
    mean_neg: Tensor
    std_neg: Tensor
    boundary: Tensor
    updates: Tensor
    pending: Tensor
    histogram: Tensor

    def __init__(
        self,
        alpha: float,
        adjust_epoch: int,
        momentum: float,
        min_samples: int,
        update_mismatched: bool = True,
    ) -> None:
        super().__init__()
        self.alpha, self.adjust_epoch = alpha, adjust_epoch
        self.momentum, self.min_samples = momentum, min_samples
        self.update_mismatched = update_mismatched
        for name in (*ESTIMATES, "boundary"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))
        # rows: matched, mismatched; columns: number, sum, sum of squares
        self.register_buffer("pending", torch.zeros(2, 3, dtype=torch.float64))
        self.register_buffer("histogram", torch.zeros(2, BINS, dtype=torch.float64))
        self._host_scalars = HostScalarCache()
        self._pending_copy: PendingCopy | None = None

    @property
    def value(self) -> float:
        """The boundary as a number."""
        return self._numbers()[4]

    @torch.no_grad()
    def observe(self, matched: Tensor, mismatched: Tensor, epoch: int) -> None:
        """Add samples of S⁺ and S⁻: maxima of words over regions of right and wrong images."""
        counts = [histogram(kind.reshape(1, 1, -1)) for kind in (matched, mismatched)]
        self.accumulate(
            torch.stack([moments(matched), moments(mismatched)]), epoch, torch.cat(counts)
        )

    @torch.no_grad()
    def accumulate(self, sums: Tensor, epoch: int, counts: Tensor | None = None) -> None:
        """Add number, sum and sum of squares [2, 3] of matched and of mismatched samples.

        ``counts`` [2, BINS] is their `histogram`.
        """
        self.flush()
        sums = sums.to(self.pending)
        if counts is not None:  # one collective for both
            sums = torch.cat([sums, counts.to(sums)], 1)
        sums = sum_over_processes(sums)
        self.pending += sums[:, :3]
        if counts is not None:
            self.histogram += sums[:, 3:]
        self._pending_copy = PendingCopy.start(self.pending, epoch)
        if self._pending_copy.done is None:
            self.flush()

    @torch.no_grad()
    def flush(self) -> None:
        """Update the estimates and the boundary with the samples added last."""
        copy, self._pending_copy = self._pending_copy, None
        if copy is None:
            return
        samples = copy.wait()
        if min(number for number, _, _ in samples) < max(1, self.min_samples):
            return
        *before, boundary, updates = self._numbers()
        step = self.momentum if updates else 1.0
        now = [part for kind in samples for part in mean_and_std(*kind)]
        after = [old + step * (new - old) if updates else new
                 for old, new in zip(before, now, strict=True)]  # fmt: skip
        if updates and not self.update_mismatched:
            after[2:] = before[2:]
        pos, neg = (after[0], after[1]), (after[2], after[3])
        adjusted = copy.epoch >= self.adjust_epoch
        new = cautious_boundary(*pos) if adjusted else optimal_boundary(*pos, *neg, self.alpha)
        self._write([*after, boundary if new is None else new], updates + 1)

    def _numbers(self) -> list[float]:
        """Estimates, boundary and number of updates."""
        self.flush()
        return self._host_scalars.read(*self._written(), self.updates)

    def _written(self) -> list[Tensor]:
        return [getattr(self, name) for name in (*ESTIMATES, "boundary")]

    def _write(self, numbers: list[float], updates: float) -> None:
        """Write all values at once: on a GPU every single one would be a kernel launch."""
        tensors = self._written()
        torch._foreach_zero_([*tensors, self.pending])
        torch._foreach_add_(tensors, numbers)
        self.updates += 1
        self._host_scalars.store([*numbers, updates], *tensors, self.updates)

    def diagnostics(self) -> dict[str, float]:
        names = (*ESTIMATES, "boundary")
        return {f"mismatch/{k}": x for k, x in zip(names, self._numbers(), strict=False)}

    def close_epoch(self, epoch: int) -> dict[str, Any]:
        """The histogram of the epoch's samples with its boundary; resets the histogram."""
        alpha = None if epoch >= self.adjust_epoch else self.alpha
        return close_histogram(self.histogram, self.value, alpha)

    def _save_to_state_dict(self, *args: Any, **options: Any) -> None:
        self.flush()
        super()._save_to_state_dict(*args, **options)

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        self._pending_copy = None
        super()._load_from_state_dict(*args, **options)

    def __getstate__(self) -> dict[str, Any]:
        self.flush()  # a pending device copy cannot be pickled
        return self.__dict__.copy()
