"""Images of the web service: those of its index, of its audit, and the latest uploads.

A client names an image by an id, which is looked up and never used as a path. Uploads are decoded
within limits.
"""

from __future__ import annotations

import io
import secrets
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from counterfoil.app.connections import Limits
from counterfoil.app.content import AuditedImage
from counterfoil.app.problems import Problem
from counterfoil.core.errors import DataError
from counterfoil.data.images import image_formats, open_image
from counterfoil.data.text.tokenizers import known_text
from counterfoil.encoders import Encoded
from counterfoil.search import SearchIndex

FORMATS = image_formats()
"""Formats of uploads, the same as those of data sets."""

SIDES = (160, 320, 640, 1280)
MEDIA_TYPE = "image/webp"

UPLOAD = "upload:"

EXAMPLES, EXAMPLES_READ, EXAMPLE_LETTERS = 4, 24, 90
"""Number of example queries, images whose captions are tried for them, and their length."""


@dataclass(frozen=True)
class _Upload:
    """Uploaded bytes in the form that `open_image` accepts."""

    data: bytes
    name: str = "the upload"

    def read(self) -> bytes:
        return self.data


def decode_upload(data: bytes, limits: Limits) -> Image.Image:
    """An upright RGB picture; a `Problem` for anything else. The size is checked first."""
    if not data:
        raise Problem(422, "the upload is empty; choose an image file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
    except UnidentifiedImageError:
        known = ", ".join(name for name in FORMATS if name != "MPO")
        raise Problem(415, f"the upload is not an image of a known format ({known})") from None
    except Image.DecompressionBombError:
        raise Problem(413, _too_large(limits)) from None
    except Exception:  # damaged headers make decoders raise nearly anything
        raise Problem(422, "the upload is not a readable image") from None
    if width * height > limits.pixels:
        raise Problem(413, _too_large(limits))
    try:
        return open_image(_Upload(data))
    except DataError:
        raise Problem(422, "the upload is damaged or truncated; send another file") from None


def _too_large(limits: Limits) -> str:
    return f"the image has too many pixels; at most {limits.pixels / 1e6:.0f} million are allowed"


def shrunk(image: Image.Image, side: int) -> Image.Image:
    """A copy whose longer side is at most ``side``."""
    copy = image.copy()
    copy.thumbnail((side, side), Image.Resampling.LANCZOS)
    return copy


def encode_picture(image: Image.Image, side: int) -> bytes:
    buffer = io.BytesIO()
    shrunk(image, side).save(buffer, format="WEBP", quality=90, method=2)
    return buffer.getvalue()


class PictureCache:
    """Encoded pictures in an LRU cache with a limit in bytes."""

    def __init__(self, most_bytes: int = 64 * 2**20) -> None:
        self._most, self._size = most_bytes, 0
        self._pictures: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str, side: int, read: Callable[[], Image.Image]) -> bytes:
        key = (name, side)
        with self._lock:
            if key in self._pictures:
                self._pictures.move_to_end(key)
                return self._pictures[key]
        data = encode_picture(read(), side)
        with self._lock:
            if key not in self._pictures:
                self._pictures[key] = data
                self._size += len(data)
            while self._size > self._most:
                _, old = self._pictures.popitem(last=False)
                self._size -= len(old)
        return data


@dataclass(frozen=True)
class Upload:
    """An uploaded picture in display size, and its encoding by the matcher."""

    picture: Image.Image
    encoded: Encoded


class Library:
    """Images by id."""

    def __init__(
        self,
        index: SearchIndex,
        limits: Limits,
        audited: Mapping[str, AuditedImage] | None = None,
    ) -> None:
        self.index, self.limits = index, limits
        self._audited = audited or {}
        # read from disk now, so that no request waits for it
        self.ids = list(index.items["images"].names)
        self._uploads: OrderedDict[str, Upload] = OrderedDict()
        self._lock = threading.Lock()
        self.examples = self._examples()

    def show_audited(self, images: Mapping[str, AuditedImage]) -> None:
        """Serve the images of an audit that was made meanwhile."""
        self._audited = images

    def _examples(self) -> list[str]:
        """A few distinct captions of the library whose words are in the model's vocabulary."""
        step = max(1, len(self.ids) // EXAMPLES_READ)
        texts: dict[str, None] = {}
        for name in self.ids[::step][:EXAMPLES_READ]:
            captions = self.about(name)["captions"]
            fits = (text for text in captions if len(text) <= EXAMPLE_LETTERS and text.strip())
            text = next((t for t in fits if not known_text(self.index.model.text, t).unknown), None)
            if text is not None:
                texts[text.strip()] = None
        return list(texts)[:EXAMPLES]

    @property
    def uploads(self) -> int:
        return len(self._uploads)

    def add(self, picture: Image.Image, encoded: Encoded) -> str:
        """Keep an upload; its id cannot be guessed."""
        name = UPLOAD + secrets.token_urlsafe(12)
        with self._lock:
            self._uploads[name] = Upload(shrunk(picture, self.limits.shown_side), encoded)
            while len(self._uploads) > self.limits.uploads:
                self._uploads.popitem(last=False)
        return name

    def check(self, name: str) -> None:
        """Raise a `Problem` if no image has this name."""
        known = (self._uploads, self.index.items["images"].names, self._audited)
        if not any(name in names for names in known):
            gone = " (only the latest uploads are kept; send it again)"
            raise Problem(404, f"no such image{gone if name.startswith(UPLOAD) else ''}")

    def find_encoded(self, name: str) -> Encoded | None:
        """The matcher's encoding of an image; None if it must be computed from the pixels."""
        upload = self._uploads.get(name)
        if upload is not None:
            return upload.encoded
        self.check(name)
        indexed = self._find_indexed(name)
        return None if indexed is None else self.index.items["images"].encoded(self._key(indexed))

    def _find_indexed(self, name: str) -> str | None:
        """The id of an image in the index, also for an audited image that the index contains.

        Other data may use the same id for another image, so the captions must be equal as well.
        """
        names = self.index.items["images"].names
        if name in names:
            return name
        audited = self._audited[name]
        if audited.id not in names:
            return None
        own = self.index.items["images"].about(self._key(audited.id))[0].get("captions", [])
        return audited.id if audited.captions in (None, own) else None

    def picture(self, name: str) -> Image.Image:
        """Pixels of an upload, or from the files of the audit or the index."""
        upload = self._uploads.get(name)
        if upload is not None:
            return upload.picture
        self.check(name)
        if name in self._audited:
            with suppress(DataError):
                return self._audited[name].open()
        indexed = self._find_indexed(name)
        if indexed is not None:
            with suppress(DataError):
                return self.index.picture(indexed)
        raise Problem(404, "the file of this image is missing or damaged")

    def about(self, name: str) -> dict[str, Any]:
        """Id and captions of an image."""
        self.check(name)
        if name in self._uploads:
            return {"id": name, "captions": []}
        indexed = self._find_indexed(name)
        if indexed is None:
            return {"id": name, "captions": self._audited[name].captions or []}
        item = self.index.items["images"].about(self._key(indexed))[0]
        return {"id": name, "captions": item.get("captions", [])}

    def listed(self, offset: int, limit: int) -> list[dict[str, Any]]:
        return [self.about(name) for name in self.ids[offset : offset + limit]]

    def _key(self, name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array([self.index.items["images"].names[name]], dtype=np.int64)
