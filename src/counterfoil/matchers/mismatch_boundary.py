"""NAAF's mismatch mining: similarities of right and wrong pairs, and the boundary between them.

Section 3.1.3: for each caption whose own image scores highest of the batch, every word gives its
highest similarity with that image as matched, and with one other image as mismatched. An ablation
takes its similarities with all regions of that other image.

Section 3.1.1 (eq. 3–5): both distributions are taken as normal. The boundary t minimises
α·P(mismatched > t) + P(matched < t) at first, and is μ₊ − 3σ₊ later in training.
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
"""What a word gives as mismatched: its highest similarity (eq. 14), or all of them."""

Chosen = tuple[Encoded, Tensor, Tensor]
"""Images [P], their own and another caption [2 P] by index, and which pairs [P, 2] count."""

SMALLEST_STD = 1e-4
ESTIMATES = ("mean_pos", "std_pos", "mean_neg", "std_neg")


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
        whole = known_unpadded(texts.mask), known_unpadded(images.mask)
        return cls(sims.unflatten(1, (2, -1)), words, images.mask, whole, counted)

    def samples(self, side: str, mismatched: Mismatched = "max") -> Samples:
        """Highest similarities of the asking side's real fragments; of mismatched ones, or all."""
        words, regions = self.words, self.regions[:, None]
        query_mask, key_mask, axis = (words, regions[:, :, None], -1)
        if side == "i2t":
            query_mask, key_mask, axis = (regions, words[..., None], -2)
        sims = self.sims
        if not self.whole[side == "t2i"]:
            sims = sims.masked_fill(~key_mask, -2.0)
        values = sims.amax(axis)  # eq. 13 in row 0, eq. 14 in row 1
        best = Samples(values, (query_mask & self.counted[..., None]).expand_as(values))
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


def optimal_boundary(
    mean_pos: float, std_pos: float, mean_neg: float, std_neg: float, alpha: float
) -> float | None:
    """Where eq. 3, α·P(mismatched > t) + P(matched < t), is lowest on [0, 1].

    That is the lowest of the stationary points (eq. 4) and of both ends: a root of eq. 4 may be a
    maximum, lie outside, or be no better than an end. Similarities are cosines, hence t ≤ 1; if
    the two weighted densities never cross, an end is lowest. None if matched similarities are not
    the higher ones: eq. 3 then separates nothing, and a caller keeps the boundary it has.

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
    """Both roots of eq. 4, with the α inside the logarithm; fewer if there are fewer."""
    beta_1 = std_pos**2 - std_neg**2
    beta_2 = 2 * (mean_pos * std_neg**2 - mean_neg * std_pos**2)
    beta_3 = (std_pos * mean_neg) ** 2 - (std_neg * mean_pos) ** 2
    beta_3 += 2 * (std_pos * std_neg) ** 2 * math.log(std_neg / (alpha * std_pos))
    discriminant = beta_2**2 - 4 * beta_1 * beta_3
    if discriminant < 0:
        return []
    # eq. 4 by the sum that does not cancel: nearly equal deviations leave a β₁ of nearly zero
    q = -(beta_2 + math.copysign(math.sqrt(discriminant), beta_2)) / 2
    return [above / below for above, below in ((beta_3, q), (q, beta_1)) if below]


def cautious_boundary(mean_pos: float, std_pos: float) -> float:
    """The boundary that α* of eq. 5 is there for: μ₊ − 3σ₊, within [0, 1].

    Few matched words then fall below it. It is taken directly and not by way of α*: if
    σ₊(μ₊ − μ₋) < 3(σ₊² − σ₋²), it is the root of eq. 4 (with α*) at which eq. 3 has a maximum.

    >>> round(cautious_boundary(0.4, 0.12), 4)
    0.04
    """
    return min(1.0, max(0.0, mean_pos - 3 * std_pos))  # the limit that eq. 5 aims at


class MismatchBoundary(nn.Module):
    """Running estimates of both distributions, and the boundary they imply.

    Everything it learns is a buffer: saved, resumed and moved with the model. Samples are collected
    until there are ``min_samples`` of each kind, then the estimates move towards theirs by
    ``momentum`` (the first ones are taken as they are), over all processes alike. From
    ``adjust_epoch`` on, α gives way to α*: the boundary is μ₊ − 3σ₊. Before that, estimates that
    do not have the matched similarities as the higher ones leave the boundary as it is.
    Without ``update_mismatched`` the mismatched estimates stay those of the first update.

    A histogram of all samples of the current epoch is a buffer, too (`close_epoch`).

    Samples from a GPU are copied to the host in the background and take effect at the next read
    (`flush`), so that no training step waits for the device.
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
        """Move the estimates and the boundary by the samples added last."""
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
        """All at once: to a GPU every single number would be a launch."""
        tensors = self._written()
        torch._foreach_zero_([*tensors, self.pending])
        torch._foreach_add_(tensors, numbers)
        self.updates += 1
        self._host_scalars.store([*numbers, updates], *tensors, self.updates)

    def diagnostics(self) -> dict[str, float]:
        names = (*ESTIMATES, "boundary")
        return {f"mismatch/{k}": x for k, x in zip(names, self._numbers(), strict=False)}

    def close_epoch(self, epoch: int) -> dict[str, Any]:
        """The histogram of the epoch's samples with its boundary; the next epoch starts anew."""
        alpha = None if epoch >= self.adjust_epoch else self.alpha
        return close_histogram(self.histogram, self.value, alpha)

    def _save_to_state_dict(self, *args: Any, **options: Any) -> None:
        self.flush()
        super()._save_to_state_dict(*args, **options)

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        self._pending_copy = None
        super()._load_from_state_dict(*args, **options)

    def __getstate__(self) -> dict[str, Any]:
        self.flush()  # what a GPU is still sending cannot be copied
        return self.__dict__.copy()
