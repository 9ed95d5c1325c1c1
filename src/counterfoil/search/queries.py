"""A sentence or an image as a query: checked, then encoded."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from counterfoil.data.batches import pad_fragments
from counterfoil.data.images import FileImage, open_image
from counterfoil.data.words import MOST_LETTERS, MOST_WORDS, words
from counterfoil.encoders import Encoded
from counterfoil.errors import ConfigError, DataError
from counterfoil.features import extractors
from counterfoil.models.model import Model
from counterfoil.models.word_spans import require_known, unknown_note
from counterfoil.search.encoding import ItemEncoder
from counterfoil.search.items import Side
from counterfoil.search.state import IndexState


@dataclass(frozen=True)
class Query:
    """One encoded item, on which side it is, and what a user should know of it."""

    label: str
    side: Side
    encoded: Encoded
    notes: list[str] = field(default_factory=list)


def text_query(model: Model, text: str, first: Model | None = None) -> Query:
    if len(text) > MOST_LETTERS:
        raise DataError(
            f"the query has {len(text):,} letters, at most {MOST_LETTERS:,} are read: shorten it"
        )
    asked = words(text)
    if not asked:
        raise DataError("the query has no words: say what to look for")
    if len(asked) > MOST_WORDS:
        raise DataError(
            f"the query has {len(asked):,} words, at most {MOST_WORDS} are read: shorten it"
        )
    note = unknown_note(require_known(model.text, text).unknown_words)
    encoded = ItemEncoder(model, first).texts([text])
    return Query(text, "captions", encoded, [note] if note else [])


def image_query(index: IndexState, image: str | Path | Image.Image) -> Query:
    """A picture, an image file, or the id of an image in the index."""
    if isinstance(image, Image.Image):
        return Query("image", "images", _encode(index.encoder, image.convert("RGB")))
    path = Path(image)
    if path.is_file():
        return Query(str(image), "images", _encode(index.encoder, open_image(FileImage(path))))
    if path.is_dir():
        raise DataError(f"{image}: a folder; give an image file, or the id of an image")
    names = index.items["images"].names
    if str(image) not in names:
        example = f" (ids look like '{next(iter(names))}')" if names else ""
        raise DataError(
            f"{image}: neither an image file nor the id of an image in the index{example}"
        )
    key = np.array([names[str(image)]], dtype=np.int64)
    return Query(str(image), "images", index.items["images"].encoded(key))


def _encode(encoder: ItemEncoder, pixels: Image.Image) -> Encoded:
    model = encoder.model
    if model.fragments_from is None:
        raise ConfigError(
            "this model was trained on precomputed features, so it cannot read an image file; "
            "give the id of an image in the index instead"
        )
    extractor = extractors.create(model.fragments_from, model.fragments_options)
    return encoder.images(pad_fragments([extractor.extract(pixels)]))
