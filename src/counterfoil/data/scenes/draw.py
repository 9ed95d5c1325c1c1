"""A scene as a picture."""

from __future__ import annotations

from collections.abc import Callable

from PIL import Image, ImageDraw

from counterfoil.data.scenes import animals, people, surroundings, things
from counterfoil.data.scenes.backdrops import paint
from counterfoil.data.scenes.pen import OVERSAMPLE, Pen, mix
from counterfoil.data.scenes.scene import Box, Scene

SPRITES: dict[str, Callable[[Pen], None]] = {
    **people.SPRITES,
    **animals.SPRITES,
    **surroundings.SPRITES,
    **things.SPRITES,
}


def draw(scene: Scene) -> Image.Image:
    """The scene as an RGB image of 224 by 224 pixels; the same scene gives the same pixels."""
    canvas = paint(scene.backdrop, scene.family)
    pencil = ImageDraw.Draw(canvas)
    for obj in sorted(scene.objects, key=lambda obj: (obj.layer, obj.box[3])):
        for box in sorted(obj.boxes, key=lambda box: box[3]):
            if obj.depth != "sky" and obj.pose not in ("ride", "held"):
                _shadow(canvas, pencil, box)
            pen = Pen(canvas, pencil, box, obj.colour, obj.pattern, obj.flip, obj.pose)
            SPRITES[obj.kind](pen)
    return canvas.reduce(OVERSAMPLE)


def _shadow(canvas: Image.Image, pencil: ImageDraw.ImageDraw, box: Box) -> None:
    """A soft dark patch underfoot, a shade of whatever is there."""
    x1, _, x2, y2 = (value * OVERSAMPLE for value in box)
    inset = 0.06 * (x2 - x1)
    spot = (min(canvas.width - 1, max(0, int(x1 + 2))), min(canvas.height - 1, int(y2)))
    ground = canvas.getpixel(spot)
    if isinstance(ground, tuple):
        shade = mix((ground[0], ground[1], ground[2]), (70, 70, 90), 0.16)
        pencil.ellipse((x1 + inset, y2 - 5, x2 - inset, y2 + 5), fill=shade)
