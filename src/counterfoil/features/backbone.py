"""Extractors that run a network on pixels: many images at a time, its outputs cells with boxes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from counterfoil.core.errors import ConfigError
from counterfoil.data.fragments import Fragments
from counterfoil.features.views import WHOLE_IMAGE, Box, View, grid_boxes, place

if TYPE_CHECKING:
    import torch

Array = NDArray[np.float32]

Cells = tuple[Array, Array, Array]
"""Features [B, n, D], boxes [B, n, 4], one vector for each whole view [B, D]."""


@dataclass(frozen=True)
class Seen:
    """What a network made of B views.

    ``features`` [B, n, D] with ``boxes`` [B, n, 4] in 0…1 of the view, and ``pooled`` [B, D], one
    vector for each whole view, where the network has such a thing.
    """

    features: Array
    boxes: Array
    pooled: Array | None = None


class Backbone(ABC):
    """A network as an extractor: `views` on decoding threads, `forward` on the device.

    Weights are looked for when they are first needed, so that options can be checked, and finished
    features read, where the weights are not.
    """

    name: ClassVar[str]

    def __init__(self, *, pooled: bool, batch_size: int) -> None:
        """``pooled`` puts the vector of the whole picture first, with the picture as its box.

        Detectors have no such vector, and go without.
        """
        if batch_size < 1:
            raise ConfigError(f"{self.name}: batch_size must be at least 1, got {batch_size}")
        self.pooled = pooled
        self.batch_size = batch_size
        self.device = "cpu"

    @abstractmethod
    def views(self, image: Image.Image) -> list[View]:
        """What the network is shown of an image."""

    @abstractmethod
    def forward(self, pixels: NDArray[np.uint8]) -> Seen:
        """Run the network on views of one size [B, H, W, 3]."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Name, digest of the weights, and every option that changes a number."""

    def vectors(self, pixels: NDArray[np.uint8]) -> Array:
        """One vector [B, D] for the whole of each view, where that is all that is wanted."""
        return self.pooled_rows(self.forward(pixels))

    def to(self, device: str) -> None:
        """Where to run; before the first image."""
        self.device = device

    @property
    def at_once(self) -> int:
        """Views of a batch; small networks take more on a GPU."""
        return self.batch_size

    @property
    def dim(self) -> int:
        return self._shape[1]

    @property
    def max_fragments(self) -> int:
        return self._shape[0]

    @cached_property
    def _shape(self) -> tuple[int, int]:
        """Fragments an image and their width, found by looking at a blank picture."""
        rows, dim = self.extract(Image.new("RGB", (64, 64))).features.shape
        return int(rows), int(dim)

    def extract(self, image: Image.Image) -> Fragments:
        return self.run([self.views(image)])[0]

    def run(self, images: Sequence[list[View]]) -> list[Fragments]:
        """Fragments of images by their views; views of one size share a batch."""
        flat = [view for views in images for view in views]
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, view in enumerate(flat):
            groups[view.pixels.shape].append(index)
        seen: dict[int, Seen] = {}
        for members in groups.values():
            for start in range(0, len(members), self.at_once):
                batch = members[start : start + self.at_once]
                made = self.forward(np.stack([flat[index].pixels for index in batch]))
                seen.update(zip(batch, _rows(made), strict=True))
        numbers = iter(range(len(flat)))
        return [
            self.gather([(view.box, seen[next(numbers)]) for view in views]) for views in images
        ]

    def gather(self, seen: list[tuple[Box, Seen]]) -> Fragments:
        """The fragments of one image from what was made of each of its views."""
        features, boxes = [], []
        for window, made in seen:
            if self.pooled and made.pooled is not None:
                features.append(self.pooled_rows(made))
                boxes.append(np.array([window], dtype=np.float32))
            features.append(made.features[0])
            boxes.append(place(made.boxes[0], window))
        return Fragments(np.concatenate(features), np.concatenate(boxes))

    def pooled_rows(self, made: Seen) -> Array:
        """The vectors [B, D] of whole views."""
        if made.pooled is None:
            raise ConfigError(f"{self.name}: this network has no vector for a whole picture")
        if made.pooled.shape[-1] != made.features.shape[-1]:
            raise ConfigError(
                f"{self.name}: the vector of the whole picture has {made.pooled.shape[-1]} numbers "
                f"but the fragments {made.features.shape[-1]}; set pooled=false"
            )
        return made.pooled


def whole(pooled: Array) -> Seen:
    """One fragment a view: the whole of it."""
    boxes = np.tile(np.array(WHOLE_IMAGE, dtype=np.float32), (len(pooled), 1, 1))
    return Seen(pooled[:, None], boxes, pooled)


def to_network(
    pixels: NDArray[np.uint8], device: str, mean: Sequence[float], std: Sequence[float]
) -> torch.Tensor:
    """Views [B, H, W, 3] as the normalised tensor [B, 3, H, W] that networks take.

    ``mean`` and ``std`` are in units of pixel values, 0…255.
    """
    import torch

    def channels(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device).view(1, -1, 1, 1)

    # Bytes travel to the device: a quarter of what floats would.
    batch = torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2).float()
    return (batch - channels(mean)) / channels(std)


def to_array(values: Any) -> Array:
    """A tensor of any device and precision as float32 here."""
    array: Array = values.detach().float().cpu().numpy()
    return array


def _rows(seen: Seen) -> list[Seen]:
    """A batch taken apart."""
    return [
        Seen(
            seen.features[row : row + 1],
            seen.boxes[row : row + 1],
            None if seen.pooled is None else seen.pooled[row : row + 1],
        )
        for row in range(len(seen.features))
    ]


# Outputs of networks are maps [B, C, H, W] or rows of tokens [B, T, D].


def map_cells(maps: Array) -> Cells:
    """The cells of maps [B, C, H, W], row by row; their mean stands for the whole."""
    batch, _, rows, columns = maps.shape
    cells = np.ascontiguousarray(maps.reshape(batch, -1, rows * columns).transpose(0, 2, 1))
    return cells, _boxes(batch, rows, columns), cells.mean(axis=1)


def token_cells(tokens: Array, shape: tuple[int, ...], patch: Any = None) -> Cells:
    """The patches among tokens [B, T, D] of pictures of a shape (height, width).

    Tokens before the patches (a class token, registers) are not places; the first of them stands
    for the whole where there are any, else the patches' mean.
    """
    batch, count = tokens.shape[:2]
    rows, columns = _grid(count, shape, patch)
    special = count - rows * columns
    cells = np.ascontiguousarray(tokens[:, special:])
    pooled = tokens[:, 0] if special else cells.mean(axis=1)
    return cells, _boxes(batch, rows, columns), pooled


def _grid(count: int, shape: tuple[int, ...], patch: Any) -> tuple[int, int]:
    """Rows and columns of patches: by the patch's size where that fits, else the largest square."""
    if isinstance(patch, int) and patch > 0:
        rows, columns = shape[0] // patch, shape[1] // patch
        # Networks that merge patches have fewer tokens than their first grid, by powers of four.
        while rows * columns > count and min(rows, columns) > 1:
            rows, columns = rows // 2, columns // 2
        if rows * columns <= count:
            return rows, columns
    side = math.isqrt(count)
    return side, side


def _boxes(batch: int, rows: int, columns: int) -> Array:
    return np.broadcast_to(grid_boxes(rows, columns), (batch, rows * columns, 4))
