"""A number over seeds: its mean, its spread, and how far chance may have moved it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from typing_extensions import Self

from counterfoil.evaluation.report import Report

T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantiles of Student's t with 1, 2, … degrees of freedom."""


class Measure(Report):
    """Mean over seeds; ``std`` is the sample standard deviation (n − 1), None for one seed."""

    mean: float
    std: float | None = None
    seeds: int

    @classmethod
    def over(cls, values: Sequence[float]) -> Self:
        """
        >>> Measure.over([1.0, 3.0]).std
        1.4142135623730951
        """
        mean = math.fsum(values) / len(values)
        if len(values) < 2:
            return cls(mean=mean, seeds=len(values))
        spread = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
        return cls(mean=mean, std=math.sqrt(spread), seeds=len(values))

    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean by Student's t; None for one value.

        With more than ten values the quantile is that of ten, which makes it a little wide.

        >>> Measure.over([1.0, 2.0, 3.0]).interval()
        (-0.4843..., 4.4843...)
        """
        if self.std is None:
            return None
        quantile = T_QUANTILES[min(self.seeds - 1, len(T_QUANTILES)) - 1]
        half = quantile * self.std / math.sqrt(self.seeds)
        return self.mean - half, self.mean + half

    def text(self, decimals: int = 1, sign: Literal["+", "-"] = "-") -> str:
        """``mean ± std``; with sign "+", also positive means have a sign."""
        spread = "" if self.std is None else f" ± {self.std:.{decimals}f}"
        return f"{self.mean:{sign}.{decimals}f}{spread}"
