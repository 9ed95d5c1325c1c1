"""NAAF's boundary and where the words of a sentence lie about it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from counterfoil.encoders import Encoded
from counterfoil.evaluation.scoring import encode_texts
from counterfoil.matchers.naaf import NAAF
from counterfoil.models.model import Model
from counterfoil.models.word_spans import CaptionWord, caption_words, known_text, words_of_tokens


def distributions(model: Model) -> dict[str, Any] | None:
    """The boundary, and mean and deviation of what it parts; None for other matchers."""
    matcher = model.matcher
    if not isinstance(matcher, NAAF) or matcher.directions != ("t2i",):
        return None
    learned = matcher.diagnostics()
    sides = {}
    for name, key in (("matched", "pos"), ("mismatched", "neg")):
        mean, std = (learned.get(f"mismatch/{what}_{key}") for what in ("mean", "std"))
        sides[name] = {"mean": mean, "std": std} if mean is not None and std else None
    return {"boundary": matcher.boundary_of("t2i"), **sides}


@torch.inference_mode()
def similarities(model: Model, image: Encoded, caption: str) -> list[float | None]:
    """The highest similarity of each word with a region, which NAAF holds against its boundary."""
    read = known_text(model.text, caption)
    known = caption_words(read.text)
    found = sorted([*known, *read.unknown], key=lambda word: word.start)
    text = encode_texts(model, [read.text])
    if image.fragments is None or text.fragments is None or not bool(image.mask.any()):
        return [None] * len(found)
    regions = F.normalize(image.fragments[0][image.mask[0]].float(), dim=-1)
    best = (F.normalize(text.fragments[0].float(), dim=-1) @ regions.T).amax(-1).tolist()
    by_word: dict[CaptionWord, list[float]] = {}
    for token, word in enumerate(words_of_tokens(model.text, read.text, known)):
        if word is not None:
            by_word.setdefault(known[word], []).append(best[token])
    return [max(by_word[word]) if word in by_word else None for word in found]
