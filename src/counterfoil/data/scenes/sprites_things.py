"""Sprites of things, vehicles, buildings and plants."""

from __future__ import annotations

from counterfoil.data.scenes.pen import INK, RGB, Pen, mix

_WOOD: RGB = (150, 104, 66)
_METAL: RGB = (92, 94, 104)
_STRING: RGB = (120, 116, 122)

_GLASS: RGB = (190, 222, 236)
_TYRE: RGB = (56, 54, 60)
_HUB: RGB = (208, 208, 212)
_BARK: RGB = (128, 90, 60)
_HULL: RGB = (164, 116, 74)
_LEAF: RGB = (92, 150, 84)
_LIGHT: RGB = (250, 226, 140)


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


THINGS = {
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


def _wheel(pen: Pen, x: float, radius: float) -> None:
    ry = radius * pen.w / pen.h
    y = 1.0 - ry
    pen.ellipse(x - radius, y - ry, x + radius, y + ry, _TYRE)
    pen.ellipse(x - radius * 0.45, y - ry * 0.45, x + radius * 0.45, y + ry * 0.45, _HUB, False)


def car(pen: Pen) -> None:
    pen.polygon([(0.2, 0.44), (0.31, 0.03), (0.66, 0.03), (0.8, 0.44)])
    pen.polygon([(0.26, 0.42), (0.345, 0.12), (0.47, 0.12), (0.47, 0.42)], _GLASS)
    pen.polygon([(0.51, 0.42), (0.51, 0.12), (0.635, 0.12), (0.73, 0.42)], _GLASS)
    pen.rectangle(0.01, 0.4, 0.99, 0.82, radius=0.4)
    pen.ellipse(0.9, 0.46, 0.98, 0.62, _LIGHT)
    pen.line([(0.49, 0.48), (0.49, 0.74)], "edge", 0.01)
    pen.line([(0.53, 0.54), (0.59, 0.54)], "edge", 0.015)
    for x in (0.23, 0.77):
        _wheel(pen, x, 0.125)


def bus(pen: Pen) -> None:
    pen.rectangle(0.0, 0.02, 1.0, 0.87, radius=0.16)
    for i in range(4):
        pen.rectangle(0.06 + 0.17 * i, 0.14, 0.2 + 0.17 * i, 0.42, _GLASS, radius=0.15)
    pen.rectangle(0.76, 0.14, 0.94, 0.78, _GLASS, radius=0.1)
    pen.line([(0.85, 0.15), (0.85, 0.77)], "edge", 0.01)
    pen.rectangle(0.02, 0.52, 0.73, 0.6, "light", outline=False)
    pen.ellipse(0.95, 0.62, 1.0, 0.72, _LIGHT)
    for x in (0.2, 0.68):
        _wheel(pen, x, 0.095)


def bicycle(pen: Pen) -> None:
    for x in (0.2, 0.8):
        ry = 0.2 * pen.w / pen.h
        pen.ring(x - 0.2, 1 - 2 * ry, x + 0.2, 1.0, _TYRE, 0.045)
        pen.ellipse(x - 0.03, 1 - ry - 0.04, x + 0.03, 1 - ry + 0.04, _TYRE, False)
    y = 1 - 0.2 * pen.w / pen.h
    frame = [(0.2, y), (0.36, 0.3), (0.7, 0.28), (0.47, y), (0.2, y)]
    for fill, width in (("edge", 0.085), ("main", 0.055)):
        pen.line(frame, fill, width)
        pen.line([(0.47, y), (0.33, 0.18)], fill, width)
        pen.line([(0.8, y), (0.67, 0.12)], fill, width)
    pen.ellipse(0.23, 0.1, 0.45, 0.2, INK, False)
    pen.line([(0.6, 0.06), (0.68, 0.1), (0.78, 0.04)], INK, 0.045)


def boat(pen: Pen) -> None:
    pen.line([(0.47, 0.0), (0.47, 0.78)], _BARK, 0.04)
    pen.polygon([(0.52, 0.04), (0.52, 0.64), (0.96, 0.64)])
    pen.polygon([(0.42, 0.14), (0.42, 0.64), (0.1, 0.64)])
    pen.polygon([(0.0, 0.72), (1.0, 0.72), (0.84, 1.0), (0.16, 1.0)], _HULL)
    pen.line([(0.06, 0.79), (0.94, 0.79)], mix(_HULL, (255, 255, 255), 0.6), 0.02)


def plane(pen: Pen) -> None:
    pen.polygon([(0.02, 0.06), (0.14, 0.06), (0.26, 0.42), (0.1, 0.46)], "dark")
    pen.polygon([(0.44, 0.42), (0.34, 0.04), (0.43, 0.04), (0.62, 0.42)], "dark")
    pen.ellipse(0.02, 0.28, 1.0, 0.78)
    for i in range(5):
        pen.ellipse(0.26 + 0.1 * i, 0.4, 0.31 + 0.1 * i, 0.52, _GLASS, False)
    pen.polygon([(0.84, 0.36), (0.93, 0.42), (0.95, 0.5), (0.82, 0.5)], _GLASS)
    pen.polygon([(0.42, 0.58), (0.62, 0.58), (0.36, 1.0), (0.27, 1.0)], "light")


def house(pen: Pen) -> None:
    pen.rectangle(0.72, 0.06, 0.83, 0.3, "dark")
    pen.rectangle(0.1, 0.4, 0.9, 1.0)
    pen.polygon([(0.5, 0.0), (1.0, 0.44), (0.0, 0.44)], "dark")
    pen.rectangle(0.42, 0.64, 0.6, 1.0, mix(pen.dark, INK, 0.4))
    for x in (0.17, 0.68):
        pen.rectangle(x, 0.54, x + 0.17, 0.74, _LIGHT)
        pen.line([(x + 0.085, 0.54), (x + 0.085, 0.74)], "edge", 0.012)


def tower(pen: Pen) -> None:
    pen.rectangle(0.12, 0.14, 0.88, 1.0)
    pen.rectangle(0.0, 0.08, 1.0, 0.2)
    for x in (0.0, 0.38, 0.76):
        pen.rectangle(x, 0.0, x + 0.24, 0.1)
    for y in (0.28, 0.46, 0.64):
        pen.rectangle(0.38, y, 0.62, y + 0.09, mix(pen.dark, INK, 0.5), radius=0.4)
    pen.rectangle(0.33, 0.83, 0.67, 1.0, mix(pen.dark, INK, 0.5), radius=0.3)


def tent(pen: Pen) -> None:
    pen.line([(0.5, 0.0), (0.5, 0.12)], _BARK, 0.03)
    pen.polygon([(0.5, 0.06), (1.0, 1.0), (0.0, 1.0)])
    pen.polygon([(0.5, 0.34), (0.66, 1.0), (0.34, 1.0)], mix(pen.dark, INK, 0.6))
    pen.polygon([(0.5, 0.34), (0.34, 1.0), (0.26, 1.0)], "light")


def tree(pen: Pen) -> None:
    pen.polygon([(0.43, 0.5), (0.57, 0.5), (0.62, 1.0), (0.38, 1.0)], _BARK)
    for blob in ((0.0, 0.24, 0.5, 0.62), (0.5, 0.24, 1.0, 0.62), (0.18, 0.0, 0.82, 0.42)):
        pen.ellipse(*blob)
    pen.ellipse(0.18, 0.18, 0.82, 0.62, outline=False)
    for spot in ((0.26, 0.12), (0.62, 0.2), (0.16, 0.38), (0.46, 0.42), (0.76, 0.4)):
        pen.ellipse(spot[0], spot[1], spot[0] + 0.1, spot[1] + 0.05, "dark", outline=False)


def bush(pen: Pen) -> None:
    for blob in ((0.0, 0.34, 0.42, 1.0), (0.58, 0.34, 1.0, 1.0), (0.2, 0.0, 0.8, 0.9)):
        pen.ellipse(*blob)
    pen.ellipse(0.14, 0.36, 0.86, 1.0, outline=False)
    pen.line([(0.1, 0.985), (0.9, 0.985)], "edge", 0.03)
    for spot in ((0.3, 0.3), (0.56, 0.22), (0.16, 0.6), (0.46, 0.6), (0.74, 0.62)):
        pen.ellipse(spot[0], spot[1], spot[0] + 0.1, spot[1] + 0.11, "dark", outline=False)


def flower(pen: Pen) -> None:
    pen.line([(0.5, 0.3), (0.5, 1.0)], _LEAF, 0.1)
    pen.ellipse(0.5, 0.66, 0.92, 0.82, _LEAF)
    pen.ellipse(0.08, 0.74, 0.5, 0.9, _LEAF)
    petals = ((0.5, 0.11), (0.8, 0.24), (0.7, 0.46), (0.3, 0.46), (0.2, 0.24))
    for x, y in petals:
        pen.ellipse(x - 0.22, y - 0.115, x + 0.22, y + 0.115)
    center = (246, 196, 60) if pen.color not in ("yellow", "orange") else (150, 96, 56)
    pen.ellipse(0.34, 0.21, 0.66, 0.39, center)


SURROUNDINGS = {
    "car": car,
    "bus": bus,
    "bicycle": bicycle,
    "boat": boat,
    "plane": plane,
    "house": house,
    "tower": tower,
    "tent": tent,
    "tree": tree,
    "bush": bush,
    "flower": flower,
}
