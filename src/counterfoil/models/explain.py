"""Explanations of a match: the effect of each word of a caption on its score with an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from counterfoil.core.errors import DataError
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.batches.collate import pad_fragments
from counterfoil.data.fragments import Fragments
from counterfoil.data.text.tokenizers import require_known, words_of_tokens
from counterfoil.data.text.words import CaptionWord, caption_words
from counterfoil.encoders import Encoded
from counterfoil.encoders.dive import makes_sets
from counterfoil.matchers.chamfer import SmoothChamfer
from counterfoil.matchers.cross_encoder import CrossEncoder
from counterfoil.matchers.ensemble import EnsembleMatcher
from counterfoil.matchers.fragment_matcher import WordParts
from counterfoil.matchers.naaf import NAAF
from counterfoil.models.match import Floats, Match, Method, WordEffect
from counterfoil.models.word_effects import (
    Explainable,
    default_method,
    encode_captions,
    word_effects,
    word_parts,
)

SOFTMAX_SCALE = 10.0
"""Inverse temperature of word-to-region attention, for matchers without their own."""


@torch.inference_mode()
def explain(
    model: Explainable, image: Fragments, caption: str, method: Method | None = None
) -> Match:
    """Explain the match of a caption with an image, given as fragments."""
    with eval_mode(model):
        encoded = model.encode_images(pad_fragments([image]).to(model.device))
        return explain_pair(model, encoded, caption, image.boxes, method)


@torch.inference_mode()
def explain_encoded(model: Explainable, image: Encoded, caption: str) -> Match:
    """`explain` for one image that is already encoded."""
    boxes = image.boxes[0][image.mask[0]].cpu().numpy() if image.boxes is not None else None
    return explain_pair(model, image, caption, boxes)


def explain_pair(
    model: Explainable,
    image: Encoded,
    caption: str,
    boxes: Floats | None,
    method: Method | None = None,
) -> Match:
    """`explain` for one encoded image, with given boxes; the model is in eval mode."""
    if not caption_words(caption):
        raise DataError("the caption has no words; give at least one word to explain")
    read = require_known(model.text, caption)
    known = caption_words(read.text)
    texts = encode_captions(model, [read.text])
    parts = word_parts(model, image, texts)
    chosen = method or default_method(model, image, read.text)
    by_parts = chosen == "parts" and parts is not None
    if by_parts and parts is not None:
        words, specials = merge_parts(model, read.text, known, parts)
    else:
        attention = _attention(model, image, texts) if parts is None else parts.weights.float()
        effects = word_effects(model, image, [read.text], chosen)[0].tolist()
        words, specials = _with_attention(model, read.text, known, effects, attention), []
    weights = words[0].region_weights
    zeros = None if weights is None else np.zeros_like(weights)
    unknown = [
        WordEffect(word.text, 0.0, 0.0, 0.0, zeros, (word.start, word.end), known=False)
        for word in read.unknown
    ]
    return Match(
        text=caption,
        score=float(model.matcher(image, texts)[0, 0]),
        words=sorted([*words, *unknown], key=lambda word: word.span or (0, 0)),
        specials=specials,
        method=chosen,
        additive=by_parts and parts is not None and parts.additive,
        boundary=boundary_of(model),
        boxes=boxes,
        yardstick=model.yardstick,
    )


@torch.inference_mode()
def word_map(model: Explainable, image: Fragments, caption: str) -> tuple[list[str], Floats, float]:
    """Words of a caption, a map of numbers [words, regions], and the score.

    NAAF: the similarity beyond its boundary, s − t. Other matchers of words with regions: attention
    weights. A word of several tokens has their mean. Unknown words are `<unk>`, as in evaluation.
    """
    words = caption_words(caption)
    if not words:
        raise DataError("the caption has no words; give at least one word to map")
    with eval_mode(model):
        images = model.encode_images(pad_fragments([image]).to(model.device))
        texts = encode_captions(model, [caption])
        sets = makes_sets(model.text_encoder) or makes_sets(model.image_encoder)
        if isinstance(model.matcher, NAAF) and not sets:
            values: Tensor | None = model.matcher.beyond_boundary(images, texts)
        else:
            parts = word_parts(model, images, texts)
            values = parts.weights if parts is not None else _attention(model, images, texts)
        score = float(model.matcher(images, texts)[0, 0])
    if values is None:
        raise DataError("this model compares no words with regions; use one that does (naaf)")
    owners = words_of_tokens(model.text, caption, words)
    values = values.float().cpu()
    rows = [
        _mean_weights(values, [index for index, owner in enumerate(owners) if owner == number])
        for number in range(len(words))
    ]
    return [word.text for word in words], np.stack(rows)[:, : len(image)], score


def boundary_of(model: Explainable) -> float | None:
    """NAAF's current boundary; None for other matchers."""
    matcher = model.matcher
    return matcher.boundary_of(matcher.directions[0]) if isinstance(matcher, NAAF) else None


def merge_parts(
    model: Explainable, caption: str, known: Sequence[CaptionWord], parts: WordParts
) -> tuple[list[WordEffect], list[WordEffect]]:
    """Effects of words and of special tokens, with the same sum as the parts of tokens."""
    owners = words_of_tokens(model.text, caption, known)
    pieces = model.text.pieces(caption)
    # In double precision the sum over tokens and the sum over words are the same number.
    positive, negative = parts.positive.double().cpu(), parts.negative.double().cpu()
    weights = parts.weights.float().cpu()

    def effect(name: str, tokens: list[int], **fields: Any) -> WordEffect:
        gain, loss = positive[tokens].sum(), negative[tokens].sum()
        mean = _mean_weights(weights, tokens)
        return WordEffect(name, float(gain + loss), float(gain), float(loss), mean, **fields)

    words = []
    for number, word in enumerate(known):
        tokens = [index for index, owner in enumerate(owners) if owner == number]
        words.append(effect(word.text, tokens, span=(word.start, word.end)))
    special = [index for index, owner in enumerate(owners) if owner is None]
    return words, [effect(pieces[index], [index], special=True) for index in special]


def _with_attention(
    model: Explainable,
    caption: str,
    known: Sequence[CaptionWord],
    effects: Sequence[float],
    attention: Tensor | None,
) -> list[WordEffect]:
    attention = None if attention is None else attention.cpu()
    owners = words_of_tokens(model.text, caption, known) if attention is not None else []
    words = []
    for number, (word, effect) in enumerate(zip(known, effects, strict=True)):
        indices = [index for index, owner in enumerate(owners) if owner == number]
        weights = _mean_weights(attention, indices) if attention is not None else None
        gain, loss, span = max(effect, 0.0), min(effect, 0.0), (word.start, word.end)
        words.append(WordEffect(word.text, effect, gain, loss, weights, span))
    return words


def _attention(model: Explainable, image: Encoded, text: Encoded) -> Tensor | None:
    """Attention [W, R] of tokens to regions by their cosines; None for models without both."""
    if image.fragments is None or text.fragments is None:
        return None
    matcher = model.matcher
    first = matcher.members[0] if isinstance(matcher, EnsembleMatcher) else matcher
    # set embeddings are neither tokens nor regions; a cross-encoder's inputs are not comparable yet
    sets = makes_sets(model.text_encoder) or makes_sets(model.image_encoder)
    if sets or isinstance(first, (SmoothChamfer, CrossEncoder)):
        return None
    regions = F.normalize(image.fragments[0].float(), dim=-1)
    cosines = F.normalize(text.fragments[0].float(), dim=-1) @ regions.T
    logits = (SOFTMAX_SCALE * cosines).masked_fill(~image.mask[0], -torch.inf)
    return logits.softmax(-1).nan_to_num(0.0).cpu()  # an image without regions gives NaN


def _mean_weights(weights: Tensor, indices: Sequence[int]) -> Floats:
    if not indices:
        return np.zeros(weights.shape[1], dtype=np.float32)
    mean: Floats = weights[list(indices)].mean(0).numpy()
    return mean
