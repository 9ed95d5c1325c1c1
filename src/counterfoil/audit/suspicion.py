"""How suspicious a caption is: three signs, each measured against what is usual in its split.

A sign is turned into a number z of robust standard deviations from the median of the split's
captions, z into evidence 1 / (1 + exp(c − z)), which is a half at c deviations, and the evidence of
all signs into one number, 1 − Π (1 − evidence): each sign alone can make a caption suspicious, and
weak signs add up. Nothing is learned, and a split without errors has few captions far from its
median, so that the share of suspicious ones means something.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

CENTRE, RIVAL_CENTRE = 3.0, 4.0
"""The deviations c. Where images are alike, another one is often ahead of the right one: that sign
asks for one deviation more. Chosen on the dev split of the scenes."""

NAMED = 0.2
"""Evidence from which a sign is named: with three signs, suspicion 0.5 has at least one such."""

SUSPICIOUS = 0.5
"""Suspicion from which a caption counts as suspicious in a summary, whatever is listed."""

SIGNS = ("low-score", "other-image", "wrong-words")
TO_NORMAL = 1.4826
"""Median absolute deviations to standard deviations, where values are normal."""


@dataclass(frozen=True)
class Scale:
    """The median of some values and their robust deviation."""

    middle: float
    spread: float

    @classmethod
    def of(cls, values: Values) -> Scale:
        """Of at least one finite value; where most are equal, the standard deviation stands in."""
        middle = float(np.median(values))
        spread = TO_NORMAL * float(np.median(np.abs(values - middle)))
        return cls(middle, spread or float(np.std(values)))

    def z(self, values: Values) -> Values:
        """Deviations from the middle; 0 everywhere where nothing varies."""
        return (values - self.middle) / self.spread if self.spread else np.zeros_like(values)


def evidence(z: Values, centre: float = CENTRE) -> Values:
    """0 for what is usual, a half at ``centre`` deviations, towards 1 beyond."""
    return np.asarray(1.0 / (1.0 + np.exp(np.clip(centre - z, -50.0, 700.0))))


def combine(signs: Values) -> Values:
    """Suspicion [n] from evidence [n, signs]."""
    return np.asarray(1.0 - np.prod(1.0 - signs, axis=1))


def named_signs(signs: Values) -> list[int]:
    """Places in `SIGNS` of the reasons for suspecting one caption, the strongest first.

    Those with enough evidence to be named; if there are none, the strongest.
    """
    named = [int(k) for k in np.argsort(-signs, kind="stable") if signs[k] >= NAMED]
    return named or [int(signs.argmax())]
