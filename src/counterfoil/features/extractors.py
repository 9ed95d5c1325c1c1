"""Extractors of image fragments: the protocol, the registry, and the base of neural extractors."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from counterfoil.core.errors import ConfigError
from counterfoil.core.registry import Registry
from counterfoil.data.fragments import Fragments
from counterfoil.features.views import WHOLE_IMAGE, Box, View, boxes_in_image, grid_boxes

if TYPE_CHECKING:
    import torch

Array = NDArray[np.float32]


Cells = tuple[Array, Array, Array]
"""Features [B, n, D], boxes [B, n, 4], one vector per view [B, D]."""


class Extractor(Protocol):
    """Extracts up to ``max_fragments`` fragments of ``dim`` numbers from an RGB image."""

    @property
    def name(self) -> str: ...

    @property
    def dim(self) -> int: ...

    @property
    def max_fragments(self) -> int: ...

    def fingerprint(self) -> str:
        """A text that differs whenever the same image would give other fragments."""
        ...

    def extract(self, image: Image.Image) -> Fragments:
        """At least one fragment, boxes in 0…1, every number finite."""
        ...


class ExtractorRegistry(Registry[Callable[..., Extractor]]):
    """Extractors by name, or by a name with options as `full_name` writes it.

    Features on disk store such a name, so that a model trained on them extracts the same features
    from a new photo.
    """

    def create(self, name: str, options: Mapping[str, Any], *args: Any, where: str = "") -> Any:
        plain, own = split_full_name(name)
        return super().create(plain, {**own, **options}, *args, where=where)


def full_name(name: str, options: Mapping[str, Any]) -> str:
    """An extractor and its options in one line.

    >>> full_name("efficientnet-lite", {"variant": 1}), full_name("segments", {})
    ('efficientnet-lite {"variant": 1}', 'segments')
    """
    if not options:
        return name
    return f"{name} {json.dumps(dict(options), sort_keys=True, default=str)}"


SHORT = {"timm": "model", "transformers": "model", "pixels": "model", "onnx": "path"}
"""The option that a colon sets, as in ``timm:resnet50``."""


def split_full_name(text: str) -> tuple[str, dict[str, Any]]:
    """The parts of a `full_name`; a text that is not one is a name without options.

    >>> split_full_name('efficientnet-lite {"variant": 1}')
    ('efficientnet-lite', {'variant': 1})
    >>> split_full_name("timm:resnet50")
    ('timm', {'model': 'resnet50'})
    """
    start, brace, rest = text.partition(" {")
    name, colon, main = start.partition(":")
    short = {SHORT[name]: main} if colon and name in SHORT else {}
    try:
        options = json.loads("{" + rest) if brace else {}
    except ValueError:
        return text, {}
    return (name, {**short, **options}) if short or not colon else (text, {})


def with_options(text: str, options: Mapping[str, Any]) -> str:
    """The full name of an extractor whose name may have some of its options already.

    >>> with_options('crops {"scales": [1.0]}', {"base": "segments"})
    'crops {"base": "segments", "scales": [1.0]}'
    """
    name, own = split_full_name(text)
    return full_name(name, {**own, **options}) if options else text


extractors = ExtractorRegistry("extractor")


def same_extractor(one: str, other: str) -> bool:
    """Whether two full names mean the same features.

    Options that are not given have their defaults, a file may be in another folder, and the batch
    size changes no feature.

    >>> same_extractor("segments", 'segments {"side": 192}')
    True
    >>> same_extractor("segments", 'segments {"side": 96}')
    False
    """
    (name, options), (other_name, other_options) = split_full_name(one), split_full_name(other)
    if name != other_name:
        return False
    known = extractors.options(name) if name in extractors else {}

    def written(given: Mapping[str, Any]) -> str:
        chosen = {**known, **given, "batch_size": None}
        if "path" in chosen:
            chosen["path"] = Path(str(chosen["path"])).name
        return json.dumps(chosen, sort_keys=True, default=str)

    return written(options) == written(other_options)


@dataclass(frozen=True)
class NetworkOutput:
    """The output of a network for B views.

    ``features`` [B, n, D] with ``boxes`` [B, n, 4] in 0…1 of the view; ``pooled`` [B, D] has one
    vector per view, if the network computes one.
    """

    features: Array
    boxes: Array
    pooled: Array | None = None


class Backbone(ABC):
    """Base of extractors that run a network: `views` on decoding threads, `forward` on the device.

    Weights are loaded at first use, so that options can be checked, and cached features read,
    without them.
    """

    name: ClassVar[str]

    def __init__(self, *, pooled: bool, batch_size: int) -> None:
        """``pooled`` adds the vector of the whole image as first fragment; detectors have none."""
        if batch_size < 1:
            raise ConfigError(f"{self.name}: batch_size must be at least 1, got {batch_size}")
        self.pooled = pooled
        self.batch_size = batch_size
        self.device = "cpu"

    @abstractmethod
    def views(self, image: Image.Image) -> list[View]:
        """The inputs of the network for an image."""

    @abstractmethod
    def forward(self, pixels: NDArray[np.uint8]) -> NetworkOutput:
        """Run the network on views of one size [B, H, W, 3]."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Name, digest of the weights, and every option that changes the features."""

    def vectors(self, pixels: NDArray[np.uint8]) -> Array:
        """One vector per view [B, D]."""
        return self.pooled_rows(self.forward(pixels))

    def to(self, device: str) -> None:
        """Set the device, before the first image."""
        self.device = device

    @property
    def views_per_batch(self) -> int:
        """Batch size; small networks use a larger one on a GPU."""
        return self.batch_size

    @property
    def dim(self) -> int:
        return self._shape[1]

    @property
    def max_fragments(self) -> int:
        return self._shape[0]

    @cached_property
    def _shape(self) -> tuple[int, int]:
        """Fragments per image and their width, from a run on a blank image."""
        rows, dim = self.extract(Image.new("RGB", (64, 64))).features.shape
        return int(rows), int(dim)

    def extract(self, image: Image.Image) -> Fragments:
        return self.run([self.views(image)])[0]

    def run(self, images: Sequence[list[View]]) -> list[Fragments]:
        """The fragments of each image, from its views; views of one size share a batch."""
        flat = [view for views in images for view in views]
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, view in enumerate(flat):
            groups[view.pixels.shape].append(index)
        outputs: dict[int, NetworkOutput] = {}
        for members in groups.values():
            for start in range(0, len(members), self.views_per_batch):
                batch = members[start : start + self.views_per_batch]
                output = self.forward(np.stack([flat[index].pixels for index in batch]))
                outputs.update(zip(batch, _rows(output), strict=True))
        indices = iter(range(len(flat)))
        return [
            self.gather([(view.box, outputs[next(indices)]) for view in views]) for views in images
        ]

    def gather(self, outputs: list[tuple[Box, NetworkOutput]]) -> Fragments:
        """The fragments of one image, from the boxes of its views and their outputs."""
        features, boxes = [], []
        for window, output in outputs:
            if self.pooled and output.pooled is not None:
                features.append(self.pooled_rows(output))
                boxes.append(np.array([window], dtype=np.float32))
            features.append(output.features[0])
            boxes.append(boxes_in_image(output.boxes[0], window))
        return Fragments(np.concatenate(features), np.concatenate(boxes))

    def pooled_rows(self, output: NetworkOutput) -> Array:
        """The vectors [B, D] of whole views."""
        if output.pooled is None:
            raise ConfigError(f"{self.name}: this network has no vector for a whole picture")
        if output.pooled.shape[-1] != output.features.shape[-1]:
            raise ConfigError(
                f"{self.name}: the vector of the whole picture has {output.pooled.shape[-1]} "
                f"numbers but the fragments {output.features.shape[-1]}; set pooled=false"
            )
        return output.pooled


def single_fragment(pooled: Array) -> NetworkOutput:
    """One fragment per view, with the whole view as its box."""
    boxes = np.tile(np.array(WHOLE_IMAGE, dtype=np.float32), (len(pooled), 1, 1))
    return NetworkOutput(pooled[:, None], boxes, pooled)


def to_network(
    pixels: NDArray[np.uint8], device: str, mean: Sequence[float], std: Sequence[float]
) -> torch.Tensor:
    """Views [B, H, W, 3] as a normalized tensor [B, 3, H, W].

    ``mean`` and ``std`` are in pixel values, 0…255.
    """
    import torch

    def channels(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device).view(1, -1, 1, 1)

    # bytes are sent to the device: a quarter of the size of floats
    batch = torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2).float()
    return (batch - channels(mean)) / channels(std)


def to_array(values: Any) -> Array:
    """A tensor of any device and dtype as a float32 array."""
    array: Array = values.detach().float().cpu().numpy()
    return array


def _rows(output: NetworkOutput) -> list[NetworkOutput]:
    """A batch as batches of one view."""
    return [
        NetworkOutput(
            output.features[row : row + 1],
            output.boxes[row : row + 1],
            None if output.pooled is None else output.pooled[row : row + 1],
        )
        for row in range(len(output.features))
    ]


def map_cells(maps: Array) -> Cells:
    """The cells of feature maps [B, C, H, W], row by row; their mean is the pooled vector."""
    batch, _, rows, columns = maps.shape
    cells = np.ascontiguousarray(maps.reshape(batch, -1, rows * columns).transpose(0, 2, 1))
    return cells, _boxes(batch, rows, columns), cells.mean(axis=1)


def token_cells(tokens: Array, shape: tuple[int, ...], patch: Any = None) -> Cells:
    """The patches among tokens [B, T, D] of images of a shape (height, width).

    Tokens before the patches (a class token, registers) are no patches. The pooled vector is the
    first of them, or the mean of the patches if there are none.
    """
    batch, count = tokens.shape[:2]
    rows, columns = _grid(count, shape, patch)
    special = count - rows * columns
    cells = np.ascontiguousarray(tokens[:, special:])
    pooled = tokens[:, 0] if special else cells.mean(axis=1)
    return cells, _boxes(batch, rows, columns), pooled


def _grid(count: int, shape: tuple[int, ...], patch: Any) -> tuple[int, int]:
    """Rows and columns of patches: by the patch size if that fits, else the largest square."""
    if isinstance(patch, int) and patch > 0:
        rows, columns = shape[0] // patch, shape[1] // patch
        # networks that merge patches have fewer tokens than their first grid, by powers of four
        while rows * columns > count and min(rows, columns) > 1:
            rows, columns = rows // 2, columns // 2
        if rows * columns <= count:
            return rows, columns
    side = math.isqrt(count)
    return side, side


def _boxes(batch: int, rows: int, columns: int) -> Array:
    return np.broadcast_to(grid_boxes(rows, columns), (batch, rows * columns, 4))
