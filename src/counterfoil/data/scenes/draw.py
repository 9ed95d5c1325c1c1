"""Draw a scene: sprites on a pale backdrop."""

from __future__ import annotations

import hashlib
import io
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from PIL import Image, ImageDraw

from counterfoil.data.scenes.pen import OVERSAMPLE, RGB, Pen, mix
from counterfoil.data.scenes.scene import SIZE, Box, Scene
from counterfoil.data.scenes.sprites_living import ANIMALS, PEOPLE
from counterfoil.data.scenes.sprites_things import SURROUNDINGS, THINGS

VARIANTS = 4
_FULL = SIZE * OVERSAMPLE
_HORIZON = round(0.56 * _FULL)

SPRITES: dict[str, Callable[[Pen], None]] = {**PEOPLE, **ANIMALS, **SURROUNDINGS, **THINGS}


def paint(name: str, variant: int) -> Image.Image:
    """A fresh copy of a backdrop, `OVERSAMPLE` times the final size."""
    return _painted(name, variant % VARIANTS).copy()


@lru_cache(maxsize=64)
def _painted(name: str, variant: int) -> Image.Image:
    rng = random.Random(f"backdrop {name} {variant}")
    image = Image.new("RGB", (_FULL, _FULL))
    _BACKDROPS[name](ImageDraw.Draw(image), rng)
    return image


def _gradient(draw: ImageDraw.ImageDraw, top: int, bottom: int, first: RGB, second: RGB) -> None:
    for y in range(top, bottom):
        draw.line((0, y, _FULL, y), fill=mix(first, second, (y - top) / max(1, bottom - top)))


def _hills(draw: ImageDraw.ImageDraw, rng: random.Random, base: int, fill: RGB) -> None:
    phase, height = rng.uniform(0, 6), rng.uniform(10, 20)
    top = [
        (x, base - height * (1.2 + math.sin(x / 90 + phase) + 0.4 * math.sin(x / 41 + 2 * phase)))
        for x in range(0, _FULL + 8, 8)
    ]
    draw.polygon([(0, _FULL), *top, (_FULL, _FULL)], fill=fill)


def _cloud(draw: ImageDraw.ImageDraw, x: float, y: float, size: float, fill: RGB) -> None:
    for dx, dy, r in ((-1.0, 0.15, 0.55), (0.0, -0.1, 0.8), (0.95, 0.12, 0.6), (0.4, 0.25, 0.6)):
        cx, cy, radius = x + dx * size, y + dy * size, r * size
        draw.ellipse(
            (cx - radius * 1.3, cy - radius * 0.6, cx + radius * 1.3, cy + radius * 0.6), fill=fill
        )


def _clouds(draw: ImageDraw.ImageDraw, rng: random.Random, fill: RGB) -> None:
    for _ in range(rng.choice((1, 2, 2))):
        _cloud(draw, rng.uniform(60, _FULL - 60), rng.uniform(30, 130), rng.uniform(18, 30), fill)


def _tufts(draw: ImageDraw.ImageDraw, rng: random.Random, fill: RGB, top: int) -> None:
    for _ in range(26):
        x, y = rng.uniform(0, _FULL), rng.uniform(top, _FULL - 8)
        draw.line((x, y, x - 3, y - 6), fill=fill, width=2)
        draw.line((x, y, x + 3, y - 6), fill=fill, width=2)


def _meadow(draw: ImageDraw.ImageDraw, rng: random.Random) -> None:
    _gradient(draw, 0, _HORIZON, (204, 230, 244), (238, 246, 246))
    _clouds(draw, rng, (248, 251, 252))
    _hills(draw, rng, _HORIZON, (204, 226, 190))
    _gradient(draw, _HORIZON, _FULL, (206, 230, 178), (188, 218, 160))
    _tufts(draw, rng, (176, 208, 148), _HORIZON + 16)


def _park(draw: ImageDraw.ImageDraw, rng: random.Random) -> None:
    _gradient(draw, 0, _HORIZON, (222, 236, 238), (246, 244, 226))
    for x in range(-20, _FULL + 40, 46):
        r = rng.uniform(30, 46)
        y = _HORIZON - r * 0.5
        draw.ellipse((x - r, y - r, x + r, y + r), fill=(206, 224, 200))
    _gradient(draw, _HORIZON, _FULL, (214, 230, 188), (202, 222, 172))
    path = [
        (_FULL * 0.42, _HORIZON),
        (_FULL * 0.52, _HORIZON),
        (_FULL * 0.86, _FULL),
        (_FULL * 0.2, _FULL),
    ]
    draw.polygon(path, fill=(238, 228, 204))


def _beach(draw: ImageDraw.ImageDraw, rng: random.Random) -> None:
    sea = _HORIZON - 44
    _gradient(draw, 0, sea, (196, 228, 246), (244, 246, 238))
    _clouds(draw, rng, (250, 251, 250))
    _gradient(draw, sea, _HORIZON + 70, (150, 206, 222), (196, 232, 232))
    for y in range(sea + 12, _HORIZON + 10, 16):
        for _ in range(4):
            x = rng.uniform(0, _FULL)
            draw.line((x, y, x + 36, y), fill=(206, 236, 238), width=2)
    _hills(draw, rng, _HORIZON + 44, (248, 236, 206))
    _gradient(draw, _HORIZON + 60, _FULL, (248, 236, 206), (242, 224, 186))


def _street(draw: ImageDraw.ImageDraw, rng: random.Random) -> None:
    _gradient(draw, 0, _HORIZON, (222, 228, 240), (244, 240, 236))
    x = -10
    while x < _FULL:
        width, height = rng.randint(56, 96), rng.randint(70, 160)
        tone = rng.choice(((226, 222, 226), (232, 226, 220), (220, 224, 230)))
        draw.rectangle((x, _HORIZON - height, x + width, _HORIZON), fill=tone)
        for wy in range(_HORIZON - height + 14, _HORIZON - 16, 28):
            for wx in range(x + 12, x + width - 14, 24):
                draw.rectangle((wx, wy, wx + 10, wy + 14), fill=mix(tone, (255, 255, 255), 0.5))
        x += width + rng.randint(0, 8)
    draw.rectangle((0, _HORIZON, _FULL, _HORIZON + 30), fill=(230, 226, 220))
    _gradient(draw, _HORIZON + 30, _FULL, (206, 206, 212), (196, 196, 204))
    for x in range(20, _FULL, 92):
        draw.rectangle((x, _FULL - 84, x + 46, _FULL - 78), fill=(236, 236, 236))


def _room(draw: ImageDraw.ImageDraw, rng: random.Random) -> None:
    wall = rng.choice(((244, 232, 220), (228, 236, 232), (236, 230, 242)))
    draw.rectangle((0, 0, _FULL, _HORIZON + 20), fill=wall)
    x = rng.choice((60, 150, 250))
    draw.rectangle((x, 40, x + 120, 150), fill=(252, 250, 246))
    draw.rectangle((x + 8, 48, x + 112, 142), fill=(212, 232, 242))
    draw.rectangle((x + 57, 48, x + 63, 142), fill=(252, 250, 246))
    draw.rectangle((0, _HORIZON + 14, _FULL, _HORIZON + 24), fill=(252, 248, 242))
    _gradient(draw, _HORIZON + 24, _FULL, (232, 212, 188), (222, 198, 170))
    for y in range(_HORIZON + 54, _FULL, 34):
        draw.line((0, y, _FULL, y), fill=(218, 196, 170), width=2)


def _snow(draw: ImageDraw.ImageDraw, rng: random.Random) -> None:
    _gradient(draw, 0, _HORIZON, (196, 214, 234), (226, 232, 242))
    _hills(draw, rng, _HORIZON - 6, (212, 222, 236))
    _hills(draw, rng, _HORIZON + 24, (226, 233, 242))
    _gradient(draw, _HORIZON + 26, _FULL, (226, 233, 242), (212, 223, 236))
    for _ in range(26):
        x, y = rng.uniform(0, _FULL), rng.uniform(0, _HORIZON)
        draw.ellipse((x, y, x + 5, y + 5), fill=(244, 248, 252))


_BACKDROPS: dict[str, Callable[[ImageDraw.ImageDraw, random.Random], None]] = {
    "meadow": _meadow,
    "park": _park,
    "beach": _beach,
    "street": _street,
    "room": _room,
    "snow": _snow,
}


@dataclass(frozen=True)
class DrawnImage:
    """A reference to the image of a scene, drawn at each access."""

    scene: Scene

    @property
    def name(self) -> str:
        """A name that differs for every scene."""
        text = json.dumps(self.scene.as_dict(), sort_keys=True)
        return f"scene-{hashlib.sha256(text.encode()).hexdigest()[:16]}.png"

    def read(self) -> bytes:
        buffer = io.BytesIO()
        draw(self.scene).save(buffer, format="PNG", compress_level=1)
        return buffer.getvalue()


def draw(scene: Scene) -> Image.Image:
    """The scene as an RGB image of 224 by 224 pixels; the same scene gives the same pixels."""
    canvas = paint(scene.backdrop, scene.family)
    pencil = ImageDraw.Draw(canvas)
    for obj in sorted(scene.objects, key=lambda obj: (obj.layer, obj.box[3])):
        for box in sorted(obj.boxes, key=lambda box: box[3]):
            if obj.depth != "sky" and obj.pose not in ("ride", "held"):
                _shadow(canvas, pencil, box)
            pen = Pen(canvas, pencil, box, obj.color, obj.pattern, obj.flip, obj.pose)
            SPRITES[obj.kind](pen)
    return canvas.reduce(OVERSAMPLE)


def _shadow(canvas: Image.Image, pencil: ImageDraw.ImageDraw, box: Box) -> None:
    """A shadow below a sprite: a darker shade of the ground there."""
    x1, _, x2, y2 = (value * OVERSAMPLE for value in box)
    inset = 0.06 * (x2 - x1)
    spot = (min(canvas.width - 1, max(0, int(x1 + 2))), min(canvas.height - 1, int(y2)))
    ground = canvas.getpixel(spot)
    if isinstance(ground, tuple):
        shade = mix((ground[0], ground[1], ground[2]), (70, 70, 90), 0.16)
        pencil.ellipse((x1 + inset, y2 - 5, x2 - inset, y2 + 5), fill=shade)
