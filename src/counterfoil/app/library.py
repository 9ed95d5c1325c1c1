"""The images the service knows: those of its index, and the last few uploads.

A client names an image by an id, which is looked up here; it is never taken for a path.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from counterfoil.app.limits import Limits
from counterfoil.app.pictures import shrunk
from counterfoil.app.problems import Problem
from counterfoil.encoders import Encoded
from counterfoil.errors import DataError
from counterfoil.search import SearchIndex

UPLOAD = "upload:"


@dataclass(frozen=True)
class Upload:
    """A picture that a client sent, as small as it is shown, and as the matcher reads it."""

    picture: Image.Image
    encoded: Encoded


class Library:
    """Images by id."""

    def __init__(self, index: SearchIndex, limits: Limits) -> None:
        self.index, self.limits = index, limits
        # read from disk now: a lookup during a request must not wait for that
        self.ids = list(index.items["images"].names)
        self._uploads: OrderedDict[str, Upload] = OrderedDict()
        self._lock = threading.Lock()

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
        if name not in self._uploads and name not in self.index.items["images"].names:
            gone = " (uploads are kept for a while only: send it again)"
            raise Problem(404, f"no such image{gone if name.startswith(UPLOAD) else ''}")

    def encoded(self, name: str) -> Encoded:
        """One image as the matcher reads it."""
        upload = self._uploads.get(name)
        if upload is not None:
            return upload.encoded
        self.check(name)
        return self.index.items["images"].encoded(self._key(name))

    def picture(self, name: str) -> Image.Image:
        """Pixels, from where the index says they are; a `Problem` where there are none."""
        upload = self._uploads.get(name)
        if upload is not None:
            return upload.picture
        self.check(name)
        try:
            return self.index.picture(name)
        except DataError:
            raise Problem(404, "there are no pixels of this image, or they are damaged") from None

    def about(self, name: str) -> dict[str, Any]:
        """Id and captions of an image."""
        self.check(name)
        if name in self._uploads:
            return {"id": name, "captions": []}
        found = self.index.items["images"].about(self._key(name))[0]
        return {"id": name, "captions": found.get("captions", [])}

    def listed(self, offset: int, limit: int) -> list[dict[str, Any]]:
        return [self.about(name) for name in self.ids[offset : offset + limit]]

    def _key(self, name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array([self.index.items["images"].names[name]], dtype=np.int64)
