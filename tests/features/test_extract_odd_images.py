"""Images as they come: damaged, hostile, deep, transparent, turned; each is read or refused."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from counterfoil.core.errors import DataError
from counterfoil.data.images import open_image


@dataclass(frozen=True)
class Bytes:
    """An image that is at hand."""

    data: bytes
    name: str = "odd.img"

    def read(self) -> bytes:
        return self.data


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def read(data: bytes) -> np.ndarray:
    image = open_image(Bytes(data))
    assert image.mode == "RGB"
    return np.asarray(image)


def _ramp() -> np.ndarray:
    return np.linspace(0, 65535, 64 * 64).reshape(64, 64)


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_sixteen_bits_keep_their_highest_eight(format: str) -> None:
    deep = _ramp().astype(np.uint16)
    result = read(encoded(Image.fromarray(deep), format))
    np.testing.assert_allclose(result[..., 0], deep / 257, atol=1)
    dark = read(encoded(Image.fromarray(deep // 300), format))
    assert dark.max() <= 1


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (_ramp().astype(np.int32), _ramp() / 257),
        (_ramp().astype(np.int32) // 257, _ramp() // 257),
        ((_ramp() / 65535).astype(np.float32), _ramp() / 257),
        ((_ramp() / 257).astype(np.float32), _ramp() / 257),
        ((_ramp() - 65535).astype(np.int32), _ramp() / 257),
    ],
)
def test_other_deep_grays_are_scaled_by_their_range(values, expected) -> None:
    result = read(encoded(Image.fromarray(values), "TIFF"))
    np.testing.assert_allclose(result[..., 1], expected, atol=1.5)


def test_a_deep_gray_of_no_number_is_read() -> None:
    values = np.full((4, 4), np.nan, np.float32)
    values[0] = np.inf
    assert read(encoded(Image.fromarray(values), "TIFF")).max() == 0


def test_print_colors_become_screen_colors() -> None:
    result = read(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))
    assert result[..., 0].min() > 200
    assert result[..., 1:].max() < 60


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(mode: str) -> None:
    image = Image.new("RGBA", (6, 6), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 3, 6))
    if mode == "P":
        data = encoded(image.convert("P"), "PNG", transparency=image.convert("P").getpixel((5, 5)))
        assert read(data).shape == (6, 6, 3)
        palette = Image.new("P", (2, 1))
        palette.putpalette([10, 20, 30, 200, 0, 0])
        palette.putpixel((1, 0), 1)
        result = read(encoded(palette, "PNG", transparency=1))
        assert result[0].tolist() == [[10, 20, 30], [255, 255, 255]]
        return
    result = read(encoded(image.convert(mode), "PNG"))
    assert result[:, :3].max() == 0
    assert result[:, 3:].min() == 255


def test_of_an_animation_the_first_frame_is_taken() -> None:
    frames = [Image.new("RGB", (9, 7), color) for color in ("red", "green", "blue")]
    for format in ("GIF", "WEBP", "PNG"):
        data = encoded(frames[0], format, save_all=True, append_images=frames[1:])
        assert np.abs(read(data).reshape(-1, 3).mean(axis=0) - (255, 0, 0)).max() < 4


@pytest.mark.parametrize("turn", range(1, 9))
def test_a_turned_photo_is_set_upright(turn: int) -> None:
    upright = Image.new("RGB", (20, 10), "white")
    upright.paste("black", (0, 0, 8, 4))
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM, 5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }  # fmt: skip
    stored = upright.transpose(undo[turn]) if turn in undo else upright
    exif = Image.Exif()
    exif[0x0112] = turn
    np.testing.assert_array_equal(read(encoded(stored, "PNG", exif=exif)), np.asarray(upright))


def test_a_note_of_the_camera_that_is_damaged_does_not_lose_the_photo() -> None:
    data = encoded(Image.new("RGB", (8, 8), "red"), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff")
    assert read(data).shape == (8, 8, 3)


def _png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def test_a_small_file_that_would_fill_the_memory_is_refused_undecoded() -> None:
    with pytest.raises(DataError, match="refused"):
        open_image(Bytes(_png_header(60_000, 60_000)))


@pytest.mark.parametrize("size", [(1, 1), (3000, 1), (1, 3000)])
def test_the_smallest_and_longest_pictures_are_read(size: tuple[int, int]) -> None:
    assert read(encoded(Image.new("RGB", size), "PNG")).shape == (size[1], size[0], 3)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP"])
@given(cut=st.floats(0, 0.95), flips=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255))))
def test_damage_is_an_error_that_names_the_image_or_no_error(format, cut, flips) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (24, 24, 3), np.uint8)
    whole = encoded(Image.fromarray(pixels), format)
    data = bytearray(whole[: int(len(whole) * (1 - cut))])
    for place, change in flips:
        if data:
            data[int(place * (len(data) - 1))] ^= change
    try:
        outcome = open_image(Bytes(bytes(data))).mode
    except DataError as error:
        outcome = str(error)
    assert outcome == "RGB" or outcome.startswith("odd.img: ")


@pytest.mark.parametrize("data", [b"", b"\0", b"<html>not found</html>", b"\xff\xd8\xff\xe0"])
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(DataError, match=r"odd\.img"):
        open_image(Bytes(data))
