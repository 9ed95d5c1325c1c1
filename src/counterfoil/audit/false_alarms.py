"""Thresholds with a known rate of false alarms, by split conformal prediction on trusted captions.

If a caption is right and comes from the same source as the trusted ones, its suspicion exceeds the
threshold with a chance of about the given rate. Suspicion is compared with what is usual in the
trusted split, also in the audited one: its own scales would differ by chance, and because of its
errors. Both splits must be alike in size and in the share of captions examined, because rival
images and the usual effects of words are those of the split. The same holds for words. With n
trusted items, the threshold is their ⌈(n + 1)(1 − rate)⌉-th smallest value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from pydantic import TypeAdapter, ValidationError

from counterfoil.audit.findings import Summary
from counterfoil.audit.sign_weights import SignWeights
from counterfoil.audit.suspicion import Scales
from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.printable import plural
from counterfoil.data.pairs import Split
from counterfoil.evaluation.ranks import Values
from counterfoil.evaluation.words.doubts import NO_DOUBT, may_be_wrong

WORD_RATE = 0.05
"""Rate of false alarms of words without trusted captions; their reference is the audited split."""

MIN_TRUSTED = 100
"""Trusted captions below which a rate says little: with n, it is off by about 1 / √n."""


ALIKE_IN_SIZE = 1.5
"""How many times the images of one split the other may have, to be about as large."""


class Audited(Protocol):
    """The parts of an `Audit` that thresholds are measured on."""

    @property
    def split(self) -> Split: ...

    @property
    def summary(self) -> Summary: ...

    @property
    def suspicion(self) -> Values: ...

    @property
    def scales(self) -> Scales: ...

    @property
    def word_doubts(self) -> dict[int, Values]: ...

    @property
    def reference(self) -> list[int]: ...

    @property
    def surprise(self) -> bool: ...

    @property
    def weights(self) -> SignWeights | None: ...


@dataclass(frozen=True)
class FalseAlarms:
    """Thresholds for captions and words, measured on the trusted captions of a split.

    ``images``: how many the trusted captions were compared with.
    ``scales``: what suspicion was compared with, and is to be compared with in other splits.
    ``surprise``: whether the doubts about trusted words include the surprise of a language model.
    """

    rate: float
    split: str
    images: int
    captions: int
    words: int
    caption_threshold: float
    word_threshold: float
    surprise: bool
    scales: Scales

    def as_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FalseAlarms:
        """The inverse of `as_dict`; thresholds by other weights than those of now are refused."""
        try:
            read = TypeAdapter(FalseAlarms).validate_python(values)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"]) or "top level"
            raise DataError(
                f"stored false alarms: {key}: {first['msg']}; expected what FalseAlarms.as_dict "
                "returned, which is `false_alarms` in an audit's summary.json"
            ) from None
        read.scales.check_weights()
        return read

    def notes(self, images: int, surprise: bool) -> list[str]:
        """Lines for the reader of a report on ``images`` images, with or without ``surprise``."""
        lines = [self._thresholds()]
        if max(images, self.images) >= ALIKE_IN_SIZE * min(images, self.images):
            other, rate = ("fewer", "above") if self.images < images else ("more", "below")
            lines.append(
                f"the trusted split '{self.split}' has {other} images ({self.images} and "
                f"{images}); among more images, another one fits better more often, so the rate "
                f"of false alarms is probably {rate} {100 * self.rate:g} %; use splits alike in "
                "size"
            )
        if not self.surprise:
            lines.append(
                f"the trusted split '{self.split}' has too few captions for a language model, so "
                "words are judged without one"
            )
        elif not surprise:
            lines.append(
                "the threshold for words was measured with a language model, for which this split "
                "has too few captions: fewer wrong words are named than the rate allows"
            )
        return lines

    def _thresholds(self) -> str:
        return (
            f"thresholds for {100 * self.rate:g} % false alarms, from {self.captions} captions and "
            f"{self.words} words of the trusted split '{self.split}': suspicion above "
            f"{self.caption_threshold:.3f}, doubt about a word above {self.word_threshold:.2f}"
        )


def conformal_threshold(clean: Values, rate: float) -> float:
    """The threshold that a new clean value exceeds with a chance of at most ``rate``.

    Infinite if there are too few values for that rate.

    >>> conformal_threshold(np.arange(1.0, 100.0), 0.05)
    95.0
    """
    if not 0.0 < rate < 1.0:
        raise ConfigError(f"false alarms: expected a rate between 0 and 1, got {rate}")
    rank = math.ceil(round((len(clean) + 1) * (1.0 - rate), 9))
    return float(np.sort(clean)[rank - 1]) if rank <= len(clean) else math.inf


def word_pool(doubts: Mapping[int, Values], captions: Sequence[int]) -> Values:
    """Doubts about the words of captions that may be wrong at all."""
    every = np.concatenate([*(doubts[number] for number in captions), np.empty(0)])
    return every[every > NO_DOUBT]


def calibrate(trusted: Audited, rate: float) -> FalseAlarms:
    """Thresholds from the audit of a split whose captions are all right."""
    if trusted.weights is not None and trusted.weights.learned:
        raise ConfigError(
            f"false alarms: the audit of split '{trusted.split.name}' has weights learned from "
            "checked captions; audit it without them"
        )
    suspicion = trusted.suspicion[~np.isnan(trusted.suspicion)]
    words = word_pool(trusted.word_doubts, trusted.reference)
    _refuse_few(trusted.split.name, len(suspicion), len(words), rate)
    return FalseAlarms(
        rate=rate,
        split=trusted.split.name,
        images=trusted.summary.images,
        captions=len(suspicion),
        words=len(words),
        caption_threshold=conformal_threshold(suspicion, rate),
        word_threshold=conformal_threshold(words, rate),
        surprise=trusted.surprise,
        scales=trusted.scales,
    )


def check_trusted(split: Split, rate: float) -> None:
    """Refuse a split with too few captions for `calibrate`, before anything is scored.

    Captions that cannot be scored and words that the model does not know count here, too.
    """
    words = sum(int(may_be_wrong(text).sum()) for text in split.texts)
    _refuse_few(split.name, len(split.texts), words, rate)


def _refuse_few(name: str, captions: int, words: int, rate: float) -> None:
    needed = max(MIN_TRUSTED, math.ceil(1.0 / max(rate, 1e-9)))
    if min(captions, words) < needed:
        raise DataError(
            f"split '{name}': {plural(captions, 'trusted caption')} with {plural(words, 'word')} "
            f"{'is' if captions == 1 else 'are'} too few for "
            f"{100 * rate:g} % false alarms; give at least {needed} of both"
        )


@dataclass(frozen=True)
class AlarmRates:
    """Shares of right captions and words that are listed at a nominal rate."""

    nominal: float
    captions: float
    words: float


def alarm_curve(trusted: Audited, clean: Audited, rates: Sequence[float]) -> list[AlarmRates]:
    """Actual rates on another split whose captions are all right, for several nominal ones.

    ``clean`` is audited with thresholds from ``trusted``, of any rate, so that both have the same
    scales.
    """
    if trusted.surprise != clean.surprise:
        few = clean if trusted.surprise else trusted
        raise DataError(
            f"split '{few.split.name}' has too few captions for a language model and the other one "
            "has enough, so that doubts about their words cannot be compared; use splits alike in "
            "size"
        )
    if trusted.scales != clean.scales:
        raise DataError(
            f"split '{clean.split.name}' was not compared with what is usual in "
            f"'{trusted.split.name}'; audit it with false_alarms=calibrate(trusted, rate)"
        )
    suspicion = clean.suspicion[~np.isnan(clean.suspicion)]
    words = word_pool(clean.word_doubts, clean.reference)
    curve = []
    for rate in rates:
        limits = calibrate(trusted, rate)
        listed = float((suspicion > limits.caption_threshold).mean())
        named = float((words > limits.word_threshold).mean()) if len(words) else math.nan
        curve.append(AlarmRates(rate, listed, named))
    return curve
