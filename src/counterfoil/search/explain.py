"""Why an image and a caption of an index match, from what the index holds of them."""

from __future__ import annotations

import torch

from counterfoil.encoders import Encoded
from counterfoil.errors import DataError
from counterfoil.evaluation.scoring import encode_texts
from counterfoil.models.explain import (
    Match,
    _leave_one_out,
    boundary_of,
    merge_parts,
    word_parts,
)
from counterfoil.models.model import Model
from counterfoil.models.word_spans import caption_words


@torch.inference_mode()
def explain_encoded(model: Model, image: Encoded, caption: str) -> Match:
    """What `Model.explain` says, for an image that is encoded already."""
    found = caption_words(caption)
    if not found:
        raise DataError("the caption has no words: there is nothing to explain")
    text = encode_texts(model, [caption])
    parts = word_parts(model, image, text)
    words, specials = (
        merge_parts(model, caption, found, parts)
        if parts is not None
        else (_leave_one_out(model, image, text, caption, found), [])
    )
    boxes = image.boxes[0][image.mask[0]].cpu().numpy() if image.boxes is not None else None
    return Match(
        text=caption,
        score=float(model.matcher(image, text)[0, 0]),
        words=words,
        specials=specials,
        method="parts" if parts is not None else "leave-one-out",
        additive=parts is not None and parts.additive,
        boundary=boundary_of(model),
        boxes=boxes,
    )
