"""Sprites of people: their colour and pattern are those of what they wear."""

from __future__ import annotations

from counterfoil.data.scenes.pen import SKIN, Pen

_TROUSERS = (112, 116, 128)
_SHOE = (84, 72, 70)
_HAIR = {
    "man": (86, 62, 48),
    "woman": (150, 92, 52),
    "boy": (112, 76, 48),
    "girl": (208, 160, 84),
}


def man(pen: Pen) -> None:
    _legs(pen, hip=0.56, spread=0.11, trousers=True)
    pen.rectangle(0.27, 0.25, 0.73, 0.6, radius=0.3)
    _arms(pen, 0.29)
    _head(pen, 0.5, 0.125, 0.17, 0.115)
    pen.slice(0.32, 0.0, 0.68, 0.22, 180, 360, _HAIR["man"], outline=False)
    pen.slice(0.36, 0.1, 0.64, 0.25, 20, 160, _HAIR["man"], outline=False)


def woman(pen: Pen) -> None:
    hair = _HAIR["woman"]
    pen.rectangle(0.26, 0.03, 0.74, 0.33, hair, radius=0.45)
    _legs(pen, hip=0.7, spread=0.09, trousers=False)
    pen.polygon([(0.36, 0.25), (0.64, 0.25), (0.66, 0.45), (0.88, 0.8), (0.12, 0.8), (0.34, 0.45)])
    _arms(pen, 0.28)
    _head(pen, 0.5, 0.135, 0.16, 0.11)
    pen.slice(0.29, 0.0, 0.71, 0.22, 180, 360, hair, outline=False)


def boy(pen: Pen) -> None:
    _legs(pen, hip=0.62, spread=0.11, trousers=False)
    pen.rectangle(0.27, 0.58, 0.73, 0.74, _TROUSERS, radius=0.15)
    pen.rectangle(0.26, 0.34, 0.74, 0.64, radius=0.3)
    _arms(pen, 0.39)
    _head(pen, 0.5, 0.195, 0.21, 0.155)
    pen.slice(0.26, 0.0, 0.74, 0.34, 180, 360, _HAIR["boy"])
    pen.rectangle(0.5, 0.13, 0.9, 0.185, _HAIR["boy"], radius=0.5)


def girl(pen: Pen) -> None:
    hair = _HAIR["girl"]
    pen.ellipse(0.06, 0.15, 0.32, 0.36, hair)
    pen.ellipse(0.68, 0.15, 0.94, 0.36, hair)
    _legs(pen, hip=0.74, spread=0.1, trousers=False)
    pen.polygon([(0.37, 0.33), (0.63, 0.33), (0.9, 0.8), (0.1, 0.8)])
    _arms(pen, 0.39)
    _head(pen, 0.5, 0.195, 0.21, 0.155)
    pen.slice(0.27, 0.02, 0.73, 0.32, 180, 360, hair, outline=False)


def _head(pen: Pen, x: float, y: float, rx: float, ry: float) -> None:
    pen.ellipse(x - rx, y - ry, x + rx, y + ry, SKIN)
    for dx in (-0.07, 0.07):
        pen.ellipse(x + dx - 0.025, y, x + dx + 0.025, y + 0.028, (60, 48, 46), outline=False)


def _arms(pen: Pen, shoulder: float) -> None:
    left = [(0.26, shoulder + 0.03), (0.13, shoulder + 0.23)]
    right = [(0.74, shoulder + 0.03), (0.87, shoulder + 0.23)]
    if pen.pose == "hold":
        right = [(0.74, shoulder + 0.03), (0.94, 0.46)]
    if pen.pose == "ride":
        left = [(0.3, shoulder + 0.03), (0.62, shoulder + 0.2)]
        right = [(0.7, shoulder + 0.03), (0.97, shoulder + 0.17)]
    for arm in (left, right):
        pen.limb(arm, SKIN, 0.1)


def _legs(pen: Pen, hip: float, spread: float, trousers: bool) -> None:
    fill = _TROUSERS if trousers else SKIN
    if pen.pose == "ride":
        pen.limb([(0.45, hip), (0.74, hip + 0.1), (0.62, 0.93)], fill, 0.15)
        pen.ellipse(0.52, 0.91, 0.84, 0.99, _SHOE)
        return
    for side in (-1, 1):
        x = 0.5 + side * spread
        pen.limb([(x, hip), (x, 0.92)], fill, 0.14 if trousers else 0.1)
        pen.ellipse(x - 0.1 + 0.03 * side, 0.92, x + 0.1 + 0.03 * side, 1.0, _SHOE)


SPRITES = {"man": man, "woman": woman, "boy": boy, "girl": girl}
