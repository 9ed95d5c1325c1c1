"""Extractor "segments": regions from color and outline, with handcrafted descriptors.

Descriptors cover color, shape, edges, texture and position. Grids are folded, so an object and its
mirror image differ only in position: captions seldom say which way things face.

Legend for array suffixes: R regions, S samples per side, C colors. Every region is sampled on an
S by S grid of its box, so the cost depends on the number of regions, not on their size.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from counterfoil.core.errors import ConfigError
from counterfoil.data.fragments import Fragments
from counterfoil.features.extractors import extractors
from counterfoil.features.regions import FOCAL, TYPES, Regions, cell_of, propose, soft_names

_S = 32
_BINS = 6
_CELLS = 4
_LAGS = ((0, 1), (0, 2), (0, 3), (0, 5), (0, 7), (1, 0), (2, 0), (3, 0), (5, 0), (7, 0))
_LAGS_DIAGONAL = ((3, 3), (5, 5), (6, 4), (6, -4))
_BRIGHTNESS = np.array([0.299, 0.587, 0.114], dtype=np.float32) / 255
_EPSILON = 1e-6

Array = NDArray[np.float32]
DIM = (
    2 * len(FOCAL)  # color shares: all of it, and its flat inside
    + 3 * _CELLS * _CELLS // 2  # mean colors of cells
    + 32
    + 16  # occupancy
    + _BINS * _CELLS * _CELLS  # oriented edges
    + len(_LAGS)
    + len(_LAGS_DIAGONAL)
    + 1  # texture
    + 9  # shape
    + 12  # position
    + 4  # similar objects
    + len(TYPES)
)

VERSION = 1


def describe_regions(pixels: NDArray[np.uint8], regions: Regions) -> Array:
    """Descriptors [R, DIM] of the regions of an image [H, W, 3]."""
    height, width = pixels.shape[:2]
    at_RSS = _samples(regions.boxes, width)
    mask_RSS = _masks(regions, at_RSS)
    gray = (pixels @ _BRIGHTNESS).astype(np.float32)
    strength, bins = _gradients(gray)
    flat = strength < 0.06

    color, inner, layout = _colors(pixels, flat, at_RSS, mask_RSS)
    blocks = [
        color,
        inner,
        layout,
        _occupancy(mask_RSS),
        _edges(strength, bins, at_RSS, mask_RSS),
        # the smallest channel separates a color from its tints, which may be equally bright
        _texture(_least(pixels), at_RSS, mask_RSS * _inside(regions)[at_RSS]),
        _shape(regions.boxes, mask_RSS),
        _position(regions.boxes, mask_RSS, width, height),
        _alike(regions, color),
        np.eye(len(TYPES), dtype=np.float32)[regions.types],
    ]
    out = np.concatenate(blocks, axis=1).astype(np.float32)
    return np.nan_to_num(out, nan=0.0, posinf=4.0, neginf=-4.0).clip(-4, 4)


def _samples(boxes: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Flat pixel indices [R, S, S] of the sampling grids."""
    steps = (np.arange(_S) + 0.5) / _S
    x1, y1, x2, y2 = boxes.T
    xs = (x1[:, None] + steps * (x2 - x1)[:, None]).astype(np.int64)
    ys = (y1[:, None] + steps * (y2 - y1)[:, None]).astype(np.int64)
    at: NDArray[np.int64] = ys[:, :, None] * width + xs[:, None, :]
    return at


def _masks(regions: Regions, at_RSS: NDArray[np.int64]) -> Array:
    flat = regions.maps.reshape(len(regions.maps), -1)
    values = flat[regions.sources[:, None, None], at_RSS]
    inside = (values == regions.labels[:, None, None]) | (regions.labels < 0)[:, None, None]
    mask: Array = inside.astype(np.float32)
    return mask


def _gradients(gray: Array) -> tuple[Array, NDArray[np.int64]]:
    """Strength and direction (of `_BINS`, modulo a half turn) of the slope at each pixel."""
    dx, dy = np.zeros_like(gray), np.zeros_like(gray)
    dx[:, 1:-1] = gray[:, 2:] - gray[:, :-2]
    dy[1:-1] = gray[2:] - gray[:-2]
    angle = np.arctan2(dy, dx) % np.pi
    bins = (angle * (_BINS / np.pi) + 0.5).astype(np.int64) % _BINS
    return np.sqrt(dx * dx + dy * dy), bins


def _mean(values: Array, weights: Array) -> Array:
    """Weighted mean over all but the first and last axis: [R, …, K], [R, …] -> [R, K]."""
    rows = len(values)
    v, w = values.reshape(rows, -1, values.shape[-1]), weights.reshape(rows, 1, -1)
    out: Array = (w @ v)[:, 0] / (w.sum(axis=2) + _EPSILON)
    return out


def _colors(
    pixels: NDArray[np.uint8], flat: NDArray[np.bool_], at_RSS: NDArray[np.int64], mask_RSS: Array
) -> tuple[Array, Array, Array]:
    """Color shares, the same away from edges, and mean colors on a coarse grid."""
    at, mask = at_RSS[:, ::2, ::2], mask_RSS[:, ::2, ::2]
    names = soft_names()[cell_of(pixels).ravel()[at]]
    inside = mask * flat.ravel()[at]
    inside += 1e-3 * mask
    rgb = pixels.reshape(-1, 3)[at].astype(np.float32) / 255 - 0.5
    side = rgb.shape[1] // _CELLS
    grid = (len(at), _CELLS, side, _CELLS, side)
    weights = mask.reshape(grid)
    means = (rgb.reshape(*grid, 3) * weights[..., None]).sum(axis=(2, 4))
    means /= weights.sum(axis=(2, 4))[..., None] + 1.0
    means = means[:, :, : _CELLS // 2] + means[:, :, : _CELLS // 2 - 1 : -1]
    return (
        np.sqrt(_mean(names, mask)),
        np.sqrt(_mean(names, inside)),
        means.reshape(len(at), -1),
    )


def _occupancy(mask_RSS: Array) -> Array:
    """The mask on a folded grid of 8 by 8, and the difference of its two halves."""
    grid = mask_RSS.reshape(-1, 8, _S // 8, 8, _S // 8).mean(axis=(2, 4))
    left, right = grid[:, :, :4], grid[:, :, :3:-1]
    unlike = np.abs(left - right).reshape(-1, 4, 2, 4).mean(axis=2)
    return np.concatenate([(left + right).reshape(-1, 32) / 2, unlike.reshape(-1, 16)], axis=1)


def _edges(
    strength: Array, bins: NDArray[np.int64], at_RSS: NDArray[np.int64], mask_RSS: Array
) -> Array:
    """Oriented edges in a folded grid of cells: the sum and the difference of its halves."""
    cell = np.arange(_S) * _CELLS // _S
    cells = cell[:, None] * _CELLS + cell[None, :]
    count = _CELLS * _CELLS * _BINS
    offsets = np.arange(len(at_RSS))[:, None, None] * count
    slots = offsets + cells * _BINS + bins.ravel()[at_RSS]
    weights = strength.ravel()[at_RSS] * mask_RSS
    summed = np.bincount(slots.ravel(), weights.ravel(), minlength=len(at_RSS) * count)
    grid = np.sqrt(summed.astype(np.float32)).reshape(-1, _CELLS, _CELLS, _BINS)
    mirrored = grid[:, :, ::-1, (-np.arange(_BINS)) % _BINS]
    half = _CELLS // 2
    folded = np.concatenate(
        [
            (grid + mirrored)[:, :, :half].reshape(len(grid), -1),
            np.abs(grid - mirrored)[:, :, :half].reshape(len(grid), -1),
        ],
        axis=1,
    )
    out: Array = 2 * folded / (np.linalg.norm(folded, axis=1, keepdims=True) + _EPSILON)
    return out


def _inside(regions: Regions) -> NDArray[np.bool_]:
    """Pixels whose neighbors two steps away belong to the same object, flattened."""
    objects = regions.maps[0]
    same = np.ones(objects.shape, dtype=bool)
    same[2:] &= objects[2:] == objects[:-2]
    same[:-2] &= objects[2:] == objects[:-2]
    same[:, 2:] &= objects[:, 2:] == objects[:, :-2]
    same[:, :-2] &= objects[:, 2:] == objects[:, :-2]
    return same.ravel()


def _least(pixels: NDArray[np.uint8]) -> Array:
    least = np.minimum(np.minimum(pixels[..., 0], pixels[..., 1]), pixels[..., 2])
    return least.astype(np.float32) / np.float32(255)


def _texture(light: Array, at_RSS: NDArray[np.int64], mask_RSS: Array) -> Array:
    """Mean change of brightness over short steps: stripes, dots, checks.

    The profile over steps is relative to its mean, which comes last.
    """
    at, mask = at_RSS[:, :, ::2], mask_RSS[:, :, ::2]
    out = []
    for dy, dx in (*_LAGS, *_LAGS_DIAGONAL):
        change = np.abs(light - np.roll(light, (-dy, -dx), axis=(0, 1)))
        out.append((change.ravel()[at] * mask).sum(axis=(1, 2)))
    change = np.stack(out, axis=1) / (mask.sum(axis=(1, 2))[:, None] + 1)
    mean = change.mean(axis=1, keepdims=True)
    return np.concatenate([change / (mean + 0.02) - 1, 2 * np.sqrt(mean)], axis=1)


def _shape(boxes: NDArray[np.int64], mask_RSS: Array) -> Array:
    """Aspect, fill, outline, and second and third moments of the mask."""
    w = (boxes[:, 2] - boxes[:, 0]).astype(np.float32)
    h = (boxes[:, 3] - boxes[:, 1]).astype(np.float32)
    steps = np.linspace(-1, 1, _S, dtype=np.float32)
    mass = mask_RSS.sum(axis=(1, 2)) + _EPSILON
    columns, rows = mask_RSS.sum(axis=1) / mass[:, None], mask_RSS.sum(axis=2) / mass[:, None]
    cx, cy = columns @ steps, rows @ steps
    xx, yy = columns @ steps**2 - cx**2, rows @ steps**2 - cy**2
    xy = np.einsum("rij,i,j->r", mask_RSS, steps, steps) / mass - cx * cy
    rim = np.abs(np.diff(mask_RSS, axis=1)).sum(axis=(1, 2))
    rim += np.abs(np.diff(mask_RSS, axis=2)).sum(axis=(1, 2))
    return np.stack(
        [
            np.log(w / h) / 2,
            np.abs(np.log(w / h)) / 2,
            mass / (_S * _S),
            rim / (8 * _S),
            np.abs(cx) * 2,
            cy * 2,
            xx,
            yy,
            np.abs(xy) * 2,
        ],
        axis=1,
    )


def _position(boxes: NDArray[np.int64], mask_RSS: Array, width: int, height: int) -> Array:
    unit = np.array([width, height, width, height], dtype=np.float32)
    x1, y1, x2, y2 = (boxes / unit).T
    area = (x2 - x1) * (y2 - y1)
    filled = area * mask_RSS.mean(axis=(1, 2))
    return np.stack(
        [
            x1,
            y1,
            x2,
            y2,
            (x1 + x2) - 1,
            (y1 + y2) - 1,
            (x2 - x1) * 2,
            (y2 - y1) * 2,
            np.sqrt(area) * 2,
            np.sqrt(filled) * 2,
            np.log(filled + 1e-4) / 4 + 1,
            np.abs(x1 + x2 - 1),
        ],
        axis=1,
    )


def _alike(regions: Regions, color: Array) -> Array:
    """The number of similar objects in the image, one-hot: none, one, two, more."""
    similar = color @ color.T > 0.93
    w = (regions.boxes[:, 2] - regions.boxes[:, 0]).astype(np.float32)
    h = (regions.boxes[:, 3] - regions.boxes[:, 1]).astype(np.float32)
    for side in (w, h):
        ratio = side[:, None] / side[None, :]
        similar &= (ratio > 0.75) & (ratio < 1.34)
    same = regions.types[:, None] == regions.types[None, :]
    others = (similar & same).sum(axis=1) - 1
    return np.eye(4, dtype=np.float32)[np.clip(others, 0, 3)]


@extractors.register("segments")
class Segments:
    """Regions by color and outline with classical descriptors; needs no model and no download."""

    name = "segments"
    dim = DIM

    def __init__(
        self, *, max_fragments: int = 20, side: int = 192, least_share: float = 0.0008
    ) -> None:
        """``side`` is the working size; regions below ``least_share`` of the image are ignored."""
        if max_fragments < 1 or side < 16:
            raise ConfigError(
                "segments: max_fragments must be at least 1 and side at least 16, "
                f"got {max_fragments} and {side}"
            )
        self.max_fragments = max_fragments
        self.side = side
        self.least_share = least_share

    def fingerprint(self) -> str:
        return f"segments {VERSION} {self.max_fragments} {self.side} {self.least_share}"

    def extract(self, image: Image.Image) -> Fragments:
        """The whole image first, then objects and their layers by size."""
        pixels = self._pixels(image)
        height, width = pixels.shape[:2]
        least = max(4, round(self.least_share * height * width))
        regions = propose(pixels, self.max_fragments, least)
        features = describe_regions(pixels, regions)
        scale = np.array([width, height, width, height], dtype=np.float32)
        return Fragments(features, (regions.boxes / scale).astype(np.float32))

    def _pixels(self, image: Image.Image) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """The image at working size: the longer side fixed, the shorter at least a few pixels."""
        image = image.convert("RGB")
        scale = self.side / max(image.size)
        size = (max(8, round(image.width * scale)), max(8, round(image.height * scale)))
        if image.size != size:
            image = image.resize(
                size, Image.Resampling.BOX if scale < 1 else Image.Resampling.BILINEAR
            )
        return np.asarray(image)
