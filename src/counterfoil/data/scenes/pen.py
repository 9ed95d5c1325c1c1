"""A pen that draws in the unit square of a sprite: (0, 0) top left, (1, 1) bottom right."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from PIL import Image, ImageDraw

from counterfoil.data.scenes.scene import Box
from counterfoil.data.scenes.vocabulary import PALETTE

RGB = tuple[int, int, int]
Point = tuple[float, float]

# Images are drawn larger by this factor and averaged down, for smooth edges.
OVERSAMPLE = 2
_TILE = 288
INK: RGB = (62, 58, 66)
SKIN: RGB = (240, 196, 160)


def mix(one: RGB, other: RGB, share: float) -> RGB:
    """``share`` of ``other`` in ``one``."""
    r, g, b = (round(a + (c - a) * share) for a, c in zip(one, other, strict=True))
    return r, g, b


class Pen:
    """Draws one sprite into its box; ``fill="main"`` carries the object's color and pattern."""

    def __init__(
        self,
        canvas: Image.Image,
        draw: ImageDraw.ImageDraw,
        box: Box,
        color: str,
        pattern: str = "plain",
        flip: bool = False,
        pose: str = "stand",
    ) -> None:
        self.canvas, self.draw = canvas, draw
        self.x, self.y = box[0] * OVERSAMPLE, box[1] * OVERSAMPLE
        self.w = (box[2] - box[0]) * OVERSAMPLE
        self.h = (box[3] - box[1]) * OVERSAMPLE
        self.color, self.pattern, self.flip, self.pose = color, pattern, flip, pose
        self.main: RGB = PALETTE[color]
        self.dark = mix(self.main, INK, 0.42 if color != "white" else 0.3)
        self.light = mix(self.main, (255, 255, 255), 0.5)
        self.edge = mix(self.main, INK, 0.72 if color != "black" else 0.2)
        self.stroke = 2

    def rgb(self, fill: str | RGB) -> RGB:
        if isinstance(fill, tuple):
            return fill
        named: RGB = getattr(self, fill)
        return named

    def _points(self, points: Sequence[Point]) -> list[Point]:
        if self.flip:
            return [(self.x + (1 - px) * self.w, self.y + py * self.h) for px, py in points]
        return [(self.x + px * self.w, self.y + py * self.h) for px, py in points]

    def _corners(self, x1: float, y1: float, x2: float, y2: float) -> list[Point]:
        (ax, ay), (bx, by) = self._points([(x1, y1), (x2, y2)])
        return [(min(ax, bx), min(ay, by)), (max(ax, bx), max(ay, by))]

    def _outline(self, fill: str | RGB, outline: bool) -> RGB | None:
        if not outline:
            return None
        return self.edge if isinstance(fill, str) else mix(fill, INK, 0.55)

    def polygon(
        self, points: Sequence[Point], fill: str | RGB = "main", outline: bool = True
    ) -> None:
        self._shape("polygon", self._points(points), (), fill, outline)

    def ellipse(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        fill: str | RGB = "main",
        outline: bool = True,
    ) -> None:
        self._shape("ellipse", self._corners(x1, y1, x2, y2), (), fill, outline)

    def rectangle(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        fill: str | RGB = "main",
        radius: float = 0.0,
        outline: bool = True,
    ) -> None:
        """``radius`` as a share of the shorter side."""
        (ax, ay), (bx, by) = corners = self._corners(x1, y1, x2, y2)
        corner = radius * min(bx - ax, by - ay)
        self._shape("rounded_rectangle", corners, (corner,), fill, outline)

    def slice(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        start: float,
        end: float,
        fill: str | RGB = "main",
        outline: bool = True,
    ) -> None:
        """A slice of an ellipse; angles in degrees, clockwise from the right."""
        if self.flip:
            start, end = 180 - end, 180 - start
        self._shape("pieslice", self._corners(x1, y1, x2, y2), (start, end), fill, outline)

    def _shape(
        self,
        method: str,
        points: list[Point],
        arguments: tuple[float, ...],
        fill: str | RGB,
        outline: bool,
    ) -> None:
        """Draw a filled shape by a method of `ImageDraw`; ``points`` are in pixels."""
        edge = self._outline(fill, outline)
        draw = getattr(self.draw, method)
        if fill == "main" and self.pattern != "plain":
            self._textured(method, points, arguments)
            draw(points, *arguments, outline=edge, width=self.stroke)
        else:
            draw(points, *arguments, fill=self.rgb(fill), outline=edge, width=self.stroke)

    def ring(
        self, x1: float, y1: float, x2: float, y2: float, fill: str | RGB, width: float
    ) -> None:
        """The outline of an ellipse; ``width`` as a share of the sprite's width."""
        corners = self._corners(x1, y1, x2, y2)
        self.draw.ellipse(corners, outline=self.rgb(fill), width=max(2, round(width * self.w)))

    def line(self, points: Sequence[Point], fill: str | RGB, width: float) -> None:
        """``width`` as a share of the sprite's width."""
        self.draw.line(
            self._points(points),
            fill=self.rgb(fill),
            width=max(2, round(width * self.w)),
            joint="curve",
        )

    def limb(self, points: Sequence[Point], fill: str | RGB, width: float) -> None:
        """A line with round ends and an outline: an arm, a leg."""
        thick = max(3, round(width * self.w))
        edge = mix(self.rgb(fill), INK, 0.55)
        spots = self._points(points)
        for color, wide in ((edge, thick + 3), (self.rgb(fill), thick)):
            self.draw.line(spots, fill=color, width=wide, joint="curve")
            for px, py in spots:
                r = wide / 2
                self.draw.ellipse((px - r, py - r, px + r, py + r), fill=color)

    def _textured(self, method: str, points: list[Point], arguments: tuple[float, ...]) -> None:
        """Fill a shape with the object's pattern."""
        xs, ys = [p[0] for p in points], [p[1] for p in points]
        left, top = int(min(xs)), int(min(ys))
        width = min(_TILE, int(max(xs)) - left + 2)
        height = min(_TILE, int(max(ys)) - top + 2)
        mask = Image.new("L", (width, height))
        moved = [(x - left, y - top) for x, y in points]
        getattr(ImageDraw.Draw(mask), method)(moved, *arguments, fill=255)
        tile = _tile(self.color, self.pattern).crop((0, 0, width, height))
        self.canvas.paste(tile, (left, top), mask)


@lru_cache(maxsize=64)
def _tile(color: str, pattern: str) -> Image.Image:
    """A tile of a pattern in a color."""
    main = PALETTE[color]
    if color == "white":
        second = (196, 198, 206)
    elif color in ("yellow", "pink", "orange"):
        second = mix(main, (255, 255, 255), 0.82)
    else:
        second = mix(main, (255, 255, 255), 0.7)
    sheet = Image.new("RGB", (_TILE, _TILE), main)
    draw = ImageDraw.Draw(sheet)
    if pattern == "striped":
        for y in range(5, _TILE, 16):
            draw.rectangle((0, y, _TILE, y + 6), fill=second)
    elif pattern == "dotted":
        for row, y in enumerate(range(2, _TILE, 14)):
            for x in range(1 + 9 * (row % 2), _TILE, 18):
                draw.ellipse((x, y, x + 9, y + 9), fill=second)
    elif pattern == "checked":
        for row, y in enumerate(range(0, _TILE, 11)):
            for x in range(11 * (row % 2), _TILE, 22):
                draw.rectangle((x, y, x + 10, y + 10), fill=second)
    return sheet
