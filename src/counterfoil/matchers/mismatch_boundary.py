"""NAAF's boundary between matched and mismatched similarities (section 3.1.1, eq. 3–5).

Both distributions of similarities are taken as normal. The boundary t minimises
α·P(mismatched > t) + P(matched < t) at first, and is μ₊ − 3σ₊ later in training.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from counterfoil.collectives import sum_over_processes
from counterfoil.matchers.host_scalars import HostScalarCache, PendingCopy
from counterfoil.matchers.mismatches import (
    BINS,
    close_histogram,
    histogram,
    mean_and_std,
    moments,
)

SMALLEST_STD = 1e-4

ESTIMATES = ("mean_pos", "std_pos", "mean_neg", "std_neg")


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
