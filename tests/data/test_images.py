"""Images that are small as files and large or slow once decoded, and genuinely large photos."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass

import numpy as np
import pytest
from PIL import Image

from counterfoil.core.errors import DataError
from counterfoil.data.images import MAX_SCANS, MAX_SEGMENTS, count_scans, open_image

images = sys.modules["counterfoil.data.images"]


@dataclass(frozen=True)
class Bytes:
    data: bytes
    name: str = "a.jpg"

    def read(self) -> bytes:
        return self.data


def encoded(size: tuple[int, int], format: str = "JPEG", **options: object) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1] // 8 + 1, size[0] // 8 + 1, 3))
    image = Image.fromarray(pixels.astype(np.uint8)).resize(size)
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def with_scans(data: bytes, more: int) -> bytes:
    """A progressive JPEG whose last scan is stored again and again."""
    last = data.rindex(b"\xff\xda")
    assert data.endswith(b"\xff\xd9")
    return data[:-2] + data[last:-2] * more + data[-2:]


@pytest.mark.parametrize("format", ["JPEG", "MPO"])
def test_a_jpeg_that_repeats_its_scans_is_refused_before_it_is_decoded(format, monkeypatch) -> None:
    options = {"save_all": True} if format == "MPO" else {}
    photo = encoded((64, 48), "JPEG", progressive=True)
    few = count_scans(photo).count
    assert 5 < few < 20
    assert open_image(Bytes(with_scans(photo, MAX_SCANS - few))).size == (64, 48)
    if format == "MPO":
        photo = encoded((64, 48), format, progressive=True, **options)
        photo = photo[: photo.index(b"\xff\xd9") + 2]
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    for more in (MAX_SCANS - few + 1, 5000):
        with pytest.raises(DataError, match="more than 100 scans"):
            open_image(Bytes(with_scans(photo, more)))
    with pytest.raises(DataError, match="segments"):
        open_image(Bytes(photo[:2] + b"\xff\xfe\0\2" * (MAX_SEGMENTS + 1) + photo[2:]))


def test_scans_of_thumbnails_and_of_what_a_camera_appends_do_not_count() -> None:
    photo = encoded((64, 48), progressive=True)
    own = count_scans(photo)
    segment = b"\xff\xe1" + (60_000).to_bytes(2, "big") + b"\xff\xda\0\x08" * 14_999 + b"\0\0"
    dressed = photo[:2] + segment + photo[2:] + b"\xff\xda\0\x08" * 5000
    assert count_scans(dressed) == own
    assert open_image(Bytes(dressed)).tobytes() == open_image(Bytes(photo)).tobytes()


@pytest.mark.parametrize("cut", range(0, 400, 7))
def test_the_scans_of_a_damaged_jpeg_are_counted_without_an_error(cut) -> None:
    assert count_scans(encoded((16, 16))[:cut]).count <= 1


def test_restart_markers_within_a_scan_are_no_scans() -> None:
    photo = encoded((64, 48), restart_marker_blocks=1)
    assert b"\xff\xd3" in photo
    assert count_scans(photo).is_streamed
    assert count_scans(photo).count == 1


@pytest.mark.parametrize("turn", [1, 6])
def test_a_photo_of_more_pixels_than_are_decoded_is_read_at_half_its_sides(
    turn, monkeypatch
) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    data = encoded((160, 120), exif=exif)
    whole = open_image(Bytes(data))
    monkeypatch.setattr(images, "IMAGE_PIXELS", 160 * 120)
    assert open_image(Bytes(data)).tobytes() == whole.tobytes()  # decoded in full up to the limit
    for most, factor in ((160 * 120 - 1, 2), (80 * 60, 2), (80 * 60 - 1, 4), (20 * 15, 8)):
        monkeypatch.setattr(images, "IMAGE_PIXELS", most)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most // 2)  # of which Pillow itself refuses
        small = open_image(Bytes(data))
        assert small.size == (whole.width // factor, whole.height // factor)
        expected = np.asarray(whole.resize(small.size, Image.Resampling.BOX), dtype=float)
        assert np.abs(np.asarray(small) - expected).mean() < 8


def test_a_large_jpeg_that_cannot_be_decoded_row_by_row_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(images, "IMAGE_PIXELS", 160 * 120 - 1)
    with pytest.raises(DataError, match="160 × 120 pixels, refused"):
        open_image(Bytes(encoded((160, 120), progressive=True)))
    monkeypatch.setattr(images, "JPEG_PIXELS", 160 * 120 - 1)
    with pytest.raises(DataError, match="160 × 120 pixels, refused"):
        open_image(Bytes(encoded((160, 120))))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "I;16", "I", "F"])
def test_a_picture_converted_in_strips_is_the_one_converted_as_a_whole(mode, monkeypatch) -> None:
    values = np.random.default_rng(1).integers(0, 65536, (50, 40))
    image = {
        "RGBA": lambda: Image.fromarray(values.astype("<u4").view(np.uint8).reshape(50, -1, 4)),
        "LA": lambda: Image.fromarray((values % 256).astype(np.uint8)).convert("LA"),
        "I;16": lambda: Image.fromarray(values.astype(np.uint16)),
        "I": lambda: Image.fromarray(values.astype(np.int32) - 700),
        "F": lambda: Image.fromarray(values.astype(np.float32) / 3),
    }[mode]()
    if mode == "LA":
        image.putalpha(Image.fromarray((values // 256).astype(np.uint8)))
    buffer = io.BytesIO()
    image.save(buffer, "TIFF")
    results = []
    for pixels in (2**20, 40 * 7, 1):
        monkeypatch.setattr(images, "_STRIP_PIXELS", pixels)
        results.append(open_image(Bytes(buffer.getvalue())).tobytes())
    assert results[0] == results[1] == results[2]


def test_an_empty_file_is_called_empty():
    with pytest.raises(DataError, match=r"a\.jpg: the file is empty"):
        open_image(Bytes(b""))
