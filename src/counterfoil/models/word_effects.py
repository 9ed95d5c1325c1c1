"""Effects of words on scores by every method, for many pairs at once.

| method | effect of a word |
| --- | --- |
| parts | its part of the score, if the matcher sums over words |
| leave-one-out | the score minus that of the caption without the word |
| mask | the score minus that of the caption with the mask token in the word's place |
| gradient | gradient × input: the gradient by the word's embedding, times the embedding |
| combined | the mean of leave-one-out and gradient |
| rollout | attention rollout to the word; says how much it matters, not in which direction |
| discrimination | TAGS-DC's head: log odds that the word is original, not replaced |
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from counterfoil.core.errors import ConfigError
from counterfoil.core.tensors.modes import Trained
from counterfoil.data.batches.collate import ImageBatch, TextBatch, pad_texts
from counterfoil.data.text.tokenizers import (
    HuggingFaceText,
    TextProcessor,
    WordText,
    without,
    words_of_tokens,
)
from counterfoil.data.text.vocabulary import MASK
from counterfoil.data.text.words import caption_words
from counterfoil.encoders import Encoded
from counterfoil.encoders.dive import makes_sets
from counterfoil.matchers.base import Matcher, paired_scores
from counterfoil.matchers.cross_encoder import CrossEncoder
from counterfoil.matchers.ensemble import EnsembleMatcher, split_members
from counterfoil.matchers.fragment_matcher import FragmentMatcher, WordParts
from counterfoil.models.match import METHODS, Method, Yardstick
from counterfoil.objectives.cfm_perturbations import word_tables

Values = NDArray[np.float64]

TEXT_BATCH = 256
GRADIENT_BATCH = 32
"""Pairs per backward pass: with gradients, a pair needs far more memory."""


class Explainable(Trained, Protocol):
    """The parts of a `Model` that explanations use."""

    text: TextProcessor
    image_encoder: nn.Module
    text_encoder: nn.Module
    matcher: Matcher
    yardstick: Yardstick | None

    @property
    def device(self) -> torch.device: ...

    def encode_images(self, images: ImageBatch) -> Encoded: ...

    def encode_texts(self, texts: TextBatch) -> Encoded: ...


def word_effects(
    model: Explainable, images: Encoded, captions: Sequence[str], method: Method
) -> list[Values]:
    """The effect of every word of caption ``k``, punctuation included, with image ``k``.

    The model is in eval mode. `ConfigError` if it does not have this method.
    """
    if method not in METHODS:
        raise ConfigError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
    if method in ("leave-one-out", "mask"):
        return _by_removal(model, images, captions, method)
    if method == "gradient":
        return _by_gradient(model, images, captions)
    if method == "combined":
        removed = word_effects(model, images, captions, "leave-one-out")
        return mean_effects(removed, word_effects(model, images, captions, "gradient"))
    with torch.no_grad():
        tokens = _of_tokens(model, images, encode_captions(model, captions), method)
    together = np.min if method == "discrimination" else np.sum
    return [
        per_word(model, caption, each.double().cpu().numpy(), together)
        for caption, each in zip(captions, tokens, strict=True)
    ]


def naming_method(model: Explainable) -> Method:
    """The method that names wrong words best: TAGS-DC's head, or else ``combined``.

    The gradients of cross-encoders say little, and those of encoders without a table of words
    cannot be had: leave-one-out.
    """
    if isinstance(model.matcher, CrossEncoder):
        return "discrimination" if "discrimination" in model.matcher.heads else "leave-one-out"
    try:
        word_tables(model.text_encoder)
    except ConfigError:
        return "leave-one-out"
    return "combined"


def mean_effects(first: Sequence[Values], second: Sequence[Values]) -> list[Values]:
    """The mean of the effects by two methods."""
    return [(one + other) / 2 for one, other in zip(first, second, strict=True)]


def default_method(model: Explainable, image: Encoded, caption: str) -> Method:
    """The method that was best on dev; else parts if the matcher has any, else leave-one-out."""
    if model.yardstick is not None and model.yardstick.word_method is not None:
        return model.yardstick.word_method
    with torch.no_grad():
        parts = word_parts(model, image, encode_captions(model, [caption]))
    return "leave-one-out" if parts is None else "parts"


def per_word(model: Explainable, caption: str, tokens: Values, together: Any = np.sum) -> Values:
    """Values of tokens combined per word; 0 for words beyond the tokenizer's maximum length."""
    words = caption_words(caption)
    owners = words_of_tokens(model.text, caption, words)
    own: list[list[float]] = [[] for _ in words]
    for index, owner in enumerate(owners):
        if owner is not None:
            own[owner].append(float(tokens[index]))
    return np.array([together(each) if each else 0.0 for each in own])


def encode_captions(model: Explainable, captions: Sequence[str]) -> Encoded:
    """Encoded captions, in order; those of similar length share a batch."""
    return _encode(model, [model.text.encode(caption) for caption in captions])


def _encode(model: Explainable, ids: Sequence[list[int]]) -> Encoded:
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    parts = [
        model.encode_texts(
            pad_texts([ids[i] for i in order[start : start + TEXT_BATCH]], model.text.pad).to(
                model.device
            )
        )
        for start in range(0, len(ids), TEXT_BATCH)
    ]
    back = torch.tensor(order, device=model.device).argsort()
    return Encoded.cat(parts)[back]


def variant_scores(
    model: Explainable, images: Encoded, ids: Sequence[Sequence[list[int]]]
) -> list[Values]:
    """Scores of several tokenized texts per image, encoded in one go."""
    encoded = _encode(model, [each for own in ids for each in own])
    scores: list[Values] = []
    start = 0
    for row, own in enumerate(ids):
        block = encoded[start : start + len(own)]
        start += len(own)
        scores.append(model.matcher(images[row : row + 1], block)[0].double().cpu().numpy())
    return scores


@torch.no_grad()
def _by_removal(
    model: Explainable, images: Encoded, captions: Sequence[str], method: Method
) -> list[Values]:
    encode = model.text.encode
    if method == "mask":
        ids = [[encode(caption), *_masked(model, caption)] for caption in captions]
    else:
        ids = [
            [encode(text) for text in (c, *(without(c, word) for word in caption_words(c)))]
            for c in captions
        ]
    return [each[0] - each[1:] for each in variant_scores(model, images, ids)]


def _masked(model: Explainable, caption: str) -> list[list[int]]:
    """The caption's ids with the tokens of each word in turn replaced by the mask token."""
    text = model.text
    mask: int | None = None
    if isinstance(text, WordText):
        mask = text.vocabulary.index[MASK]
    elif isinstance(text, HuggingFaceText):
        mask = text.tokenizer.mask_token_id
    if mask is None:
        raise ConfigError("method 'mask' needs a tokenizer that has a mask token; use another one")
    tokens, words = text.tokenize(caption), caption_words(caption)
    owners = words_of_tokens(text, caption, words)
    variants = []
    for number in range(len(words)):
        ids = [mask if o == number else i for i, o in zip(tokens.ids, owners, strict=True)]
        variants.append(text.with_noise(replace(tokens, ids=array("i", ids))))
    return variants


def _by_gradient(model: Explainable, images: Encoded, captions: Sequence[str]) -> list[Values]:
    effects: list[Values] = []
    for start in range(0, len(captions), GRADIENT_BATCH):
        block = captions[start : start + GRADIENT_BATCH]
        batch = pad_texts([model.text.encode(caption) for caption in block], model.text.pad)
        rows = torch.arange(start, start + len(block), device=images.mask.device)
        tokens = _token_gradients(model, images[rows], batch.to(model.device))
        for caption, each in zip(block, tokens.double().cpu().numpy(), strict=True):
            effects.append(per_word(model, caption, each))
    return effects


def _token_gradients(model: Explainable, images: Encoded, batch: TextBatch) -> Tensor:
    """Gradient × input [n, W] of the scores of pairs.

    Every embedding is multiplied by a gate of 1. The gradient by the gate is the sum over the
    embedding's channels of gradient × input, whatever the text encoder does with it.
    """
    gates: list[Tensor] = []

    def gate(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        gates.append(torch.ones_like(output[..., :1], requires_grad=True))
        return output * gates[-1]

    # cuDNN's recurrent layers have no backward pass in eval mode
    with _gradients(), torch.backends.cudnn.flags(enabled=False):
        handles = [table.register_forward_hook(gate) for table in word_tables(model.text_encoder)]
        try:
            texts = model.encode_texts(_normal(batch))
            scores = paired_scores(model.matcher, _normal(images), texts)
            each = torch.autograd.grad(scores.sum(), gates)
        finally:
            for handle in handles:
                handle.remove()
    return torch.stack([one[..., 0] for one in each]).sum(0)


@contextmanager
def _gradients() -> Iterator[None]:
    """Inside, gradients are computed, even if the caller is in inference mode."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _normal(batch: Any) -> Any:
    """Copies of tensors that were made in inference mode, which autograd refuses to save."""
    fields = {
        name: value.clone()
        for name, value in vars(batch).items()
        if isinstance(value, Tensor) and value.is_inference()
    }
    return replace(batch, **fields) if fields else batch


def _of_tokens(model: Explainable, images: Encoded, texts: Encoded, method: Method) -> list[Tensor]:
    """Effects per token [W] of each pair, by a method that reads them off the model."""
    if method == "parts":
        measured = [
            word_parts(model, images[k : k + 1], texts[k : k + 1]) for k in range(len(images))
        ]
        parts = [part for part in measured if part is not None]
        if len(parts) < len(measured):
            raise ConfigError(
                "this model has no parts per word; use method 'leave-one-out' or leave it out"
            )
        return [part.positive.double() + part.negative.double() for part in parts]
    matcher = model.matcher
    if not isinstance(matcher, CrossEncoder):
        raise ConfigError(f"method '{method}' needs a cross-encoder (UNITER); use another one")
    if method == "rollout":
        return list(matcher.rollout(images, texts))
    if method not in matcher.heads:
        raise ConfigError(
            "method 'discrimination' needs TAGS-DC's head that finds wrong words; use another "
            "one, or train with the objective tags-dc"
        )
    logits = matcher.heads[method](matcher.states(images, texts).words)
    return list(logits[..., 1] - logits[..., 0])


def word_parts(model: Explainable, image: Encoded, text: Encoded) -> WordParts | None:
    """Parts of the score of one pair, per token; None if the matcher has no such parts.

    A matcher of words with regions has none either if it is given sets, as DivE's encoders make.
    """
    if makes_sets(model.text_encoder) or makes_sets(model.image_encoder):
        return None
    if not isinstance(model.matcher, EnsembleMatcher):
        return _word_parts(model.matcher, image, text)
    count = len(model.matcher.members)
    each = [
        _word_parts(member, *pair)
        for member, *pair in zip(
            model.matcher.members,
            split_members(image, count),
            split_members(text, count),
            strict=True,
        )
    ]
    parts = [part for part in each if part is not None]
    if len(parts) < count:
        return None
    return WordParts(
        torch.stack([part.positive for part in parts]).mean(0),
        torch.stack([part.negative for part in parts]).mean(0),
        torch.stack([part.weights for part in parts]).mean(0),
        all(part.additive for part in parts),
    )


def _word_parts(matcher: nn.Module, image: Encoded, text: Encoded) -> WordParts | None:
    return matcher.word_parts(image, text) if isinstance(matcher, FragmentMatcher) else None
