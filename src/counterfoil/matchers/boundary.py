"""NAAF's boundary between matched and mismatched similarities (section 3.1.1, eq. 1–5).

Both distributions of similarities are taken as normal. The boundary t minimises
α·P(mismatched > t) + P(matched < t) at first, and is μ₊ − 3σ₊ later in training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from counterfoil.collectives import sum_over_processes

SMALLEST_STD = 1e-4

ESTIMATES = ("mean_pos", "std_pos", "mean_neg", "std_neg")

BINS = 400
"""Bins of the histograms of similarities, from −1 to 1. Cosines beyond are rounding errors."""


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
    return alpha * mismatched_above + matched_below


def _stationary_points(
    mean_pos: float, std_pos: float, mean_neg: float, std_neg: float, alpha: float
) -> list[float]:
    """Both roots of eq. 4, with the α inside the logarithm; fewer if there are fewer."""
    b1 = std_pos**2 - std_neg**2
    b2 = 2 * (mean_pos * std_neg**2 - mean_neg * std_pos**2)
    b3 = (std_pos * mean_neg) ** 2 - (std_neg * mean_pos) ** 2
    b3 += 2 * (std_pos * std_neg) ** 2 * math.log(std_neg / (alpha * std_pos))
    discriminant = b2**2 - 4 * b1 * b3
    if discriminant < 0:
        return []
    # the sum that does not cancel: deviations that are nearly equal leave a b1 of nearly zero
    q = -(b2 + math.copysign(math.sqrt(discriminant), b2)) / 2
    return [above / below for above, below in ((b3, q), (q, b1)) if below]


def cautious_boundary(mean_pos: float, std_pos: float) -> float:
    """The boundary that α* of eq. 5 is there for: μ₊ − 3σ₊, within [0, 1].

    Few matched words then fall below it. It is taken directly and not by way of α*: where
    σ₊(μ₊ − μ₋) < 3(σ₊² − σ₋²), it is the root of eq. 4 (with α*) at which eq. 3 has a maximum.

    >>> round(cautious_boundary(0.4, 0.12), 4)
    0.04
    """
    return min(1.0, max(0.0, mean_pos - 3 * std_pos))


class Known:
    """Numbers that tensors hold, as the host knows them; read again where a tensor was changed."""

    def __init__(self) -> None:
        self._tensors: tuple[Tensor, ...] = ()
        self._versions: list[int] = []
        self._numbers: list[float] = []

    def __getstate__(self) -> dict[str, Any]:
        """A copy knows nothing: its tensors count their changes anew."""
        return vars(Known())

    def read(self, *tensors: Tensor) -> list[float]:
        """What single-number tensors say; from a GPU it is read once, not once a batch."""
        if any(tensor.is_inference() for tensor in tensors):  # these do not tell of changes
            return [float(tensor) for tensor in tensors]
        same = len(tensors) == len(self._tensors) and all(
            new is old for new, old in zip(tensors, self._tensors, strict=True)
        )
        if not same or [tensor._version for tensor in tensors] != self._versions:
            self.remember(torch.stack([tensor.double() for tensor in tensors]).tolist(), *tensors)
        return self._numbers

    def remember(self, numbers: list[float], *tensors: Tensor) -> None:
        """What tensors say now, by the one who wrote it there."""
        if not any(tensor.is_inference() for tensor in tensors):
            self._tensors, self._numbers = tensors, numbers
            self._versions = [tensor._version for tensor in tensors]


@dataclass(frozen=True)
class _OnItsWay:
    """Moments of the samples pending after a batch of some epoch, on their way to the host."""

    moments: Tensor
    arrived: torch.cuda.Event | None
    epoch: int

    @classmethod
    def send(cls, pending: Tensor, epoch: int) -> _OnItsWay:
        if not pending.is_cuda:
            return cls(pending.clone(), None, epoch)
        here = pending.to("cpu", non_blocking=True)
        return cls(here, torch.cuda.current_stream(pending.device).record_event(), epoch)

    def wait(self) -> list[list[float]]:
        if self.arrived is not None:
            self.arrived.synchronize()
        found: list[list[float]] = self.moments.tolist()
        return found


class MismatchBoundary(nn.Module):
    """Running estimates of both distributions, and the boundary they imply.

    Everything it learns is a buffer: saved, resumed and moved with the model. Samples are collected
    until there are ``min_samples`` of each kind, then the estimates move towards theirs by
    ``momentum`` (the first ones are taken as they are), over all processes alike. From
    ``adjust_epoch`` on, α gives way to α*: the boundary is μ₊ − 3σ₊. Before that, estimates that
    do not have the matched similarities as the higher ones leave the boundary as it is.
    Without ``update_mismatched`` the mismatched estimates stay those of the first update.

    A histogram of all samples of the current epoch is a buffer, too (`close_epoch`).

    Samples of a GPU count from the moment somebody asks for what they imply (`settle`): until then
    it has sent them, and nobody has to wait for it in the middle of a step.
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
        self._known = Known()
        self._coming: _OnItsWay | None = None

    @property
    def value(self) -> float:
        """The boundary as a number."""
        return self._numbers()[4]

    @torch.no_grad()
    def observe(self, matched: Tensor, mismatched: Tensor, epoch: int) -> None:
        """Take in maxima of words over the regions of right and of wrong images (eq. 13, 14)."""
        counts = [histogram(kind.reshape(1, 1, -1)) for kind in (matched, mismatched)]
        self.take(torch.stack([moments(matched), moments(mismatched)]), epoch, torch.cat(counts))

    @torch.no_grad()
    def take(self, sums: Tensor, epoch: int, counts: Tensor | None = None) -> None:
        """Take in number, sum and sum of squares [2, 3] of matched and of mismatched samples.

        ``counts`` [2, BINS] is their `histogram`.
        """
        self.settle()
        sums = sums.to(self.pending)
        if counts is not None:  # one collective for both
            sums = torch.cat([sums, counts.to(sums)], 1)
        sums = sum_over_processes(sums)
        self.pending += sums[:, :3]
        if counts is not None:
            self.histogram += sums[:, 3:]
        self._coming = _OnItsWay.send(self.pending, epoch)
        if self._coming.arrived is None:
            self.settle()

    @torch.no_grad()
    def settle(self) -> None:
        """Move the estimates and the boundary by what was taken in last."""
        coming, self._coming = self._coming, None
        if coming is None:
            return
        samples = coming.wait()
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
        adjusted = coming.epoch >= self.adjust_epoch
        new = cautious_boundary(*pos) if adjusted else optimal_boundary(*pos, *neg, self.alpha)
        self._write([*after, boundary if new is None else new], updates + 1)

    def _numbers(self) -> list[float]:
        """Estimates, boundary and number of updates."""
        self.settle()
        return self._known.read(*self._written(), self.updates)

    def _written(self) -> list[Tensor]:
        return [getattr(self, name) for name in (*ESTIMATES, "boundary")]

    def _write(self, numbers: list[float], updates: float) -> None:
        """All at once: to a GPU every single number would be a launch."""
        tensors = self._written()
        torch._foreach_zero_([*tensors, self.pending])
        torch._foreach_add_(tensors, numbers)
        self.updates += 1
        self._known.remember([*numbers, updates], *tensors, self.updates)

    def diagnostics(self) -> dict[str, float]:
        names = (*ESTIMATES, "boundary")
        return {f"mismatch/{k}": x for k, x in zip(names, self._numbers(), strict=False)}

    def close_epoch(self, epoch: int) -> dict[str, Any]:
        """The histogram of the epoch's samples with its boundary; the next epoch starts anew."""
        alpha = None if epoch >= self.adjust_epoch else self.alpha
        return close_histogram(self.histogram, self.value, alpha)

    def _save_to_state_dict(self, *args: Any, **options: Any) -> None:
        self.settle()
        super()._save_to_state_dict(*args, **options)

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        self._coming = None
        super()._load_from_state_dict(*args, **options)

    def __getstate__(self) -> dict[str, Any]:
        self.settle()  # what a GPU is still sending cannot be copied
        return self.__dict__.copy()


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
