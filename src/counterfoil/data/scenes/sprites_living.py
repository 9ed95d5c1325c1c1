"""Sprites of animals, facing right, and of people, colored and patterned as what they wear."""

from __future__ import annotations

from counterfoil.data.scenes.pen import INK, RGB, SKIN, Pen, mix

_BEAK: RGB = (240, 150, 50)
_HOOF: RGB = (70, 60, 60)
_PINK: RGB = (236, 170, 170)


def dog(pen: Pen) -> None:
    pen.limb([(0.1, 0.5), (0.03, 0.22)], "main", 0.07)
    for x in (0.17, 0.29, 0.56, 0.67):
        pen.rectangle(x, 0.6, x + 0.1, 1.0, radius=0.4)
    pen.rectangle(0.08, 0.4, 0.76, 0.74, radius=0.5)
    pen.ellipse(0.56, 0.06, 0.9, 0.5)
    pen.rectangle(0.74, 0.24, 1.0, 0.47, radius=0.5)
    pen.ellipse(0.55, 0.05, 0.69, 0.44, "dark")
    pen.ellipse(0.93, 0.23, 1.0, 0.33, INK, outline=False)
    _eye(pen, 0.78, 0.21)


def cat(pen: Pen) -> None:
    pen.limb([(0.25, 0.9), (0.05, 0.8), (0.06, 0.5), (0.13, 0.4)], "main", 0.08)
    pen.ellipse(0.18, 0.42, 0.72, 1.0)
    pen.rectangle(0.5, 0.6, 0.62, 1.0, radius=0.5)
    pen.rectangle(0.63, 0.6, 0.75, 1.0, radius=0.5)
    pen.polygon([(0.42, 0.24), (0.44, 0.0), (0.63, 0.12)])
    pen.polygon([(0.75, 0.12), (0.93, 0.0), (0.95, 0.24)])
    pen.ellipse(0.4, 0.08, 0.98, 0.54)
    _eye(pen, 0.55, 0.27)
    _eye(pen, 0.78, 0.27)
    pen.polygon([(0.65, 0.37), (0.74, 0.37), (0.695, 0.42)], _PINK, outline=False)
    for y in (0.4, 0.45):
        pen.line([(0.77, y), (1.0, y + 0.02)], "edge", 0.01)
        pen.line([(0.62, y), (0.38, y + 0.02)], "edge", 0.01)


def horse(pen: Pen) -> None:
    hair = mix(pen.dark, INK, 0.5)
    pen.limb([(0.11, 0.42), (0.03, 0.55), (0.05, 0.75)], hair, 0.06)
    for x in (0.13, 0.24, 0.58, 0.68):
        pen.rectangle(x, 0.55, x + 0.08, 0.95, radius=0.3)
        pen.rectangle(x - 0.005, 0.92, x + 0.09, 1.0, _HOOF)
    pen.rectangle(0.09, 0.36, 0.77, 0.7, radius=0.5)
    pen.polygon([(0.56, 0.46), (0.73, 0.06), (0.87, 0.12), (0.79, 0.58)])
    pen.polygon([(0.74, 0.05), (0.84, 0.03), (1.0, 0.26), (0.95, 0.35), (0.82, 0.28)])
    pen.polygon([(0.75, 0.09), (0.78, 0.0), (0.82, 0.08)])
    pen.line([(0.73, 0.06), (0.64, 0.2), (0.56, 0.42)], hair, 0.055)
    _eye(pen, 0.85, 0.13, 0.7)


def cow(pen: Pen) -> None:
    spot: RGB = (60, 56, 60) if pen.color == "white" else (246, 244, 238)
    pen.line([(0.06, 0.3), (0.02, 0.5), (0.03, 0.66)], "edge", 0.025)
    for x in (0.12, 0.23, 0.55, 0.66):
        pen.rectangle(x, 0.6, x + 0.09, 0.94, radius=0.2)
        pen.rectangle(x, 0.9, x + 0.09, 1.0, _HOOF)
    pen.ellipse(0.36, 0.66, 0.52, 0.82, _PINK)
    pen.rectangle(0.05, 0.22, 0.79, 0.74, radius=0.35)
    pen.ellipse(0.14, 0.28, 0.34, 0.54, spot, outline=False)
    pen.ellipse(0.42, 0.4, 0.6, 0.66, spot, outline=False)
    pen.polygon([(0.7, 0.14), (0.68, 0.0), (0.77, 0.1)], (236, 226, 200))
    pen.polygon([(0.88, 0.1), (0.97, 0.0), (0.95, 0.14)], (236, 226, 200))
    pen.ellipse(0.61, 0.12, 0.72, 0.26, "dark")
    pen.rectangle(0.69, 0.08, 0.96, 0.54, radius=0.4)
    pen.rectangle(0.69, 0.36, 1.0, 0.58, _PINK, radius=0.5)
    _eye(pen, 0.78, 0.2, 0.8)
    _eye(pen, 0.89, 0.2, 0.8)


def sheep(pen: Pen) -> None:
    face: RGB = (72, 66, 68) if pen.color != "black" else (206, 196, 186)
    for x in (0.2, 0.32, 0.54, 0.65):
        pen.rectangle(x, 0.66, x + 0.08, 1.0, face, radius=0.2)
    puffs = (
        (0.02, 0.3, 0.32, 0.68),
        (0.52, 0.3, 0.84, 0.68),
        (0.12, 0.1, 0.46, 0.5),
        (0.36, 0.08, 0.72, 0.5),
        (0.1, 0.48, 0.42, 0.84),
        (0.38, 0.48, 0.76, 0.84),
    )
    for puff in puffs:
        pen.ellipse(*puff)
    pen.ellipse(0.16, 0.24, 0.72, 0.72, outline=False)
    pen.ellipse(0.72, 0.14, 1.0, 0.6, face)
    pen.ellipse(0.68, 0.06, 0.92, 0.3)
    pen.ellipse(0.9, 0.3, 0.95, 0.37, (250, 250, 250), outline=False)


def rabbit(pen: Pen) -> None:
    pen.ellipse(0.02, 0.68, 0.24, 0.86, "light")
    pen.ellipse(0.1, 0.48, 0.78, 0.99)
    pen.ellipse(0.5, 0.86, 0.9, 1.0)
    pen.ellipse(0.44, 0.0, 0.6, 0.42)
    pen.ellipse(0.66, 0.0, 0.82, 0.42)
    pen.ellipse(0.485, 0.07, 0.555, 0.36, _PINK, outline=False)
    pen.ellipse(0.705, 0.07, 0.775, 0.36, _PINK, outline=False)
    pen.ellipse(0.4, 0.28, 0.96, 0.66)
    _eye(pen, 0.66, 0.42)
    pen.ellipse(0.88, 0.43, 0.97, 0.5, _PINK, outline=False)


def bird(pen: Pen) -> None:
    pen.polygon([(0.22, 0.55), (0.0, 0.4), (0.02, 0.66)], "dark")
    if pen.pose != "fly":
        pen.line([(0.45, 0.8), (0.45, 1.0)], _BEAK, 0.04)
        pen.line([(0.57, 0.8), (0.57, 1.0)], _BEAK, 0.04)
    pen.polygon([(0.86, 0.3), (1.0, 0.42), (0.86, 0.5)], _BEAK)
    pen.ellipse(0.14, 0.34, 0.76, 0.88)
    pen.ellipse(0.56, 0.16, 0.92, 0.62)
    if pen.pose == "fly":
        pen.polygon([(0.3, 0.56), (0.14, 0.0), (0.62, 0.5)], "dark")
    else:
        pen.ellipse(0.2, 0.44, 0.58, 0.74, "dark")
    _eye(pen, 0.75, 0.32)


def duck(pen: Pen) -> None:
    pen.polygon([(0.85, 0.2), (1.0, 0.26), (1.0, 0.34), (0.84, 0.34)], _BEAK)
    for x in (0.4, 0.55):
        pen.line([(x, 0.84), (x, 0.98), (x + 0.09, 0.98)], _BEAK, 0.05)
    pen.polygon([(0.0, 0.42), (0.28, 0.5), (0.16, 0.74)])
    pen.ellipse(0.06, 0.42, 0.8, 0.92)
    pen.rectangle(0.58, 0.2, 0.78, 0.66, radius=0.4, outline=False)
    pen.ellipse(0.54, 0.02, 0.9, 0.44)
    pen.ellipse(0.24, 0.52, 0.6, 0.78, "dark")
    _eye(pen, 0.75, 0.15)


def _eye(pen: Pen, x: float, y: float, size: float = 1.0) -> None:
    if pen.color in ("black", "brown"):
        rx, ry = 5.5 * size / pen.w, 5.5 * size / pen.h
        pen.ellipse(x - rx / 2, y - ry / 2, x + rx, y + ry, (252, 250, 240), outline=False)
    rx, ry = 4.0 * size / pen.w, 4.0 * size / pen.h
    pen.ellipse(x, y, x + rx, y + ry, (40, 36, 40), outline=False)


ANIMALS = {
    "dog": dog,
    "cat": cat,
    "horse": horse,
    "cow": cow,
    "sheep": sheep,
    "rabbit": rabbit,
    "bird": bird,
    "duck": duck,
}


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


PEOPLE = {"man": man, "woman": woman, "boy": boy, "girl": girl}
