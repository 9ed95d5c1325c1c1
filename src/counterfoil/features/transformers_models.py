"""Extractor "transformers": any vision network of that library, as grid cells or as regions."""

from __future__ import annotations

import inspect
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from counterfoil.core.errors import ConfigError
from counterfoil.features.extractors import (
    Backbone,
    NetworkOutput,
    extractors,
    map_cells,
    to_array,
    to_network,
    token_cells,
)
from counterfoil.features.pretrained import (
    is_detector,
    load_config,
    load_network,
    load_processor,
    weights_digest,
)
from counterfoil.features.views import Preprocessing, View, read_detection, read_preprocessing

_MIN_BOX_SIDE = 1e-3


def best_detections(output: Any, top: int, labels: int) -> NetworkOutput:
    """The last states and boxes of the ``top`` queries by confidence.

    The confidence is a softmax for detectors with a class "no object", else a sigmoid per class.
    """
    import torch

    logits = output.logits.float()
    if logits.shape[-1] > labels:
        confidence = torch.softmax(logits, dim=-1)[..., :-1].amax(dim=-1)
    else:
        confidence = torch.sigmoid(logits).amax(dim=-1)
    queries = confidence.shape[1]
    best = confidence.topk(min(top, queries), dim=1).indices
    # after the patches, if the states contain them, as in YOLOS
    states = output.last_hidden_state[:, -queries:]
    features = torch.gather(states, 1, best[..., None].expand(-1, -1, states.shape[-1]))
    boxes = torch.gather(output.pred_boxes, 1, best[..., None].expand(-1, -1, 4))
    return NetworkOutput(to_array(features), corners(to_array(boxes)))


def corners(boxes: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Center and size to x1, y1, x2, y2, clipped to the image, never empty.

    >>> corners(np.array([[0.5, 0.5, 0.5, 2.0]], np.float32)).tolist()
    [[0.25, 0.0, 0.75, 1.0]]
    """
    center, half = boxes[..., :2], boxes[..., 2:] / 2
    low = np.clip(center - half, 0, 1 - _MIN_BOX_SIDE)
    high = np.maximum(np.clip(center + half, 0, 1), low + _MIN_BOX_SIDE)
    return np.concatenate([low, high], axis=-1).astype(np.float32)


@extractors.register("transformers")
class TransformersFeatures(Backbone):
    """Patches, cells or detected regions of any `transformers` vision model (CLIP, DINOv2, DETR …).

    A grid or patch network gives its cells, after the vector of the whole image (``pooled``); a
    detector gives its ``top`` most confident regions.
    """

    name: ClassVar[str] = "transformers"

    def __init__(
        self,
        *,
        model: str = "",
        layer: int = -1,
        kind: Literal["auto", "grid", "detector"] = "auto",
        top: int = 36,
        pooled: bool = True,
        size: int | None = None,
        fit: Literal["squash", "crop"] = "squash",
        batch_size: int = 16,
    ) -> None:
        """``model`` is a local folder or a name on the hub; ``layer`` a hidden state, -1 the last.

        ``size`` replaces the model's image size, if its positions can be interpolated.
        """
        super().__init__(pooled=pooled, batch_size=batch_size)
        if top < 1:
            raise ConfigError(f"transformers: top must be at least 1, got {top}")
        self.model, self.layer, self.kind, self.top = model, layer, kind, top
        self.size, self.fit = size, fit

    def views(self, image: Image.Image) -> list[View]:
        return [self._preprocessing.view(image)]

    def fingerprint(self) -> str:
        options = f"layer={self.layer} pooled={self.pooled}"
        options = f"top={self.top}" if self._detects else options
        return f"transformers {weights_digest(self._network)} {options} {self._preprocessing}"

    def forward(self, pixels: NDArray[np.uint8]) -> NetworkOutput:
        import torch

        preprocessing = self._preprocessing
        network = self._network.to(self.device)
        with torch.inference_mode():
            batch = to_network(pixels, self.device, preprocessing.mean, preprocessing.std)
            output = network(pixel_values=batch, **self._extra_arguments(pixels.shape[1:3]))
        if self._detects:
            return best_detections(output, self.top, int(self._config.num_labels))
        return self._grid(output, pixels.shape[1:3])

    def _extra_arguments(self, shape: tuple[int, ...]) -> dict[str, Any]:
        known = inspect.signature(self._network.forward).parameters
        extra: dict[str, Any] = {}
        if self.layer != -1 and not self._detects:
            extra["output_hidden_states"] = True
        natural = getattr(self._network.config, "image_size", None)
        resized = isinstance(natural, int) and tuple(shape) != (natural, natural)
        if resized and "interpolate_pos_encoding" in known and not self._detects:
            extra["interpolate_pos_encoding"] = True
        return extra

    def _grid(self, output: Any, shape: tuple[int, ...]) -> NetworkOutput:
        states = to_array(self._states(output))
        if states.ndim == 4:
            cells, boxes, pooled = map_cells(states)
        else:
            patch = getattr(self._network.config, "patch_size", None)
            cells, boxes, pooled = token_cells(states, shape, patch)
        pooler = getattr(output, "pooler_output", None)
        if pooler is not None:
            pooled = to_array(pooler).reshape(len(states), -1)
        return NetworkOutput(cells, boxes, pooled)

    def _states(self, output: Any) -> Any:
        if self.layer == -1:
            return output.last_hidden_state
        hidden = output.hidden_states or ()
        if not -len(hidden) <= self.layer < len(hidden):
            raise ConfigError(
                f"transformers: layer {self.layer} of '{self.model}', which has {len(hidden)} "
                "hidden states"
            )
        return hidden[self.layer]

    @cached_property
    def _config(self) -> Any:
        if not self.model:
            raise ConfigError(
                "transformers: name a model: --backbone-option model=NAME, a local folder or a "
                "name on the hub"
            )
        return load_config(self.model)

    @cached_property
    def _detects(self) -> bool:
        return self.kind == "detector" or (self.kind == "auto" and is_detector(self._config))

    @cached_property
    def _network(self) -> Any:
        return load_network(self.model, self._detects)

    @cached_property
    def _preprocessing(self) -> Preprocessing:
        detects = self._detects  # raises first if no model is named
        processor = load_processor(self.model)
        if detects:
            return read_detection(processor, self.size)
        natural = getattr(self._network.config, "image_size", None)
        return read_preprocessing(processor, natural, self.fit, self.size)
