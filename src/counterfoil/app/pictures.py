"""Pictures in and out: uploads decoded within limits, and what the page shows."""

from __future__ import annotations

import io
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image, UnidentifiedImageError

from counterfoil.app.limits import Limits
from counterfoil.app.problems import Problem
from counterfoil.data.images import image_formats, open_image
from counterfoil.errors import DataError

FORMATS = image_formats()
"""Of an upload: those of data sets."""

SIDES = (160, 320, 640, 1280)
MEDIA_TYPE = "image/webp"


@dataclass(frozen=True)
class _Upload:
    """Bytes that a client sent, in the form that `open_image` takes."""

    data: bytes
    name: str = "the upload"

    def read(self) -> bytes:
        return self.data


def decode_upload(data: bytes, limits: Limits) -> Image.Image:
    """An upright RGB picture; a `Problem` for anything else. The size is known before decoding."""
    if not data:
        raise Problem(422, "the upload is empty: choose an image file")
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
        raise Problem(422, "the upload is damaged: it could not be read to its end") from None


def _too_large(limits: Limits) -> str:
    return f"the image has too many pixels: at most {limits.pixels / 1e6:.0f} million are read"


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
    """Encoded pictures, the least recently shown forgotten first."""

    def __init__(self, most_bytes: int = 64 * 2**20) -> None:
        self._most, self._held = most_bytes, 0
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
                self._held += len(data)
            while self._held > self._most:
                _, old = self._pictures.popitem(last=False)
                self._held -= len(old)
        return data
