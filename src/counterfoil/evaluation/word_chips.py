"""Pictures of an image with sentences under it, each word on its colour: what they share."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

FOR, AGAINST = (22, 163, 74), (220, 38, 38)
INK, FAINT, PAPER = (31, 41, 55), (107, 114, 128), (255, 255, 255)
GROUND, RULE = (243, 244, 246), (229, 231, 235)
WIDTH, MARGIN = 960, 36
IMAGE_HEIGHT = 720
CHIP_HEIGHT, LINE_HEIGHT = 44, 78

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
Colour = tuple[int, int, int]


def colour_of(shade: float, ground: Colour = PAPER) -> Colour:
    """The background of a word of that shade, on paper of the colour ``ground``."""
    strength = 0.85 * abs(shade)
    hue = FOR if shade > 0 else AGAINST
    mixed = [round(g + strength * (h - g)) for g, h in zip(ground, hue, strict=True)]
    return mixed[0], mixed[1], mixed[2]


@dataclass(frozen=True)
class Chip:
    """A word, what stands under it, and its shade from −1 (red) to 1 (green).

    A word that the model does not know has a dotted frame and grey letters.
    """

    word: str
    under: str
    shade: float
    known: bool = True


def draw_chips(draw: ImageDraw.ImageDraw, chips: Sequence[Chip], top: float) -> None:
    """Words from ``top`` on, line by line."""
    for chip, text, x, y, width in _places(chips):
        upper = top + y
        ground = colour_of(chip.shade, GROUND)
        draw.rounded_rectangle((x, upper, x + width, upper + CHIP_HEIGHT), 9, fill=ground)
        if not chip.known:
            _draw_dots(draw, (x, upper, x + width, upper + CHIP_HEIGHT))
        ink = (PAPER if _luminance(ground) < 0.5 else INK) if chip.known else FAINT
        draw.text((x + width / 2, upper + CHIP_HEIGHT / 2), text, ink, font(26), "mm")
        draw.text((x + width / 2, upper + CHIP_HEIGHT + 13), chip.under, FAINT, font(15), "mm")


def _draw_dots(draw: ImageDraw.ImageDraw, box: tuple[float, float, float, float]) -> None:
    """A dotted frame."""
    left, upper, right, lower = map(round, box)
    across = [(x, y) for x in range(left + 4, right - 3, 7) for y in (upper, lower)]
    down = [(x, y) for y in range(upper + 4, lower - 3, 7) for x in (left, right)]
    for x, y in across + down:
        draw.ellipse((x - 1.5, y - 1.5, x + 1.5, y + 1.5), fill=FAINT)


def height_of(chips: Sequence[Chip]) -> int:
    """Of all lines."""
    return int(max((y for _, _, _, y, _ in _places(chips)), default=0.0)) + LINE_HEIGHT


def _places(chips: Sequence[Chip]) -> list[tuple[Chip, str, float, float, float]]:
    """Each word with its text as it fits, where it goes, and how wide it is."""
    places = []
    x, y = float(MARGIN), 0.0
    for chip in chips:
        text = chip.word
        while font(26).getlength(text) > WIDTH - 2 * MARGIN - 20 and len(text) > 1:
            text = text[:-2] + "…"
        width = max(font(26).getlength(text) + 20, 64.0)
        if x + width > WIDTH - MARGIN and x > MARGIN:
            x, y = float(MARGIN), y + LINE_HEIGHT
        places.append((chip, text, x, y, width))
        x += width + 8
    return places


def _luminance(colour: Colour) -> float:
    return (0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]) / 255


def fitted(image: Image.Image) -> Image.Image:
    """An image as large as the page allows."""
    scale = min((WIDTH - 2 * MARGIN) / image.width, IMAGE_HEIGHT / image.height)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.convert("RGB").resize(size, Image.Resampling.LANCZOS)


def png(page: Image.Image) -> bytes:
    buffer = io.BytesIO()
    page.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


_FACES = ("DejaVuSans.ttf", "LiberationSans-Regular.ttf", "Arial.ttf", "arial.ttf", "Helvetica.ttc")
_FONTS: dict[int, Font] = {}


def font(size: int) -> Font:
    """A font with accents and signs where there is one, else the one Pillow brings."""
    if size not in _FONTS:
        _FONTS[size] = _load_font(size)
    return _FONTS[size]


def _load_font(size: int) -> Font:
    for face in _FACES:
        try:
            return ImageFont.truetype(face, size)
        except OSError:
            continue
    return ImageFont.load_default(size)
