"""Sprites of things."""

from __future__ import annotations

from counterfoil.data.scenes.pen import INK, RGB, Pen, mix

_WOOD: RGB = (150, 104, 66)
_METAL: RGB = (92, 94, 104)
_STRING: RGB = (120, 116, 122)


def ball(pen: Pen) -> None:
    pen.ellipse(0.02, 0.02, 0.98, 0.98)
    if pen.pattern == "plain":
        pen.ellipse(0.2, 0.16, 0.44, 0.36, "light", outline=False)


def umbrella(pen: Pen) -> None:
    pen.line([(0.5, 0.05), (0.5, 1.0)], _WOOD, 0.045)
    pen.line([(0.5, 0.92), (0.52, 0.99), (0.6, 0.98), (0.62, 0.92)], _WOOD, 0.045)
    pen.slice(0.0, 0.04, 1.0, 1.0, 180, 360)
    for i in range(3):
        x = i / 3
        pen.line([(x + 1 / 6, 0.5), (0.5, 0.05)], "edge", 0.012)
    pen.line([(0.5, 0.0), (0.5, 0.06)], _WOOD, 0.04)


def kite(pen: Pen) -> None:
    pen.line([(0.5, 0.6), (0.4, 0.76), (0.56, 0.86), (0.46, 1.0)], _STRING, 0.03)
    pen.polygon([(0.5, 0.0), (1.0, 0.26), (0.5, 0.66), (0.0, 0.26)])
    pen.line([(0.5, 0.0), (0.5, 0.66)], "edge", 0.03)
    pen.line([(0.0, 0.26), (1.0, 0.26)], "edge", 0.03)
    for x, y in ((0.42, 0.76), (0.54, 0.87)):
        pen.polygon([(x - 0.14, y - 0.04), (x - 0.14, y + 0.04), (x, y)], "dark", outline=False)
        pen.polygon([(x + 0.14, y - 0.04), (x + 0.14, y + 0.04), (x, y)], "dark", outline=False)


def balloon(pen: Pen) -> None:
    pen.line([(0.5, 0.6), (0.44, 0.74), (0.55, 0.88), (0.5, 1.0)], _STRING, 0.04)
    pen.polygon([(0.5, 0.57), (0.38, 0.66), (0.62, 0.66)], "dark")
    pen.ellipse(0.0, 0.0, 1.0, 0.61)
    if pen.pattern == "plain":
        pen.ellipse(0.2, 0.1, 0.42, 0.26, "light", outline=False)


def box(pen: Pen) -> None:
    pen.rectangle(0.0, 0.1, 1.0, 1.0)
    pen.rectangle(0.0, 0.0, 1.0, 0.22, "dark")
    pen.rectangle(0.4, 0.0, 0.6, 0.4, (232, 208, 160))


def chair(pen: Pen) -> None:
    pen.rectangle(0.06, 0.0, 0.2, 1.0, radius=0.3)
    pen.rectangle(0.8, 0.52, 0.94, 1.0, radius=0.3)
    pen.rectangle(0.1, 0.08, 0.18, 0.44, "dark", outline=False)
    pen.rectangle(0.04, 0.48, 1.0, 0.62, radius=0.3)
    pen.line([(0.18, 0.82), (0.82, 0.82)], "edge", 0.06)


def table(pen: Pen) -> None:
    for x in (0.06, 0.84):
        pen.rectangle(x, 0.12, x + 0.1, 1.0, "dark")
    pen.rectangle(0.0, 0.0, 1.0, 0.2, radius=0.2)


def lamp(pen: Pen) -> None:
    pen.line([(0.5, 0.4), (0.5, 0.95)], _METAL, 0.09)
    pen.rectangle(0.2, 0.92, 0.8, 1.0, _METAL, radius=0.4)
    pen.polygon([(0.28, 0.0), (0.72, 0.0), (1.0, 0.46), (0.0, 0.46)])
    pen.ellipse(0.4, 0.42, 0.6, 0.54, (252, 232, 150))


def guitar(pen: Pen) -> None:
    neck = mix(_WOOD, INK, 0.3)
    pen.rectangle(0.43, 0.08, 0.57, 0.56, neck)
    pen.rectangle(0.36, 0.0, 0.64, 0.12, neck, radius=0.3)
    pen.ellipse(0.12, 0.46, 0.88, 0.76)
    pen.ellipse(0.0, 0.62, 1.0, 1.0)
    pen.ellipse(0.14, 0.54, 0.86, 0.8, outline=False)
    pen.ellipse(0.33, 0.62, 0.67, 0.76, INK)
    pen.line([(0.5, 0.1), (0.5, 0.88)], (240, 232, 214), 0.025)
    pen.rectangle(0.32, 0.86, 0.68, 0.9, neck)


SPRITES = {
    "ball": ball,
    "umbrella": umbrella,
    "kite": kite,
    "balloon": balloon,
    "box": box,
    "chair": chair,
    "table": table,
    "lamp": lamp,
    "guitar": guitar,
}
