"""Suspicion of a caption from three signs, each relative to what is usual in its split.

A sign becomes z, its robust standard deviations from the median of the split's captions. z becomes
evidence 1 / (1 + exp(c − z)), which is 0.5 at c deviations. The evidence of all signs becomes
suspicion 1 − Π (1 − evidence): each sign alone can make a caption suspicious, and weak signs add
up. Nothing is learned. A split without errors has few captions far from its median, so the share of
suspicious captions is meaningful.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from counterfoil.core.progress import Progress, Silent
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.batches.collate import pad_fragments
from counterfoil.data.pairs import Split
from counterfoil.data.text.tokenizers import KnownText, require_known
from counterfoil.data.text.words import caption_words
from counterfoil.models.match import Method
from counterfoil.models.model import Model
from counterfoil.models.word_effects import default_method, word_effects

Values = NDArray[np.float64]

CENTER, RIVAL_CENTER = 3.0, 4.0
"""The deviations c. Another image often scores higher if images are similar, so that sign needs one
deviation more. Chosen on the dev split of the scenes."""

MIN_NAMED_EVIDENCE = 0.2
"""Evidence from which a sign is named; at suspicion 0.5, one of three signs has it."""

SUSPICIOUS_FROM = 0.5
"""Suspicion from which a caption counts as suspicious in a summary."""

SIGNS = ("low-score", "other-image", "wrong-words")
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

    def z(self, values: Values) -> Values:
        """Deviations from the median; 0 if all values are equal."""
        return (values - self.median) / self.spread if self.spread else np.zeros_like(values)


def evidence(z: Values, center: float = CENTER) -> Values:
    """Near 0 for usual values, 0.5 at ``center`` deviations, towards 1 beyond."""
    return np.asarray(1.0 / (1.0 + np.exp(np.clip(center - z, -50.0, 700.0))))


def combine(signs: Values) -> Values:
    """Suspicion [n] from evidence [n, signs]."""
    return np.asarray(1.0 - np.prod(1.0 - signs, axis=1))


def named_signs(signs: Values) -> list[int]:
    """Indices into `SIGNS` of the reasons to suspect a caption, the strongest first.

    Signs with enough evidence; if there are none, the strongest.
    """
    named = [int(k) for k in np.argsort(-signs, kind="stable") if signs[k] >= MIN_NAMED_EVIDENCE]
    return named or [int(signs.argmax())]


@dataclass(frozen=True)
class CaptionWord:
    """A word of a caption, its position, and its effect on the score."""

    word: str
    span: tuple[int, int]
    effect: float
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

    They are measured by the method that `explain` uses for this model.
    """
    table = split.require_fragments()
    progress = progress or Silent()
    effects: dict[int, list[CaptionWord]] = {}
    method: Method | None = None
    with eval_mode(model):
        starts = range(0, len(captions), EFFECT_BATCH)
        for start in progress.track(starts, f"word effects ({split.name})", len(starts)):
            some = captions[start : start + EFFECT_BATCH]
            effects |= {caption: [] for caption in some}
            read = {
                caption: require_known(model.text, split.texts[caption])
                for caption in some
                if caption_words(split.texts[caption])
            }
            if not read:
                continue
            fragments = [table.read(int(split.image_of[caption])) for caption in read]
            images = model.encode_images(pad_fragments(fragments).to(model.device))
            texts = [known.text for known in read.values()]
            method = method or default_method(model, images[:1], texts[0])
            measured = word_effects(model, images, texts, method)
            for (caption, known), each in zip(read.items(), measured, strict=True):
                effects[caption] = _caption_words(split.texts[caption], known, each)
    return WordEffects(effects, method or "")


def _caption_words(text: str, read: KnownText, effects: Values) -> list[CaptionWord]:
    """The words of a caption without punctuation; those that the model did not read are unknown."""
    known = {
        (word.start, word.end): float(effect)
        for word, effect in zip(caption_words(read.text), effects, strict=True)
    }
    spoken = [word for word in caption_words(text) if not word.is_punctuation]
    spans = [(word.text, (word.start, word.end)) for word in spoken]
    return [CaptionWord(word, span, known.get(span, 0.0), span in known) for word, span in spans]
