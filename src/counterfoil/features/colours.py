"""Colours by name, softly: how much of each focal colour a pixel has."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

# Focal colours that people name alike, with the tones that photographs are full of.
FOCAL = np.array(
    [
        (215, 40, 40),  # red
        (130, 30, 35),  # dark red
        (240, 140, 40),  # orange
        (245, 210, 60),  # yellow
        (60, 150, 70),  # green
        (40, 80, 50),  # dark green
        (180, 215, 150),  # pale green
        (70, 190, 200),  # cyan
        (190, 220, 240),  # pale blue
        (50, 110, 200),  # blue
        (35, 50, 100),  # navy
        (130, 75, 170),  # purple
        (240, 140, 180),  # pink
        (130, 85, 50),  # brown
        (235, 195, 160),  # tan
        (40, 40, 45),  # black
        (110, 112, 120),  # grey
        (195, 195, 200),  # pale grey
        (250, 250, 245),  # white
    ],
    dtype=np.float32,
)
_LEVELS = 32
_SOFTNESS = 42.0


def cell_of(pixels: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Each pixel's row of `soft_names`."""
    level = (pixels >> 3).astype(np.int64)
    cells: NDArray[np.int64] = (level[..., 0] * _LEVELS + level[..., 1]) * _LEVELS + level[..., 2]
    return cells


@lru_cache(maxsize=1)
def soft_names() -> NDArray[np.float32]:
    """[cells, colours]: shares of the focal colours, each row summing to one."""
    axis = np.arange(_LEVELS, dtype=np.float32) * (256 / _LEVELS) + 128 / _LEVELS
    red, green, blue = np.meshgrid(axis, axis, axis, indexing="ij")
    rgb = np.stack([red.ravel(), green.ravel(), blue.ravel()], axis=1)
    far = _opponent(rgb)[:, None] - _opponent(FOCAL)[None]
    shares = np.exp(-(far**2).sum(axis=2) / _SOFTNESS**2) + 1e-9
    table: NDArray[np.float32] = (shares / shares.sum(axis=1, keepdims=True)).astype(np.float32)
    return table


@lru_cache(maxsize=1)
def _hard_names() -> NDArray[np.int64]:
    return soft_names().argmax(axis=1)


def names_of(pixels: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Index of the nearest focal colour of each pixel."""
    return _hard_names()[cell_of(pixels)]


def _opponent(rgb: NDArray[np.float32]) -> NDArray[np.float32]:
    """Lightness, red against green, yellow against blue: hue weighs more than lightness."""
    red, green, blue = rgb[:, 0], rgb[:, 1], rgb[:, 2]
    light = (red + green + blue) / 3
    return np.stack([0.8 * light, red - green, 0.7 * ((red + green) / 2 - blue)], axis=1)
