"""Axes of charts: round ticks, their labels, and where a value lies on the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """Values from ``low`` to ``high`` drawn between the page coordinates ``start`` and ``end``."""

    low: float
    high: float
    start: float
    end: float
    ticks: Sequence[float]

    @classmethod
    def over(
        cls, values: Iterable[float], start: float, end: float, count: int, *, snug: bool = False
    ) -> Axis:
        """An axis that holds ``values``; a snug one ends where they do, not at the next tick."""
        known = list(values)
        low, high = min(known), max(known)
        ticks = nice_ticks(low, high, count)
        if snug and not _constant(low, high):
            inside = [tick for tick in ticks if low <= tick <= high]
            return cls(low, high, start, end, inside)
        return cls(ticks[0], ticks[-1], start, end, ticks)

    def at(self, value: float) -> float:
        """The page coordinate of ``value``."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def nice_ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """About ``count`` round values that enclose ``low`` to ``high``.

    >>> nice_ticks(0.3, 9.2, 5)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    if _constant(low, high):
        reach = abs(low) * 0.1 or 1.0
        low, high = low - (0.0 if whole else reach), high + reach
    rough = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999), power * 10)
    if whole:
        step = max(1.0, float(round(step)))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def tick_text(value: float, ticks: Sequence[float] = ()) -> str:
    """A short label, with as many decimals as tell neighbouring ticks apart.

    >>> tick_text(0.30000000000000004, [0.1, 0.2]), tick_text(25000.0), tick_text(2.0e-7)
    ('0.3', '25,000', '2e-07')
    """
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-4:
        return f"{value:.3g}"
    if len(ticks) > 1:
        decimals = max(0, -math.floor(math.log10(abs(ticks[1] - ticks[0])) + 1e-9))
        text = f"{value:,.{min(decimals + 1, 8)}f}"
    else:
        text = f"{value:,.4f}" if abs(value) < 100 else f"{value:,.1f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _constant(low: float, high: float) -> bool:
    """Whether two values are too close for round ticks between them."""
    return high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-280)
