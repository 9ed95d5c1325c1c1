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
from counterfoil.app.home import example_queries, in_varied_order
from counterfoil.app.problems import Problem
from counterfoil.core.errors import DataError
from counterfoil.data.images import image_formats, open_image
from counterfoil.encoders import Encoded
from counterfoil.models.model import Model
from counterfoil.search import SearchIndex

FORMATS = image_formats()
"""Formats of uploads, the same as those of data sets."""

SIDES = (160, 320, 640, 1280)
MEDIA_TYPE = "image/webp"

UPLOAD = "upload:"


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
    """An uploaded picture in display size, and its encodings by the served models."""

    picture: Image.Image
    encoded: Mapping[Model, Encoded]


class Library:
    """Images by id: those of the index, if there is one, of the audit, and uploads."""

    def __init__(
        self,
        index: SearchIndex | None,
        limits: Limits,
        audited: Mapping[str, AuditedImage] | None = None,
    ) -> None:
        self.index, self.limits = index, limits
        self._audited = audited or {}
        # read from disk now, so that no request waits for it
        self._keys = index.items["images"].names if index is not None else {}
        self.ids = in_varied_order(index) if index is not None else []
        self.examples = example_queries(index, self.ids) if index is not None else []
        self._uploads: OrderedDict[str, Upload] = OrderedDict()
        self._lock = threading.Lock()

    def show_audited(self, images: Mapping[str, AuditedImage]) -> None:
        """Serve the images of an audit that was made meanwhile."""
        self._audited = images

    @property
    def uploads(self) -> int:
        return len(self._uploads)

    def add(self, picture: Image.Image, encoded: Mapping[Model, Encoded]) -> str:
        """Keep an upload; its id cannot be guessed."""
        name = UPLOAD + secrets.token_urlsafe(12)
        with self._lock:
            self._uploads[name] = Upload(shrunk(picture, self.limits.shown_side), encoded)
            while len(self._uploads) > self.limits.uploads:
                self._uploads.popitem(last=False)
        return name

    def check(self, name: str) -> None:
        """Raise a `Problem` if no image has this name."""
        if not any(name in names for names in (self._uploads, self._keys, self._audited)):
            gone = " (only the latest uploads are kept; send it again)"
            raise Problem(404, f"no such image: '{name}'{gone if name.startswith(UPLOAD) else ''}")

    def find_encoded(self, name: str, model: Model) -> Encoded | None:
        """A model's encoding of an image; None if it must be computed from the pixels."""
        upload = self._uploads.get(name)
        if upload is not None:
            return upload.encoded.get(model)
        self.check(name)
        indexed = self._find_indexed(name)
        if self.index is None or indexed is None or self.index.model is not model:
            return None
        return self.index.items["images"].encoded(self._key(indexed))

    def _find_indexed(self, name: str) -> str | None:
        """The id of an image in the index, also for an audited image that the index contains.

        Other data may use the same id for another image, so the captions must be equal as well.
        """
        if name in self._keys:
            return name
        audited = self._audited[name]
        if audited.id not in self._keys:
            return None
        return audited.id if audited.captions in (None, self._captions(audited.id)) else None

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
        if self.index is not None and indexed is not None:
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
        return {"id": name, "captions": self._captions(indexed)}

    def listed(self, offset: int, limit: int) -> list[dict[str, Any]]:
        return [self.about(name) for name in self.ids[offset : offset + limit]]

    def _captions(self, name: str) -> list[str]:
        assert self.index is not None  # noqa: S101 - only called for its ids
        captions: list[str] = self.index.items["images"].about(self._key(name))[0]["captions"]
        return captions

    def _key(self, name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array([self._keys[name]], dtype=np.int64)
