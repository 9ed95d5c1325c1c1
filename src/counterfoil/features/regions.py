"""Region proposals from pixels: the whole image, its objects, and their layers of one color."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.int64]
Mask = NDArray[np.bool_]

_LEVELS = 32
_SOFTNESS = 42.0

# Neighbors this close in every channel belong together.
_FLAT = 22

# Outlines and silhouettes stand out more than this; clouds, hills and shadows do not.
_OUTLINE = 62

# With fewer regions than this, an image is also cut up without regard to objects.
_MIN_PLANES = 6

TYPES = ("whole", "object", "layer", "cell")


def mask_components(mask: Mask) -> Labels:
    """Components of a mask (4-connectivity); -1 outside the mask."""
    labels = connected(mask[:, 1:] & mask[:, :-1], mask[1:] & mask[:-1])
    used = np.zeros(int(labels.max()) + 1, dtype=bool)
    used[labels[mask]] = True
    numbers = np.cumsum(used) - 1
    return np.where(mask, numbers[labels], -1)


def connected(right: Mask, down: Mask) -> Labels:
    """Components of the grid graph with edges ``right`` [H, W-1] and ``down`` [H-1, W].

    Runs along rows are nodes; unions between rows are done all at once, by hooking the larger
    root to the smaller and halving paths until nothing moves.
    """
    height, width = right.shape[0], down.shape[1]
    starts = np.ones((height, width), dtype=bool)
    starts[:, 1:] = ~right
    runs = np.cumsum(starts.ravel()).reshape(height, width) - 1
    upper, lower = runs[:-1][down], runs[1:][down]
    if len(upper):
        fresh = np.ones(len(upper), dtype=bool)
        fresh[1:] = (upper[1:] != upper[:-1]) | (lower[1:] != lower[:-1])
        upper, lower = upper[fresh], lower[fresh]
    roots = _union(int(runs[-1, -1]) + 1, upper, lower)
    numbers = np.cumsum(roots == np.arange(len(roots))) - 1
    labels: Labels = numbers[roots][runs]
    return labels


def _union(count: int, one: Labels, other: Labels) -> Labels:
    parent = np.arange(count)
    while len(one):
        a, b = parent[one], parent[other]
        distinct = a != b
        one, other, a, b = one[distinct], other[distinct], a[distinct], b[distinct]
        np.minimum.at(parent, np.maximum(a, b), np.minimum(a, b))
        while True:
            shorter = parent[parent]
            if np.array_equal(shorter, parent):
                break
            parent = shorter
    return parent


# Focal colors that people name alike, with the tones that photographs are full of.
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
        (110, 112, 120),  # gray
        (195, 195, 200),  # pale gray
        (250, 250, 245),  # white
    ],
    dtype=np.float32,
)


def cell_of(pixels: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Each pixel's row of `soft_names`."""
    level = (pixels >> 3).astype(np.int64)
    cells: NDArray[np.int64] = (level[..., 0] * _LEVELS + level[..., 1]) * _LEVELS + level[..., 2]
    return cells


@lru_cache(maxsize=1)
def soft_names() -> NDArray[np.float32]:
    """[cells, colors]: shares of the focal colors, each row summing to one."""
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
    """Index of the nearest focal color of each pixel."""
    return _hard_names()[cell_of(pixels)]


def _opponent(rgb: NDArray[np.float32]) -> NDArray[np.float32]:
    """Lightness, red against green, yellow against blue: hue weighs more than lightness."""
    red, green, blue = rgb[:, 0], rgb[:, 1], rgb[:, 2]
    light = (red + green + blue) / 3
    return np.stack([0.8 * light, red - green, 0.7 * ((red + green) / 2 - blue)], axis=1)


@dataclass(frozen=True)
class Regions:
    """Proposals: ``boxes`` [R, 4] in pixels (x1, y1, x2, y2), and the pixels of each.

    Region r covers the pixels of ``maps[sources[r]]`` that equal ``labels[r]``; a negative label
    covers its whole box. ``types`` index `TYPES`.
    """

    boxes: NDArray[np.int64]
    types: NDArray[np.int64]
    sources: NDArray[np.int64]
    labels: NDArray[np.int64]
    maps: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.boxes)


def propose(pixels: NDArray[np.uint8], limit: int, least: int) -> Regions:
    """Up to ``limit`` regions of an image [H, W, 3], those of ``least`` pixels or more.

    The whole image, its objects, and their layers. If there are few, as in many photographs, also
    patches of one color and the quarters of the image.
    """
    height, width = pixels.shape[:2]
    names = names_of(pixels)
    objects = _objects(pixels.astype(np.int16), least)
    maps = [objects, np.where(objects >= 0, objects * (int(names.max()) + 1) + names, -1)]
    rows = [_Row(np.array([0, 0, width, height]), "whole")]
    rows += _ranked(maps, 0, "object", least, limit // 2)
    rows += _ranked(maps, 1, "layer", least, limit - len(rows))
    if len(rows) < _MIN_PLANES:
        maps.append(connected(names[:, 1:] == names[:, :-1], names[1:] == names[:-1]))
        rows += _ranked(maps, 2, "layer", 8 * least, limit // 2)
        rows += [_Row(box, "cell") for box in _cells(width, height)]
    rows = rows[:limit]
    return Regions(
        boxes=np.stack([row.box for row in rows]),
        types=np.array([TYPES.index(row.type) for row in rows]),
        sources=np.array([row.source for row in rows]),
        labels=np.array([row.label for row in rows]),
        maps=np.stack(maps),
    )


@dataclass(frozen=True)
class _Row:
    """One proposed region."""

    box: NDArray[np.int64]
    type: str
    source: int = 0
    label: int = -1


def _objects(pixels: NDArray[np.int16], least: int) -> Labels:
    """Components of the foreground; -1 is background."""
    planes = np.ascontiguousarray(pixels.transpose(2, 0, 1))
    right = np.abs(planes[:, :, 1:] - planes[:, :, :-1]).max(axis=0)
    down = np.abs(planes[:, 1:] - planes[:, :-1]).max(axis=0)
    zones = connected(right <= _FLAT, down <= _FLAT)
    areas = np.bincount(zones.ravel())
    rim = np.zeros(len(areas), dtype=bool)
    for edge in (zones[0], zones[-1], zones[:, 0], zones[:, -1]):
        rim[edge] = True
    background = (rim & (areas > 0.01 * zones.size)) | (areas > 0.25 * zones.size)
    background = _spread(background, zones, areas >= least // 2, right, down)
    mask: Mask = ~background[zones]
    labels = mask_components(mask)
    if labels.max() < 0:
        return labels
    small = np.bincount(labels[mask]) < least
    labels[mask & small[labels]] = -1
    return labels


def _spread(
    background: Mask,
    zones: Labels,
    sizeable: Mask,
    right: NDArray[np.int16],
    down: NDArray[np.int16],
) -> Mask:
    """Grow the background by zones that mostly border on it without an outline between.

    Clouds, hills and distant houses then belong to it; a pale object with a dark outline does not.
    """
    one = np.concatenate([zones[:, :-1].ravel(), zones[:-1].ravel()])
    other = np.concatenate([zones[:, 1:].ravel(), zones[1:].ravel()])
    step = np.concatenate([right.ravel(), down.ravel()])
    distinct = one != other
    one, other, soft = one[distinct], other[distinct], step[distinct] <= _OUTLINE
    count = len(background)
    border = np.bincount(one, minlength=count) + np.bincount(other, minlength=count)
    for _ in range(3):
        touching = np.bincount(one[soft & background[other]], minlength=count)
        touching += np.bincount(other[soft & background[one]], minlength=count)
        grown = background | (sizeable & (touching > 0.4 * border))
        if np.array_equal(grown, background):
            break
        background = grown
    return background


def _ranked(maps: list[Labels], source: int, kind: str, least: int, limit: int) -> list[_Row]:
    """The labels of a map that cover most, largest first, and their boxes."""
    labels = maps[source]
    inside = labels >= 0
    if limit <= 0 or not inside.any():
        return []
    rows, columns = np.nonzero(inside)
    values = labels[inside]
    areas = np.bincount(values)
    order = np.argsort(-areas, kind="stable")[:limit]
    order = order[areas[order] >= least]
    size = len(areas)
    x1, y1 = np.full(size, labels.shape[1]), np.full(size, labels.shape[0])
    x2, y2 = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    np.minimum.at(x1, values, columns)
    np.minimum.at(y1, values, rows)
    np.maximum.at(x2, values, columns + 1)
    np.maximum.at(y2, values, rows + 1)
    boxes = np.stack([x1, y1, x2, y2], axis=1)
    return [_Row(boxes[label], kind, source, int(label)) for label in order]


def _cells(width: int, height: int) -> list[NDArray[np.int64]]:
    """Quarters of the image and its center, for images without objects."""
    middle_x, middle_y = max(1, width // 2), max(1, height // 2)
    left, top = min(middle_x, width - 1), min(middle_y, height - 1)
    return [
        np.array([0, 0, middle_x, middle_y]),
        np.array([left, 0, width, middle_y]),
        np.array([0, top, middle_x, height]),
        np.array([left, top, width, height]),
        np.array(
            [width // 4, height // 4, max(1, width - width // 4), max(1, height - height // 4)]
        ),
    ]
