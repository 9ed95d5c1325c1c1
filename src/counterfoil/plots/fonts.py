"""Text in pictures; characters that the first font lacks, such as emoji, by other system fonts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import groupby
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
Color = tuple[int, int, int]

FACES = ("DejaVuSans.ttf", "LiberationSans-Regular.ttf", "Arial.ttf", "arial.ttf", "Helvetica.ttc")
FALLBACKS = (
    # Chinese, Japanese and Korean: Linux, Windows, macOS
    *("NotoSansCJK-Regular.ttc", "NotoSansCJKsc-Regular.otf", "SourceHanSans-Regular.ttc"),
    *("wqy-microhei.ttc", "wqy-zenhei.ttc", "DroidSansFallbackFull.ttf"),
    *("msyh.ttc", "YuGothM.ttc", "meiryo.ttc", "malgun.ttf", "msgothic.ttc", "simsun.ttc"),
    *("PingFang.ttc", "Hiragino Sans GB.ttc", "AppleSDGothicNeo.ttc", "STHeiti Medium.ttc"),
    # other scripts
    *("NotoSansDevanagari-Regular.ttf", "NotoSansThai-Regular.ttf", "FreeSans.ttf"),
    *("Nirmala.ttc", "Nirmala.ttf", "tahoma.ttf", "Arial Unicode.ttf", "ARIALUNI.TTF"),
    # emoji and signs
    *("NotoEmoji-Regular.ttf", "NotoColorEmoji.ttf", "seguiemj.ttf", "Apple Color Emoji.ttc"),
    *("Symbola.ttf", "Symbola_hint.ttf", "seguisym.ttf", "unifont.ttf", "unifont.otf"),
)
"""Files that are tried in this order for a character that the first font lacks."""

BITMAP_SIZES = (109, 160, 136, 128, 96)
"""Sizes of color fonts, which have pictures of one size instead of outlines."""

NO_CHARACTER = "\U0010ffff"
"""Drawn as what a font has for a missing character: a box, or nothing."""

_SELECTORS = re.compile("[\ufe00-\ufe0f]")
_CLUSTER = re.compile("(?s).(?:[\u0300-\u036f\U0001f3fb-\U0001f3ff\u20e3]|\u200d.)*")
"""A character with accents, a skin tone, or what a joiner adds to it."""


@dataclass(frozen=True)
class Face:
    """A font; drawings of one of another size than wanted are scaled by ``scale``."""

    font: Font
    scale: float = 1.0

    def length(self, text: str) -> float:
        return self.font.getlength(text) * self.scale

    def has(self, text: str) -> bool:
        return all(_has_glyph(self.font, one) for one in text if one != "\u200d")


@cache
def font(size: int) -> Font:
    """A system font with accents and signs if there is one, else Pillow's own."""
    for path in filter(None, map(_file_of, FACES)):
        return ImageFont.truetype(path, size)
    return ImageFont.load_default(size)


@cache
def fallback(name: str, size: int) -> Face | None:
    """A font by its file name; None if the system does not have it."""
    path = _file_of(name)
    if path is None:
        return None
    for actual in (size, *BITMAP_SIZES):
        with suppress(OSError):
            return Face(ImageFont.truetype(path, actual), size / actual)
    return None


@cache
def _file_of(name: str) -> str | None:
    """Where the system has a font; None if it does not.

    Pillow would first look in the working directory, whose files may be anybody's.
    """
    if not Path(name).is_absolute() and Path(name).exists():
        return None
    for size in (16, *BITMAP_SIZES):
        try:
            return str(ImageFont.truetype(name, size).path)
        except OSError as error:
            if "cannot open resource" in str(error):
                return None
    return None


def text_length(text: str, size: int) -> float:
    """Width of a text in pixels."""
    return sum(face.length(part) for face, part in _runs(text, size))


def draw_text(
    page: Image.Image,
    at: tuple[float, float],
    text: str,
    ink: Color,
    size: int,
    anchor: str = "la",
) -> None:
    """Draw one line; ``anchor`` as Pillow's: l, m or r and a (top) or m (middle)."""
    draw, runs = ImageDraw.Draw(page), _runs(text, size)
    if all(face.font is font(size) for face, _ in runs):
        draw.text(at, "".join(part for _, part in runs), ink, font(size), anchor)
        return
    x, y = at
    x -= text_length(text, size) * {"l": 0.0, "m": 0.5, "r": 1.0}[anchor[0]]
    for face, part in runs:
        if face.scale == 1.0:
            draw.text((x, y), part, ink, face.font, f"l{anchor[1]}")
        else:
            _draw_scaled(page, (x, y), part, ink, face, anchor[1])
        x += face.length(part)


def _draw_scaled(
    page: Image.Image, at: tuple[float, float], text: str, ink: Color, face: Face, line: str
) -> None:
    """Draw pictures of a color font at their own size, then scale them."""
    left, upper, right, lower = map(round, face.font.getbbox(text))
    layer = Image.new("RGBA", (max(1, right - left), max(1, lower - upper)), (*ink, 0))
    draw = ImageDraw.Draw(layer)
    draw.text((-left, -upper), text, ink, face.font, embedded_color=True)
    size = [max(1, round(side * face.scale)) for side in layer.size]
    small = layer.resize((size[0], size[1]), Image.Resampling.LANCZOS)
    y = at[1] - (small.height / 2 if line == "m" else 0)
    page.paste(small, (round(at[0]), round(y)), small)


def _runs(text: str, size: int) -> list[tuple[Face, str]]:
    """The text in parts, each with the font that draws it."""
    pairs = _faces_of(_SELECTORS.sub("", text), size)
    return [
        (face, "".join(part for _, part in group))
        for face, group in groupby(pairs, key=lambda pair: pair[0])
    ]


def _faces_of(text: str, size: int) -> Iterator[tuple[Face, str]]:
    first = Face(font(size))
    for cluster in _CLUSTER.findall(text):
        yield (first if first.has(cluster) else _face_for(cluster, size) or first), cluster


@lru_cache(maxsize=4096)
def _face_for(cluster: str, size: int) -> Face | None:
    """The first of the other fonts that has all of some characters; None if there is none."""
    faces = (fallback(name, size) for name in FALLBACKS)
    return next((face for face in faces if face is not None and face.has(cluster)), None)


@lru_cache(maxsize=4096)
def _has_glyph(face: Font, character: str) -> bool:
    """Whether a font draws a character, not the box of a missing one."""
    if character.isspace() or not isinstance(face, ImageFont.FreeTypeFont):
        return True
    return _drawn(face, character) != _drawn(face, NO_CHARACTER)


def _drawn(face: ImageFont.FreeTypeFont, text: str) -> tuple[tuple[int, int], bytes]:
    mask = face.getmask(text)
    return mask.size, bytes(mask)
