"""Image references (file, tar member, array row) and safe decoding to upright RGB."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, JpegImagePlugin, UnidentifiedImageError

from counterfoil.core.errors import DataError
from counterfoil.core.storage.arrays import MAX_BYTES, ArrayFile
from counterfoil.core.storage.reading import (
    ANIMATION_PIXELS,
    IMAGE_BYTES,
    IMAGE_PIXELS,
    JPEG_PIXELS,
    open_regular,
    read_bytes,
)
from counterfoil.core.storage.remote import RemoteFile

MAX_SCANS = 100
"""Limit of JPEG scans; progressive photos have about ten."""

MAX_SEGMENTS = 100_000
"""Limit of JPEG segments; the longest file that is read has 4,000 full ones."""

_SIGNATURE = b"\xff\xd8\xff"
_END, _SCAN = 0xD9, 0xDA
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # without tables and a reserved marker
_SEQUENTIAL = frozenset({0xC0, 0xC1})
# Markers of segments, and the end marker. Coded pixels have none: there, 0xFF is followed by zero
# or by a restart number.
_MARKER = re.compile(rb"\xff([\xc0-\xcf\xd9-\xfe])")

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "MPO", "AVIF", "PPM")
_ORIENTATION = 0x0112
_STRIP_PIXELS = 2**20  # converted at once, so that temporary copies stay small


# libjpeg decodes every scan over the whole picture and accepts any number of repeated scans, so a
# few hundred kilobytes can take minutes. With several scans it also stores all coefficients, at
# least six bytes per pixel at any output size. So scans are counted before decoding.
@dataclass(frozen=True)
class JpegScans:
    """Scans of a JPEG: ``is_streamed`` if a single scan has all components.

    ``is_excessive`` if there are more scans or segments than photos have.
    """

    count: int
    is_streamed: bool
    is_excessive: bool


def is_jpeg(data: bytes) -> bool:
    """Whether data starts like a JPEG, or an MPO (several JPEGs in a row)."""
    return data.startswith(_SIGNATURE)


def count_scans(data: bytes) -> JpegScans:
    """Walk the segments of the first picture in a file as libjpeg does, up to its end.

    Thumbnails inside segments and data after the picture are skipped. Counting stops just above
    the limits.
    """
    scans = segments = components = 0
    whole = sequential = False
    offset = 2
    while scans <= MAX_SCANS and segments <= MAX_SEGMENTS:
        match = _MARKER.search(data, offset)
        if match is None or match[1][0] == _END:
            break
        marker, offset = match[1][0], match.end()
        body = data[offset + 2 : offset + 8]
        segments += 1
        if marker in _FRAMES:
            sequential, components = marker in _SEQUENTIAL, body[5] if len(body) == 6 else 0
        elif marker == _SCAN:
            scans += 1
            whole = bool(body) and body[0] == components
        offset += max(2, int.from_bytes(data[offset : offset + 2], "big"))
    return JpegScans(
        scans,
        is_streamed=sequential and whole and scans == 1,
        is_excessive=scans > MAX_SCANS or segments > MAX_SEGMENTS,
    )


class ImageRef(Protocol):
    """A reference to an image that is read on demand."""

    @property
    def name(self) -> str:
        """File name with extension, for reports and conversion."""
        ...

    def read(self) -> bytes:
        """The encoded bytes (JPEG, PNG …), exactly as stored."""
        ...


@dataclass(frozen=True)
class FileImage:
    """An image file on disk; ``label`` is the image's name if the file has another."""

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
    """A member of an uncompressed tar archive, on disk or remote, by byte range."""

    archive: Path | RemoteFile
    name: str
    offset: int
    size: int

    def read(self) -> bytes:
        if self.size > IMAGE_BYTES:
            raise DataError(
                f"{self.archive}: {self.name} has {self.size} bytes, an image has at most "
                f"{IMAGE_BYTES}"
            )
        if isinstance(self.archive, RemoteFile):
            return self.archive.read(self.offset, self.size)
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
    """An image that its data set names but does not have; ``sought`` is the path in the data set.

    ``folders`` are those that were searched; ``hint`` says what is there instead.
    """

    name: str
    sought: str = ""
    folders: tuple[str, ...] = ()
    hint: str = ""

    @property
    def looked_in(self) -> str:
        """The searched folders, as the end of a message."""
        return f"looked in {', '.join(self.folders)}" if self.folders else "no folder to look in"

    def read(self) -> bytes:
        raise DataError(f"{self.name}: the data set names this image but does not have it")


def open_image(ref: ImageRef) -> Image.Image:
    """Decode to upright RGB; a file that is not a whole image raises a `DataError`.

    An animation gives its first frame. Transparent pixels become white. Grays of more than eight
    bits keep their highest bits. An image with too many pixels is refused before it is decoded. A
    JPEG of more than `IMAGE_PIXELS` is decoded at a half, quarter or eighth of its sides.
    """
    data = ref.read()
    if not data:
        raise DataError(f"{ref.name}: the file is empty; copy or download it again")
    try:
        with _open_header(data) as image:
            scans = count_scans(data) if is_jpeg(data) else None
            _check_header(ref.name, image, scans)
            if scans is not None:
                _reduce(image)
            image.load()
            return to_upright_rgb(image)
    except DataError:
        raise
    except UnidentifiedImageError:
        known = ", ".join(name for name in image_formats() if name != "MPO")
        raise DataError(f"{ref.name}: not an image of a known format ({known})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise DataError(f"{ref.name}: refused, {_too_large(IMAGE_PIXELS)}") from None
    except Exception as error:  # damaged files make decoders raise nearly anything
        raise DataError(f"{ref.name}: not a readable image ({error})") from None


def to_upright_rgb(image: Image.Image) -> Image.Image:
    """An open image as upright RGB."""
    return _to_rgb(_upright(image))


def _open_header(data: bytes) -> Image.Image:
    """Read the header. Pillow refuses JPEGs of a size that is allowed here."""
    try:
        return Image.open(io.BytesIO(data), formats=image_formats())
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        if not is_jpeg(data):
            raise
        return JpegImagePlugin.jpeg_factory(io.BytesIO(data))


@cache
def image_formats() -> tuple[str, ...]:
    """The image formats that are read, as far as this Pillow supports them.

    Pillow's other formats are left out: some start other programs or have many bugs.
    """
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _check_header(name: str, image: Image.Image, scans: JpegScans | None) -> None:
    """Refuse an image that takes too much memory or time to decode; ``scans`` are of a JPEG."""
    width, height = image.size
    most = ANIMATION_PIXELS if image.format in ("WEBP", "AVIF") else IMAGE_PIXELS
    if scans is not None and scans.is_streamed:
        most = JPEG_PIXELS
    if width * height > most:
        raise DataError(f"{name}: {width} × {height} pixels, refused, {_too_large(most)}")
    if scans is not None and scans.is_excessive:
        raise DataError(
            f"{name}: refused, a JPEG of more than {MAX_SCANS} scans or {MAX_SEGMENTS:,} segments: "
            "save it again"
        )


def _too_large(most: int) -> str:
    return f"images of this kind have at most {most / 1e6:.0f} million pixels: make it smaller"


def _reduce(image: Image.Image) -> None:
    """Set a JPEG to be decoded at a fraction of its sides if it exceeds `IMAGE_PIXELS`."""
    width, height = image.size
    factor = 1
    while factor < 8 and width * height > IMAGE_PIXELS * factor**2:
        factor *= 2
    if factor > 1:
        image.draft(None, (width // factor, height // factor))


def _upright(image: Image.Image) -> Image.Image:
    """Rotated as EXIF says; unreadable EXIF data are ignored."""
    try:
        turned = image.getexif().get(_ORIENTATION, 1) in range(2, 9)
        return ImageOps.exif_transpose(image) if turned else image
    except Exception:  # damaged EXIF makes Pillow raise nearly anything
        return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F" or image.mode.startswith("I"):
        return _from_deep(image)
    if image.has_transparency_data:
        return _on_white(image)
    return image.convert("RGB")


def _strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Horizontal strips of an image from top to bottom, each with its first row."""
    rows = max(1, _STRIP_PIXELS // max(1, image.width))
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def _on_white(image: Image.Image) -> Image.Image:
    result = Image.new("RGB", image.size)
    for top, strip in _strips(image):
        white = Image.new("RGBA", strip.size, "white")
        composite = Image.alpha_composite(white, strip.convert("RGBA"))
        result.paste(composite.convert("RGB"), (0, top))
    return result


def _from_deep(image: Image.Image) -> Image.Image:
    """Grays of more than eight bits, scaled; Pillow would clip nearly all of them to white."""
    least = most = 0.0
    for _, strip in _strips(image):
        values = _levels(strip)
        least = min(least, float(values.min(initial=0.0)))
        most = max(most, float(values.max(initial=0.0)))
    if image.mode == "F" and least >= 0 and most <= 1:
        top_level = 1.0
    else:
        top_level = next((level for level in (255.0, 65535.0) if most <= level), most)
        top_level = 65535.0 if image.mode.startswith("I;16") else top_level
    factor = 255 / max(top_level - least, 1e-12)
    result = Image.new("RGB", image.size)
    for top, strip in _strips(image):
        gray = ((_levels(strip) - least) * factor).round().clip(0, 255)
        result.paste(Image.fromarray(gray.astype(np.uint8)).convert("RGB"), (0, top))
    return result


def _levels(image: Image.Image) -> NDArray[np.float64]:
    values = np.asarray(image, dtype=np.float64)
    return np.nan_to_num(values, posinf=0.0, neginf=0.0)


# Image references as JSON, so that an index can store them.


def as_json(ref: ImageRef) -> dict[str, Any]:
    """JSON that `as_image` reads; only the name for other kinds of references."""
    if isinstance(ref, FileImage):
        return {"file": str(ref.path.resolve()), "name": ref.name}
    if isinstance(ref, RowImage):
        return {"array": str(ref.array.path.resolve()), "row": ref.row, "name": ref.name}
    # An address is not stored: whoever made an index could make a server open any address.
    if isinstance(ref, MemberImage) and isinstance(ref.archive, Path):
        return {
            "archive": str(ref.archive.resolve()),
            "offset": ref.offset,
            "size": ref.size,
            "name": ref.name,
        }
    return {"name": ref.name}


def as_image(tree: object) -> ImageRef:
    """An image reference from the JSON of `as_json`; `DataError` for anything else.

    The file may come from elsewhere, so types, offsets and sizes are checked.
    """
    if not isinstance(tree, dict):
        raise DataError("it is not known where this image's pixels are")
    name = tree.get("name")
    if name is not None and not isinstance(name, str):
        raise DataError("the name of an image is not text")
    if "file" in tree:
        return FileImage(_path(tree["file"]), name)
    if "array" in tree:
        return _row(ArrayFile(_path(tree["array"])), _number(tree.get("row")))
    if "archive" in tree:
        offset, size = _number(tree.get("offset")), _number(tree.get("size"))
        return MemberImage(_path(tree["archive"]), name or "image", offset, size)
    raise DataError("it is not known where this image's pixels are")


def _path(value: object) -> Path:
    try:
        if isinstance(value, str) and b"\0" not in os.fsencode(value):
            return Path(value)
    except UnicodeEncodeError:
        pass
    raise DataError("the place of an image is not a path")


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < MAX_BYTES:
        raise DataError(f"the place of an image: {value!r:.40} is no row, offset or size")
    return value


def _row(array: ArrayFile, row: int) -> RowImage:
    """A row of an array of images; other arrays and too large images are refused."""
    shape = array.shape
    if array.dtype != "uint8" or len(shape) != 4 or shape[3] != 3 or row >= len(array):
        raise DataError(f"{array.path}: row {row} is no picture (shape {shape}, {array.dtype})")
    if shape[1] * shape[2] > IMAGE_PIXELS:
        raise DataError(f"{array.path}: pictures of {shape[1]} × {shape[2]} pixels are refused")
    return RowImage(array, row)
