"""`CorrectionRule`: when a model replaces a word of a caption; thresholds chosen on dev."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from counterfoil.core.errors import ConfigError

MAX_CANDIDATES = 100
"""Limit of replacements tried per word; each needs a score."""


@dataclass(frozen=True)
class CorrectionRule:
    """A word is replaced if it is likely wrong (``threshold``) and the score rises by ``margin``.

    Only the ``candidates`` likeliest replacements are tried. ``precision`` is the share of the
    ``made`` changes on dev that were right; both are None if the rule was not chosen on dev. A rule
    that is not ``usable`` allows no change: too many changes on dev were wrong, or none was made.
    """

    threshold: float = 0.5
    margin: float = 0.0
    candidates: int = 5
    usable: bool = True
    precision: float | None = None
    made: int | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.threshold) or not 0 <= self.threshold <= 1:
            raise ConfigError(f"correct: the threshold must be 0 to 1, got {self.threshold!r:.40}")
        if not _is_number(self.margin) or self.margin < 0:
            raise ConfigError(f"correct: the margin must be 0 or more, got {self.margin!r:.40}")
        if type(self.candidates) is not int or not 1 <= self.candidates <= MAX_CANDIDATES:
            raise ConfigError(
                f"correct: expected at least 1 candidate and at most {MAX_CANDIDATES}, got "
                f"{self.candidates!r:.40}"
            )
        if not isinstance(self.usable, bool):
            raise ConfigError(f"correct: usable must be true or false, got {self.usable!r:.40}")
        if self.precision is not None and not (
            _is_number(self.precision) and 0 <= self.precision <= 1
        ):
            raise ConfigError(f"correct: the precision must be 0 to 1, got {self.precision!r:.40}")
        if self.made is not None and (type(self.made) is not int or self.made < 0):
            raise ConfigError(f"correct: made must be a count of changes, got {self.made!r:.40}")

    def allows(self, gain: float) -> bool:
        """Whether to make a change that raises the score by ``gain``."""
        return self.usable and gain > self.margin

    def obstacle(self) -> str:
        """Why no change is allowed; empty if the rule is usable."""
        if self.usable:
            return ""
        if self.made is None:
            return "no margin could be chosen on dev"
        return "on dev, no margin made enough of this model's changes right"


def _is_number(value: Any) -> bool:
    """Whether a value is a finite number (and no integer beyond the range of floats)."""
    return isinstance(value, int | float) and type(value) is not bool and abs(value) < 1e300


@dataclass(frozen=True)
class Proposal:
    """A word that may be wrong, by its index in the caption, and its replacement candidates.

    ``gains`` are the changes of the matching score, one per candidate.
    """

    position: int
    word: str
    wrong: float
    candidates: tuple[str, ...]
    gains: tuple[float, ...]

    def first_allowed(self, rule: CorrectionRule) -> int | None:
        """Index of the likeliest candidate that a rule allows, if any."""
        gains = self.gains[: rule.candidates]
        return next((at for at, gain in enumerate(gains) if rule.allows(gain)), None)


def choose_change(proposals: Sequence[Proposal], rule: CorrectionRule) -> tuple[int, int] | None:
    """Indices of the next change: the likeliest wrong word with an allowed candidate, if any."""
    for number in sorted(range(len(proposals)), key=lambda at: -proposals[at].wrong):
        if proposals[number].wrong >= rule.threshold:
            candidate = proposals[number].first_allowed(rule)
            if candidate is not None:
                return number, candidate
    return None
