"""NAAF's boundary between matched and mismatched similarities (section 3.1.1, eq. 1–5).

Both distributions of similarities are taken as normal. The boundary t minimises
α·P(mismatched > t) + P(matched < t); it is a root of a quadratic in t.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from counterfoil.collectives import sum_over_processes

SMALLEST_STD = 1e-4

ESTIMATES = ("mean_pos", "std_pos", "mean_neg", "std_neg")


def optimal_boundary(
    mean_pos: float, std_pos: float, mean_neg: float, std_neg: float, alpha: float
) -> float | None:
    """Eq. 4 with the α inside the logarithm; None where it has no answer.

    At the root taken, the derivative of eq. 3 crosses zero upwards, for either sign of β1. Defined
    besides: equal deviations make the equation linear; where matched similarities are not the
    higher ones, or the two weighted densities never cross, there is no boundary to speak of.

    >>> round(optimal_boundary(0.6, 0.1, 0.2, 0.1, alpha=1.0), 4)
    0.4
    """
    if mean_pos <= mean_neg:
        return None
    std_pos, std_neg = max(std_pos, SMALLEST_STD), max(std_neg, SMALLEST_STD)
    b1 = std_pos**2 - std_neg**2
    b2 = 2 * (mean_pos * std_neg**2 - mean_neg * std_pos**2)
    b3 = (std_pos * mean_neg) ** 2 - (std_neg * mean_pos) ** 2
    b3 += 2 * (std_pos * std_neg) ** 2 * math.log(std_neg / (alpha * std_pos))
    if abs(b1) < 1e-6 * (std_pos**2 + std_neg**2):
        return min(1.0, max(0.0, -b3 / b2))
    inside = b2**2 - 4 * b1 * b3
    if inside < 0:
        return None
    return min(1.0, max(0.0, (-b2 + math.sqrt(inside)) / (2 * b1)))


def cautious_alpha(mean_pos: float, std_pos: float, mean_neg: float, std_neg: float) -> float:
    """α* of eq. 5 in closed form: with it, eq. 4 lands on μ₊ − 3σ₊.

    Few matched words then fall below the boundary. The exponent is capped, as distributions far
    apart would overflow it.
    """
    std_pos, std_neg = max(std_pos, SMALLEST_STD), max(std_neg, SMALLEST_STD)
    exponent = (mean_pos - 3 * std_pos - mean_neg) ** 2 / (2 * std_neg**2) - 4.5
    return std_neg / std_pos * math.exp(min(exponent, 700.0))


@dataclass(frozen=True)
class _Known:
    """What a tensor was at some version of it."""

    tensor: Tensor
    version: int
    value: float

    def holds(self, tensor: Tensor) -> bool:
        return tensor is self.tensor and tensor._version == self.version


class MismatchBoundary(nn.Module):
    """Running estimates of both distributions, and the boundary they imply.

    Everything it learns is a buffer: saved, resumed and moved with the model. Samples are collected
    until there are ``min_samples`` of each kind, then the estimates move towards theirs by
    ``momentum`` (the first ones are taken as they are), over all processes alike. From
    ``adjust_epoch`` on, α gives way to α*.
    """

    mean_pos: Tensor
    std_pos: Tensor
    mean_neg: Tensor
    std_neg: Tensor
    boundary: Tensor
    updates: Tensor
    pending: Tensor

    def __init__(self, alpha: float, adjust_epoch: int, momentum: float, min_samples: int) -> None:
        super().__init__()
        self.alpha, self.adjust_epoch = alpha, adjust_epoch
        self.momentum, self.min_samples = momentum, min_samples
        for name in (*ESTIMATES, "boundary"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))
        # rows: matched, mismatched; columns: number, sum, sum of squares
        self.register_buffer("pending", torch.zeros(2, 3, dtype=torch.float64))
        self._known: _Known | None = None

    @property
    def value(self) -> float:
        """The boundary as a number; from a GPU it is read once, not once a batch."""
        boundary = self.boundary
        if not boundary.is_cuda or boundary.is_inference():
            return float(boundary)
        known = self._known
        if known is None or not known.holds(boundary):
            known = self._known = _Known(boundary, boundary._version, float(boundary))
        return known.value

    @torch.no_grad()
    def observe(self, matched: Tensor, mismatched: Tensor, epoch: int) -> None:
        """Take in maxima of words over the regions of right and of wrong images (eq. 13, 14)."""
        self.take(torch.stack([moments(matched), moments(mismatched)]), epoch)

    @torch.no_grad()
    def take(self, sums: Tensor, epoch: int) -> None:
        """Take in number, sum and sum of squares [2, 3] of matched and of mismatched maxima."""
        self.pending += sum_over_processes(sums.to(self.pending))
        held = [getattr(self, name) for name in ESTIMATES]
        # the one time the host waits
        known = torch.cat([self.pending.flatten(), torch.stack(held), self.updates[None]]).tolist()
        samples, before, updates = (known[:3], known[3:6]), known[6:10], known[10]
        if min(number for number, _, _ in samples) < max(1, self.min_samples):
            return
        step = self.momentum if updates else 1.0
        now = [part for kind in samples for part in mean_and_std(*kind)]
        after = [old + step * (new - old) if updates else new
                 for old, new in zip(before, now, strict=True)]  # fmt: skip
        for tensor, estimate in zip(held, after, strict=True):
            tensor.fill_(estimate)
        self.updates += 1
        self.pending.zero_()
        pos, neg = (after[0], after[1]), (after[2], after[3])
        alpha = cautious_alpha(*pos, *neg) if epoch >= self.adjust_epoch else self.alpha
        found = optimal_boundary(*pos, *neg, alpha)
        if found is not None:  # else the boundary stays where it was
            self.boundary.fill_(found)
            if self.boundary.is_cuda:
                self._known = _Known(self.boundary, self.boundary._version, found)

    def diagnostics(self) -> dict[str, float]:
        return {f"mismatch/{name}": float(getattr(self, name)) for name in (*ESTIMATES, "boundary")}


def moments(samples: Tensor, counted: Tensor | None = None) -> Tensor:
    """Number, sum and sum of squares [3] of samples, or of those that are ``counted``."""
    wide = samples.double()
    if counted is None:
        return torch.stack([wide.new_tensor(float(wide.numel())), wide.sum(), wide.square().sum()])
    wide = wide.masked_fill(~counted, 0.0)  # not a product: 0 · NaN would count
    return torch.stack([counted.sum().to(wide), wide.sum(), wide.square().sum()])


def mean_and_std(number: float, total: float, squares: float) -> tuple[float, float]:
    """Of samples with these moments; the deviation is that of n - 1."""
    mean = total / number
    return mean, math.sqrt(max(0.0, (squares - number * mean**2) / max(1.0, number - 1)))
