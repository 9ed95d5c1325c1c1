"""How a JPEG is stored: how many scans it has, and whether it can be decoded row by row.

libjpeg decodes every scan over the whole picture and accepts the same scan any number of times, so
that a few hundred kilobytes can take minutes. With several scans it also holds all coefficients of
the picture, six bytes or more per pixel, whatever the size it decodes to.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_SCANS = 100
"""Progressive photos have about ten."""

MAX_SEGMENTS = 100_000
"""The longest file that is read has 4,000 if they are full."""

_SIGNATURE = b"\xff\xd8\xff"
_END, _SCAN = 0xD9, 0xDA
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # less tables and a reserved one
_SEQUENTIAL = frozenset({0xC0, 0xC1})
# Markers that a segment follows, and the end. Coded pixels hold none of them: there, 0xFF is
# followed by zero or by the number of a restart.
_MARKER = re.compile(rb"\xff([\xc0-\xcf\xd9-\xfe])")


@dataclass(frozen=True)
class JpegScans:
    """``count`` scans; ``is_streamed`` if there is one, which holds all components.

    ``is_excessive`` if no photo has so many scans or segments.
    """

    count: int
    is_streamed: bool
    is_excessive: bool


def is_jpeg(data: bytes) -> bool:
    """Whether this is the start of a JPEG or of an MPO, which is several of them in a row."""
    return data.startswith(_SIGNATURE)


def count_scans(data: bytes) -> JpegScans:
    """Walk the segments of the first picture in a file as libjpeg does, up to its end.

    Thumbnails within segments are skipped, as is what cameras append after the picture. Counting
    stops just above the limits.
    """
    scans = segments = components = 0
    whole = sequential = False
    place = 2
    while scans <= MAX_SCANS and segments <= MAX_SEGMENTS:
        found = _MARKER.search(data, place)
        if found is None or found[1][0] == _END:
            break
        marker, place = found[1][0], found.end()
        body = data[place + 2 : place + 8]
        segments += 1
        if marker in _FRAMES:
            sequential, components = marker in _SEQUENTIAL, body[5] if len(body) == 6 else 0
        elif marker == _SCAN:
            scans += 1
            whole = bool(body) and body[0] == components
        place += max(2, int.from_bytes(data[place : place + 2], "big"))
    return JpegScans(
        scans,
        is_streamed=sequential and whole and scans == 1,
        is_excessive=scans > MAX_SCANS or segments > MAX_SEGMENTS,
    )
