"""Measures a model's yardstick: the distribution of its scores and word effects on dev.

The yardstick tells what share of right and of wrong pairs score lower, and how large word effects
are, so that colors are comparable between pictures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.batches.collate import pad_fragments, pad_texts
from counterfoil.data.duplicates import spoken
from counterfoil.data.fragments import Fragments
from counterfoil.data.pairs import Split
from counterfoil.data.text.tokenizers import known_text
from counterfoil.encoders import Encoded
from counterfoil.models.explain import explain_pair
from counterfoil.models.match import MIN_AGAINST_SCALE, POINTS, Method, Yardstick
from counterfoil.models.model import Model

CAPTIONS, EXPLAINED = 500, 50
"""Captions scored with a right and a wrong image, and how many of them are explained."""

BATCH_SIZE = 16
MIN_EFFECTS = 10
FULL_COLOR_PERCENTILE = 95
"""Percentile of effects at which a word gets the full color."""


@torch.inference_mode()
def measure_yardstick(
    model: Model, split: Split, seed: int = 0, word_method: Method | None = None
) -> Yardstick | None:
    """The yardstick of a model on a sample of a split, with word effects by ``word_method``.

    None if too few scores are finite, or if words have no effects.
    """
    right: list[float] = []
    wrong: list[float] = []
    effects: list[float] = []
    with eval_mode(model):
        for images, texts, captions in _batches(model, split, seed):
            partner = _partners(split, captions)
            batch = pad_texts([model.text.encode(text) for text in texts], model.text.pad)
            encoded = model.encode_texts(batch.to(model.device))
            paired = [(row, row) for row in range(len(texts))]
            paired += [(image, text) for text, image in enumerate(partner) if image is not None]
            scores = _scores(model, images, encoded, paired)
            room = EXPLAINED - len(right)
            explained = [pair for pair in paired if pair[1] < room]
            effects += _effects(model, images, texts, explained, word_method)
            right += scores[: len(texts)]
            wrong += scores[len(texts) :]
    right, wrong = ([score for score in side if math.isfinite(score)] for side in (right, wrong))
    full = full_colors(effects)
    if min(len(right), len(wrong)) < MIN_EFFECTS or full is None:
        return None
    return Yardstick(
        split=split.name,
        pairs=len(right) + len(wrong),
        right=_quantiles(right),
        wrong=_quantiles(wrong),
        effect_for=full[0],
        effect_against=full[1],
        word_method=word_method,
    )


def full_colors(effects: list[float]) -> tuple[float, float] | None:
    """Sizes of effects, for and against, at which a word gets the full color; None without any."""
    sizes = [abs(effect) for effect in effects if effect and math.isfinite(effect)]
    favorable = [effect for effect in effects if 0 < effect < math.inf]
    against = [-effect for effect in effects if -math.inf < effect < 0] or [0.0]
    if not sizes:
        return None
    effect_for = float(np.percentile(favorable or sizes, FULL_COLOR_PERCENTILE))
    return effect_for, max(
        float(np.percentile(against, FULL_COLOR_PERCENTILE)), MIN_AGAINST_SCALE * effect_for
    )


def _quantiles(scores: list[float]) -> tuple[float, ...]:
    levels = np.percentile(scores, np.linspace(0.0, 100.0, POINTS))
    return tuple(np.sort(levels).tolist())  # rounding may swap near-equal ones


def _batches(
    model: Model, split: Split, seed: int
) -> Iterator[tuple[Encoded, list[str], list[int]]]:
    """Batches of encoded images, one caption text per image, and the captions' indices."""
    order = np.random.default_rng(seed).permutation(len(split.texts))[:CAPTIONS].tolist()
    for start in range(0, len(order), BATCH_SIZE):
        pairs = [_try_read(model, split, caption) for caption in order[start : start + BATCH_SIZE]]
        readable = [pair for pair in pairs if pair is not None]
        if readable:
            items, texts, numbers = map(list, zip(*readable, strict=True))
            yield model.encode_images(pad_fragments(items).to(model.device)), texts, numbers


def _try_read(model: Model, split: Split, caption: int) -> tuple[Fragments, str, int] | None:
    """Image, known text and index of a caption; None if either is unreadable."""
    table = split.require_fragments()
    read, image = known_text(model.text, split.texts[caption]), int(split.image_of[caption])
    if not read.is_readable or not read.text.strip():
        return None
    try:
        return table.read(image), read.text, caption
    except DataError:  # training and evaluation count images that cannot be read
        return None


def _partners(split: Split, captions: list[int]) -> list[int | None]:
    """For each caption of a batch, the next row whose image has no such caption."""
    images = [int(split.image_of[caption]) for caption in captions]
    spoken_captions = [{spoken(text) for text in split.captions[image]} for image in images]
    count = len(captions)
    partners = []
    for row, caption in enumerate(captions):
        own = spoken(split.texts[caption])
        others = ((row + step) % count for step in range(1, count))
        wrong = (other for other in others if images[other] != images[row])
        partners.append(next((other for other in wrong if own not in spoken_captions[other]), None))
    return partners


def _scores(
    model: Model, images: Encoded, texts: Encoded, pairs: list[tuple[int, int]]
) -> list[float]:
    at = torch.tensor(pairs, device=model.device)
    rows, columns = at[:, 0].contiguous(), at[:, 1].contiguous()
    scores = model.matcher.paired(images[rows], texts[columns])
    if scores is None:
        scores = model.matcher(images, texts)[rows, columns]
    return [float(score) for score in scores.float().cpu()]


def _effects(
    model: Model,
    images: Encoded,
    texts: list[str],
    pairs: list[tuple[int, int]],
    method: Method | None,
) -> list[float]:
    """Effects of words, without punctuation; none if the tokenizer gives no word offsets."""
    try:
        return [
            word.effect
            for row, column in pairs
            for word in explain_pair(
                model, images[row : row + 1], texts[column], None, method
            ).words
            if not word.is_punctuation
        ]
    except ConfigError:  # a slow tokenizer: the model cannot be explained
        return []
