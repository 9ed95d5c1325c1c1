"""Extractor "onnx": any vision network in an ONNX file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from counterfoil.core.errors import CheckpointError, ConfigError, MissingExtraError
from counterfoil.core.storage.reading import open_regular
from counterfoil.features.extractors import (
    Backbone,
    NetworkOutput,
    extractors,
    map_cells,
    single_fragment,
    token_cells,
)
from counterfoil.features.views import IMAGENET_MEAN, IMAGENET_STD, Preprocessing, View


@extractors.register("onnx")
class OnnxFeatures(Backbone):
    """Cells, tokens or one vector of a network in an ONNX file, run by onnxruntime."""

    name: ClassVar[str] = "onnx"

    def __init__(
        self,
        *,
        path: str = "",
        output: str = "",
        size: int | None = None,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        fit: Literal["squash", "crop"] = "squash",
        pooled: bool = False,
        batch_size: int = 16,
    ) -> None:
        """``output`` names an output of the network (empty: the first); ``size`` is the image side.

        ``mean`` and ``std`` are those of pixels in 0…1.
        """
        super().__init__(pooled=pooled, batch_size=batch_size)
        self.path, self.output, self.size, self.fit = path, output, size, fit
        self.mean = tuple(255 * value for value in mean)
        self.std = tuple(255 * value for value in std)

    def views(self, image: Image.Image) -> list[View]:
        return [self._preprocessing.view(image)]

    def fingerprint(self) -> str:
        return (
            f"onnx {self._digest()} {self.output} pooled={self.pooled} "
            f"{self.size} {self.fit} {self.mean} {self.std}"
        )

    def _digest(self) -> str:
        """SHA-256 of the file, and of the weights file of a large network."""
        if not self.path:
            raise ConfigError("onnx: name a file: --backbone-option path=NETWORK.onnx")
        digest = hashlib.sha256()
        try:
            weights = [Path(self.path + end) for end in (".data", "_data")]
            for path in (Path(self.path), *(path for path in weights if path.is_file())):
                with open_regular(path) as file:
                    while chunk := file.read(1 << 20):
                        digest.update(chunk)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error.strerror})") from None
        return digest.hexdigest()

    def forward(self, pixels: NDArray[np.uint8]) -> NetworkOutput:
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        batch = (pixels.astype(np.float32) - mean) / std
        if self._channels_first:
            batch = np.ascontiguousarray(batch.transpose(0, 3, 1, 2))
        calls = len(batch) if self._input.shape[0] == 1 else 1  # some files fix the batch size at 1
        output = np.concatenate([self._run(part) for part in np.array_split(batch, calls)])
        if output.ndim == 4:
            maps = output if self._channels_first else output.transpose(0, 3, 1, 2)
            return NetworkOutput(*map_cells(maps))
        if output.ndim == 3:
            return NetworkOutput(*token_cells(output, pixels.shape[1:3]))
        if output.ndim == 2:
            return single_fragment(output)
        raise ConfigError(
            f"{self.path}: output '{self._output}' has {output.ndim} axes; expected a map "
            "[B, C, H, W], tokens [B, T, D] or a vector [B, D]"
        )

    def _run(self, batch: NDArray[np.float32]) -> NDArray[np.float32]:
        values = batch.astype(np.float16) if "float16" in self._input.type else batch
        names, inputs = [self._output], {self._input.name: values}
        try:
            (output,) = self._session.run(names, inputs)
        except Exception as error:  # the runtime's own classes differ between its builds
            raise CheckpointError(f"{self.path}: the network cannot be run: {error}") from None
        array: NDArray[np.float32] = np.asarray(output, dtype=np.float32)
        return array

    @cached_property
    def _session(self) -> Any:
        if not self.path:
            raise ConfigError("onnx: name a file: --backbone-option path=NETWORK.onnx")
        try:
            import onnxruntime
        except ImportError:
            raise MissingExtraError("onnxruntime", "onnx", "the extractor 'onnx'") from None
        on_gpu = ["CUDAExecutionProvider"] if self.device.startswith("cuda") else []
        usable = [name for name in on_gpu if name in onnxruntime.get_available_providers()]
        try:
            return onnxruntime.InferenceSession(
                self.path, providers=[*usable, "CPUExecutionProvider"]
            )
        except Exception as error:
            raise CheckpointError(f"{self.path}: not a network that runs: {error}") from None

    @cached_property
    def _input(self) -> Any:
        first = self._session.get_inputs()[0]
        if len(first.shape) != 4:
            raise CheckpointError(
                f"{self.path}: its input '{first.name}' is {first.shape}; expected pictures "
                "[batch, 3, height, width] or [batch, height, width, 3]"
            )
        return first

    @cached_property
    def _output(self) -> str:
        names = [output.name for output in self._session.get_outputs()]
        if self.output and self.output not in names:
            raise ConfigError(f"{self.path}: no output '{self.output}' (it has: {names})")
        return self.output or names[0]

    @cached_property
    def _channels_first(self) -> bool:
        return bool(self._input.shape[3] != 3)

    @cached_property
    def _preprocessing(self) -> Preprocessing:
        shape = self._input.shape[2:] if self._channels_first else self._input.shape[1:3]
        fixed = all(isinstance(side, int) for side in shape)
        side = self.size or 224
        height, width = (int(shape[0]), int(shape[1])) if fixed else (side, side)
        if fixed and self.size not in (None, height, width):
            raise ConfigError(f"{self.path}: takes {height} by {width} pixels, not {self.size}")
        shorter = min(height, width)
        return Preprocessing((height, width), self.fit, shorter, mean=self.mean, std=self.std)
