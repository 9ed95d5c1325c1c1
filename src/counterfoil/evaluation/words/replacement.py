"""Doubt about words by replacement: do other words in the same place fit the image better?

A caption language model, which sees no image, proposes words for the place of a word. The matching
model scores the caption with each of them. Let g(w) be the score with word w in this place minus
the score of the caption, beyond what w gains with other images: some words raise every score. With
probabilities p(w) of the proposals, the evidence against the caption's own word is

    log Σ p(w) exp(β g(w) / σ)

If exp(β score / σ) is proportional to the likelihood of the image, this is the log of how much
likelier the image is with another word there. The probability of the own word is not part of it:
that is surprise, which has a weight of its own. True captions give σ, the robust deviation of
gains, and the usual evidence, so that doubts by different models can be averaged.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from counterfoil.core.errors import DataError
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.batches.collate import pad_fragments
from counterfoil.data.pairs import Split
from counterfoil.data.text.tokenizers import TextProcessor, known_text
from counterfoil.data.text.words import caption_words, words
from counterfoil.encoders import Encoded
from counterfoil.evaluation.caption_model import CaptionModel
from counterfoil.evaluation.ranks import Values
from counterfoil.evaluation.words.cases import FoilCase
from counterfoil.evaluation.words.doubts import NO_DOUBT, is_spoken, may_be_wrong, robust_spread
from counterfoil.foils.rules import in_case_of
from counterfoil.models.correct import exchanged
from counterfoil.models.model import Model
from counterfoil.models.word_effects import encode_captions

PROPOSALS = 15
"""Words per place. With 40, about as many wrong words of Flickr8k's dev split were found."""

INVERSE_TEMPERATURE = 2.0
"""β, the log likelihood per σ of score. Chosen on dev of Flickr8k from 1, 2 and 3."""

OTHER_IMAGES = 12
"""Images with which gains are compared. On dev of Flickr8k, 24 were no better."""

IMAGE_BATCH = 8
"""Images whose changed captions are encoded together: about a hundred for each caption."""


@dataclass(frozen=True)
class Proposal:
    """A word for the place ``position`` of a caption, with its log probability there."""

    position: int
    word: str
    log: float


@dataclass(frozen=True)
class WordGains:
    """What the score gains with each proposal for a word, beyond what it gains with other images.

    ``logs`` are the log probabilities of the proposals.
    """

    logs: Values
    gains: Values


@dataclass(frozen=True)
class ReplacedCaption:
    """A caption, and the gains for each word without punctuation.

    None: the word cannot be wrong, or the language model proposes nothing else for its place.
    """

    text: str
    words: tuple[WordGains | None, ...]


class Proposer:
    """Proposes words that a language model expects and a matching model can read."""

    def __init__(self, language: CaptionModel, reader: TextProcessor) -> None:
        self.language, self.reader = language, reader
        self.readable: dict[str, bool] = {}

    def of(self, text: str) -> list[Proposal]:
        """The likeliest other words for each place that can be wrong."""
        own = words(text)
        eligible = np.zeros(len(own), dtype=np.bool_)
        eligible[is_spoken(text)] = may_be_wrong(text)
        contexts = self.language.in_context(text) if eligible.any() else []
        return [
            Proposal(position, word, log)
            for position in np.flatnonzero(eligible).tolist()
            for word, log in self._likeliest(contexts[position], own[position])
        ]

    def _likeliest(self, context: dict[str, float], own: str) -> list[tuple[str, float]]:
        chosen: list[tuple[str, float]] = []
        for word, log in sorted(context.items(), key=lambda item: (-item[1], item[0])):
            if word[:1].isalnum() and word != own and self._is_readable(word):
                chosen.append((word, log))
            if len(chosen) == PROPOSALS:
                break
        return chosen

    def _is_readable(self, word: str) -> bool:
        if word not in self.readable:
            self.readable[word] = not known_text(self.reader, word).unknown
        return self.readable[word]


@torch.inference_mode()
def measure_gains(
    model: Model,
    split: Split,
    cases: Sequence[FoilCase],
    language: CaptionModel,
    progress: Progress | None = None,
) -> list[ReplacedCaption]:
    """Gains of replaced words in the foils of cases sorted by image.

    Every image is encoded once, and the changed captions of a few images share batches. Gains are
    compared with those of `OTHER_IMAGES` images of the split. Cases of unreadable images are left
    out, as in `measure_words`.
    """
    proposer = Proposer(language, model.text)
    grouped = groupby(cases, key=lambda case: case.image)
    groups = [(i, list(own)) for i, own in grouped if _is_readable(model, split, i)]
    starts = range(0, len(groups), IMAGE_BATCH)
    results: list[ReplacedCaption] = []
    with eval_mode(model):
        others = _OtherImages(model, split)
        title = f"replaced words ({model.spec.name})"
        for start in (progress or Silent()).track(starts, title, len(starts)):
            block = groups[start : start + IMAGE_BATCH]
            images = _encode_images(model, split, [image for image, _ in block])
            texts = [case.foil for _, own in block for case in own]
            proposed = [proposer.of(text) for text in texts]
            changed = [[text, *_changed(text, p)] for text, p in zip(texts, proposed, strict=True)]
            encoded = encode_captions(model, [each for own in changed for each in own])
            beside = [
                Encoded.cat([images[row : row + 1], others.without(image)])
                for row, (image, own) in enumerate(block)
                for _ in own
            ]
            ends = np.cumsum([len(own) for own in changed]).tolist()
            for text, proposals, own, end in zip(texts, proposed, beside, ends, strict=True):
                scores = model.matcher(own, encoded[end - 1 - len(proposals) : end])
                gains = _gains_beside_others(scores.double().cpu().numpy())
                results.append(_replaced(text, proposals, gains))
    return results


def _gains_beside_others(scores: Values) -> Values:
    """Gains of the first image beyond the mean of the others, from scores [images, 1 + changed]."""
    gains = scores[:, 1:] - scores[:, :1]
    return np.asarray(gains[0] - gains[1:].mean(0) if len(gains) > 1 else gains[0])


class _OtherImages:
    """A few readable images of a split, drawn at random and encoded."""

    def __init__(self, model: Model, split: Split) -> None:
        self.images: list[int] = []
        for image in random.Random(0).sample(range(len(split)), len(split)):
            if _is_readable(model, split, image):
                self.images.append(image)
            if len(self.images) > OTHER_IMAGES:  # one more: a caption's own image is left out
                break
        self.encoded = _encode_images(model, split, self.images)

    def without(self, own: int) -> Encoded:
        rows = [row for row, image in enumerate(self.images) if image != own][:OTHER_IMAGES]
        return self.encoded[torch.tensor(rows, dtype=torch.long, device=self.encoded.mask.device)]


def _is_readable(model: Model, split: Split, image: int) -> bool:
    try:
        model.fragments_of(split).read(image)
    except DataError:
        return False
    return True


def _encode_images(model: Model, split: Split, images: Sequence[int]) -> Encoded:
    table = model.fragments_of(split)
    fragments = pad_fragments([table.read(image) for image in images])
    return model.encode_images(fragments.to(model.device))


def _changed(text: str, proposals: Sequence[Proposal]) -> list[str]:
    spans = caption_words(text)
    return [
        exchanged(text, one.position, in_case_of(spans[one.position].text, one.word))
        for one in proposals
    ]


def _replaced(text: str, proposals: Sequence[Proposal], gains: Values) -> ReplacedCaption:
    positions = np.array([one.position for one in proposals], dtype=np.int64)
    logs = np.array([one.log for one in proposals])
    replaced: list[WordGains | None] = []
    for position in np.flatnonzero(is_spoken(text)).tolist():
        here = positions == position
        replaced.append(WordGains(logs[here], gains[here]) if here.any() else None)
    return ReplacedCaption(text, tuple(replaced))


class ReplacementDoubts:
    """Doubts about words, relative to the evidence that is usual in true ``reference`` captions.

    >>> def replaced(gain):
    ...     return ReplacedCaption("a dog", (None, WordGains(np.zeros(1), np.array([gain]))))
    >>> doubts = ReplacementDoubts([replaced(gain) for gain in (-0.3, -0.2, -0.1)])
    >>> bool(doubts.of(replaced(0.5))[1] > 3)
    True
    """

    def __init__(self, reference: Iterable[ReplacedCaption]) -> None:
        replaced = [each for caption in reference for each in caption.words if each is not None]
        gains = [each.gains for each in replaced]
        self.scale = robust_spread(np.concatenate([*gains, np.empty(0)]))
        usual = np.array([self._evidence(each) for each in replaced])
        self.usual = float(np.median(usual)) if len(usual) else 0.0
        self.spread = robust_spread(usual)

    def evidence(self, caption: ReplacedCaption) -> Values:
        """Evidence against each word, in robust deviations from the usual; 0 without proposals."""
        return np.array(
            [
                0.0 if each is None else (self._evidence(each) - self.usual) / self.spread
                for each in caption.words
            ]
        )

    def of(self, caption: ReplacedCaption) -> Values:
        """Doubt of each word without punctuation, in robust deviations."""
        return np.where(may_be_wrong(caption.text), self.evidence(caption), NO_DOUBT)

    def _evidence(self, each: WordGains) -> float:
        logs = each.logs - np.logaddexp.reduce(each.logs)
        return float(np.logaddexp.reduce(logs + INVERSE_TEMPERATURE * each.gains / self.scale))
