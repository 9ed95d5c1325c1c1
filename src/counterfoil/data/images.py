"""Where an image's pixels are: a file, a row of an array, or a member of a tar shard."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from counterfoil.data.arrays import ArrayFile
from counterfoil.errors import DataError
from counterfoil.reading import IMAGE_BYTES, IMAGE_PIXELS, open_regular, read_bytes

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "MPO", "AVIF", "PPM")
_TOO_LARGE = f"images have at most {IMAGE_PIXELS / 1e6:.0f} million pixels: make it smaller"


class ImageRef(Protocol):
    """An image that can be opened when it is needed."""

    @property
    def name(self) -> str:
        """File name with extension, for reports and conversion."""
        ...

    def read(self) -> bytes:
        """The encoded bytes (JPEG, PNG …), exactly as stored."""
        ...


@dataclass(frozen=True)
class FileImage:
    """An image file on disk; ``label`` is its name where the file could not keep it."""

    path: Path
    label: str | None = None

    @property
    def name(self) -> str:
        return self.label or self.path.name

    def read(self) -> bytes:
        try:
            return read_bytes(self.path, IMAGE_BYTES)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror})") from None


@dataclass(frozen=True)
class MemberImage:
    """A member of an uncompressed tar archive, by byte range."""

    archive: Path
    name: str
    offset: int
    size: int

    def read(self) -> bytes:
        if self.size > IMAGE_BYTES:
            raise DataError(
                f"{self.archive}: {self.name} has {self.size} bytes, an image has at most "
                f"{IMAGE_BYTES}"
            )
        try:
            with open_regular(self.archive) as file:
                file.seek(self.offset)
                data = file.read(self.size)
        except OSError as error:
            raise DataError(f"{self.archive}: cannot be read ({error.strerror})") from None
        if len(data) < self.size:
            raise DataError(f"{self.archive}: truncated inside {self.name}")
        return data


@dataclass(frozen=True)
class RowImage:
    """A row [height, width, 3] of a uint8 array file."""

    array: ArrayFile
    row: int

    @property
    def name(self) -> str:
        return f"{self.row:08d}.png"

    def read(self) -> bytes:
        buffer = io.BytesIO()
        Image.fromarray(self.array.row(self.row)).save(buffer, format="PNG")
        return buffer.getvalue()


@dataclass(frozen=True)
class MissingImage:
    """An image that its data set names but does not have; ``sought`` is the path it would have."""

    name: str
    sought: str = ""

    def read(self) -> bytes:
        raise DataError(f"{self.name}: the data set names this image but does not have it")


def open_image(ref: ImageRef) -> Image.Image:
    """Decode to upright RGB; a file that is not a whole image is a `DataError` that names it.

    Of an animation, the first frame. What is transparent becomes white. Deep greys keep their
    highest bits. A picture of more than `IMAGE_PIXELS` pixels is refused before it is decoded.
    """
    data = ref.read()
    try:
        with Image.open(io.BytesIO(data), formats=image_formats()) as image:
            _check_size(ref.name, *image.size)
            image.load()
            return _to_rgb(_upright(image))
    except DataError:
        raise
    except UnidentifiedImageError:
        known = ", ".join(name for name in image_formats() if name != "MPO")
        raise DataError(f"{ref.name}: not an image of a known format ({known})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise DataError(f"{ref.name}: refused, {_TOO_LARGE}") from None
    except Exception as error:  # damaged files make decoders raise nearly anything
        raise DataError(f"{ref.name}: not a readable image ({error})") from None


@cache
def image_formats() -> tuple[str, ...]:
    """Formats that are read, of data sets and of uploads, as far as this Pillow has them.

    Pillow knows more, but some of those start other programs or have many bugs.
    """
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _check_size(name: str, width: int, height: int) -> None:
    if width * height > IMAGE_PIXELS:
        raise DataError(f"{name}: {width} × {height} pixels, refused, {_TOO_LARGE}")


def _upright(image: Image.Image) -> Image.Image:
    """Turned as its camera says; a note that cannot be read is no reason to lose the picture."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # as above
        return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F" or image.mode.startswith("I"):
        return _from_deep(image)
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _from_deep(image: Image.Image) -> Image.Image:
    """Greys of more than eight bits; Pillow alone would turn nearly all of them white."""
    values = np.nan_to_num(np.asarray(image, dtype=np.float64), posinf=0.0, neginf=0.0)
    least, most = float(values.min(initial=0.0)), float(values.max(initial=0.0))
    if image.mode == "F" and least >= 0 and most <= 1:
        top = 1.0
    else:
        top = next((top for top in (255.0, 65535.0) if most <= top), most)
        top = 65535.0 if image.mode.startswith("I;16") else top
    grey = ((values - least) * (255 / max(top - least, 1e-12))).round().clip(0, 255)
    return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
