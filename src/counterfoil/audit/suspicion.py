"""Suspicion of a caption from its signs, each relative to what is usual in its split.

A sign becomes z, its robust standard deviations from the median of the split's captions. The
weighted sum of these, in deviations of the usual captions, becomes suspicion 1 / (1 + exp(c − z)),
which is 0.5 at c deviations. The same formula for each sign alone gives its evidence, which names
reasons. Nothing is learned; the few constants were chosen on dev splits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from counterfoil.core.errors import DataError
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.batches.collate import pad_fragments
from counterfoil.data.pairs import Split
from counterfoil.data.text.tokenizers import KnownText, require_known
from counterfoil.data.text.words import caption_words
from counterfoil.models.model import Model
from counterfoil.models.word_effects import mean_effects, naming_method, word_effects

Values = NDArray[np.float64]

CENTER, WHOLE_CENTER = 3.0, 3.5
CENTERS = {"other-image": 4.0, "other-caption": 4.0}
"""The deviations c of a sign and of their sum. Another image or caption often scores higher if some
are similar, so these signs need one deviation more. Chosen on the dev split of the scenes."""

MIN_NAMED_EVIDENCE = 0.2
"""Evidence from which a sign is named as a reason."""

SIGNS = ("low-score", "other-image", "other-caption", "neighbors", "wrong-words")
"""Signs that are named as reasons."""

WORDS = SIGNS.index("wrong-words")

MEASURED_SIGNS = (*SIGNS, "neighbor-sum")
"""What every audit measures; ``neighbor-sum`` is a second measure of what ``neighbors`` names."""

WEIGHTS = {
    "low-score": 0.0,
    "other-image": 0.2,
    "other-caption": 0.8,
    "neighbors": 0.6,
    "wrong-words": 0.5,
    "neighbor-sum": 0.5,
}
"""Weights of the deviations, chosen together on drawn dev scenes (scenes-naaf) and on the dev split
of Flickr8k (photos-vse, photos-naaf), with noise of other seeds than in any table. Both leads
contain the score, so it has none of its own."""

TO_NORMAL = 1.4826
"""Standard deviation of a normal distribution in median absolute deviations."""

EFFECT_BATCH = 32
"""Captions whose words are measured together."""


@dataclass(frozen=True)
class Scale:
    """The median and the robust deviation of values."""

    median: float
    spread: float

    @classmethod
    def of(cls, values: Values) -> Scale:
        """From at least one finite value; uses the standard deviation if most are equal."""
        median = float(np.median(values))
        spread = TO_NORMAL * float(np.median(np.abs(values - median)))
        return cls(median, spread or float(np.std(values)))

    @classmethod
    def of_usual(cls, values: Values) -> Scale:
        """Of the usual values, if many others are larger: up to nearly half of them.

        The center is the median of the shortest half, the deviation that of the values below it.
        """
        ranked = np.sort(values)
        half = (len(ranked) + 1) // 2
        first = int(np.argmin(ranked[half - 1 :] - ranked[: len(ranked) - half + 1]))
        center = float(np.median(ranked[first : first + half]))
        below = center - ranked[ranked < center]
        spread = TO_NORMAL * float(np.median(below)) if len(below) else 0.0
        return cls(center, spread) if spread else cls.of(values)

    def z(self, values: Values) -> Values:
        """Deviations from the median; 0 if all values are equal."""
        return (values - self.median) / self.spread if self.spread else np.zeros_like(values)


@dataclass(frozen=True)
class Scales:
    """What is usual in a split: the scale of each sign, and of a caption's doubt, their sum.

    Suspicion by the scales of another split can be compared with that split's suspicion. A sign
    without any value has no scale, but it has a weight: ``weights`` are those of all signs that
    were measured, whose sum is the doubt. Scales without weights were stored by an earlier version.
    """

    signs: dict[str, Scale]
    doubt: Scale
    weights: Mapping[str, float] | None = None

    def check_weights(self) -> None:
        """Refuse scales that were measured with other signs or weights than those of now."""
        if self.weights == WEIGHTS:
            return
        again = (
            "doubts by other weights cannot be compared; measure scales and thresholds on the "
            "trusted split again: calibrate(audit_split(model, trusted), rate)"
        )
        if self.weights is None:
            raise DataError(
                "scales of signs: no weights are stored with them, so an earlier version measured "
                f"them, with scales of {', '.join(self.signs)}; expected the weights "
                f"{_listed(WEIGHTS)}; {again}"
            )
        raise DataError(
            f"scales of signs: measured with the weights {_listed(self.weights)}; expected "
            f"{_listed(WEIGHTS)}; {again}"
        )

    def suspicion(self, values: Values) -> Values:
        """Suspicion [n] from the values [n, signs] of captions."""
        self.check_weights()
        return combine(sign_deviations(values, self.signs), self.doubt)


def _listed(weights: Mapping[str, float]) -> str:
    return ", ".join(f"{sign} {weight:g}" for sign, weight in weights.items())


def deviations_of(values: Values, scale: Scale | None = None) -> Values:
    """Deviations by ``scale``, or else by the values' own; NaN stays, and does not count."""
    known = ~np.isnan(values)
    z = np.full(len(values), np.nan)
    if known.any():
        z[known] = (scale or Scale.of(values[known])).z(values[known])
    return z


def sign_scales(values: Values) -> dict[str, Scale]:
    """The scale of each sign that has a value, from the values [n, signs] of captions."""
    known = ~np.isnan(values)
    return {
        sign: Scale.of(values[known[:, k], k])
        for k, sign in enumerate(MEASURED_SIGNS)
        if known[:, k].any()
    }


def sign_deviations(values: Values, scales: Mapping[str, Scale]) -> Values:
    """Deviations [n, signs] of values; NaN for a sign without a scale."""
    deviations = np.full(values.shape, np.nan)
    for sign, scale in scales.items():
        k = MEASURED_SIGNS.index(sign)
        deviations[:, k] = deviations_of(values[:, k], scale)
    return deviations


def evidence(z: Values, center: float = CENTER) -> Values:
    """Near 0 for usual values, 0.5 at ``center`` deviations, towards 1 beyond."""
    return np.asarray(1.0 / (1.0 + np.exp(np.clip(center - z, -50.0, 700.0))))


def caption_doubts(deviations: Values) -> Values:
    """Weighted sums [n] of the deviations [n, signs]; NaN is a sign without evidence."""
    weights = np.array([WEIGHTS[sign] for sign in MEASURED_SIGNS])
    return np.asarray(np.nan_to_num(deviations, nan=0.0) @ weights)


def combine(deviations: Values, usual: Scale | None = None) -> Values:
    """Suspicion [n] from the deviations [n, signs] of captions.

    ``usual`` is the scale of the doubts; without it, they are compared with each other.
    """
    doubts = caption_doubts(deviations)
    return evidence((usual or Scale.of_usual(doubts)).z(doubts), WHOLE_CENTER)


def named_signs(signs: Values) -> list[int]:
    """Indices into `SIGNS` of the reasons to suspect a caption, the strongest first.

    Signs with enough evidence; if there are none, the strongest.
    """
    named = [int(k) for k in np.argsort(-signs, kind="stable") if signs[k] >= MIN_NAMED_EVIDENCE]
    return named or [int(signs.argmax())]


@dataclass(frozen=True)
class CaptionWord:
    """A word of a caption, its position, and its effects on the score.

    ``effect`` decides which words are named; ``fall`` is the sign of the caption.
    """

    word: str
    span: tuple[int, int]
    effect: float
    fall: float
    known: bool = True


@dataclass(frozen=True)
class WordEffects:
    """The words without punctuation of the examined captions, by caption."""

    words: dict[int, list[CaptionWord]]
    method: str


@torch.inference_mode()
def measure_effects(
    model: Model, split: Split, captions: Sequence[int], progress: Progress | None = None
) -> WordEffects:
    """Effects of the words of captions on the score with their own image.

    Words are named by `naming_method`. As a sign of captions, effects with gradients found fewer
    wrong ones on dev scenes than the fall of the score without a word (leave-one-out), so that is
    the sign. TAGS-DC's head serves for both.
    """
    table = model.fragments_of(split)
    progress = progress or Silent()
    effects: dict[int, list[CaptionWord]] = {}
    method = naming_method(model)
    with eval_mode(model):
        starts = range(0, len(captions), EFFECT_BATCH)
        for start in progress.track(starts, f"word effects ({split.name})", len(starts)):
            block = captions[start : start + EFFECT_BATCH]
            effects |= {caption: [] for caption in block}
            read = {
                caption: require_known(model.text, split.texts[caption])
                for caption in block
                if caption_words(split.texts[caption])
            }
            if not read:
                continue
            fragments = [table.read(int(split.image_of[caption])) for caption in read]
            images = model.encode_images(pad_fragments(fragments).to(model.device))
            texts = [known.text for known in read.values()]
            if method == "combined":
                falls = word_effects(model, images, texts, "leave-one-out")
                own = mean_effects(falls, word_effects(model, images, texts, "gradient"))
            else:
                falls = own = word_effects(model, images, texts, method)
            for (caption, known), each, fall in zip(read.items(), own, falls, strict=True):
                effects[caption] = _caption_words(split.texts[caption], known, each, fall)
    return WordEffects(effects, method)


def _caption_words(text: str, read: KnownText, effects: Values, falls: Values) -> list[CaptionWord]:
    """The words of a caption without punctuation; those that the model did not read are unknown."""
    known = {
        (word.start, word.end): (float(effect), float(fall))
        for word, effect, fall in zip(caption_words(read.text), effects, falls, strict=True)
    }
    spoken = [word for word in caption_words(text) if not word.is_punctuation]
    spans = [(word.text, (word.start, word.end)) for word in spoken]
    return [
        CaptionWord(word, span, *known.get(span, (0.0, 0.0)), span in known) for word, span in spans
    ]
