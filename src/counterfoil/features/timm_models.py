"""Extractor "timm": any network of the `timm` library, if it is installed."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from counterfoil.core.errors import CheckpointError, ConfigError
from counterfoil.features.extractors import (
    Backbone,
    NetworkOutput,
    extractors,
    map_cells,
    single_fragment,
    to_array,
    to_network,
    token_cells,
)
from counterfoil.features.pretrained import weights_digest
from counterfoil.features.views import Preprocessing, View, read_preprocessing

# Names of Pillow's resamplings in timm's configurations.
_FILTERS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}


@extractors.register("timm")
class TimmFeatures(Backbone):
    """Cells or patches of any `timm` network (``--backbone timm:NAME``), if that is installed.

    ``model`` is a name of `timm`; ``weights`` is a file of weights, empty: `timm` downloads them.
    """

    name: ClassVar[str] = "timm"

    def __init__(
        self,
        *,
        model: str = "",
        weights: str = "",
        pooled: bool = True,
        size: int | None = None,
        fit: Literal["squash", "crop"] = "squash",
        batch_size: int = 16,
    ) -> None:
        super().__init__(pooled=pooled, batch_size=batch_size)
        self.model, self.weights, self.size, self.fit = model, weights, size, fit

    def views(self, image: Image.Image) -> list[View]:
        return [self._preprocessing.view(image)]

    def fingerprint(self) -> str:
        digest = weights_digest(self._network)
        return f"timm {self.model} {digest} pooled={self.pooled} {self._preprocessing}"

    def forward(self, pixels: NDArray[np.uint8]) -> NetworkOutput:
        import torch

        preprocessing = self._preprocessing
        network = self._network.to(self.device)
        with torch.inference_mode():
            batch = to_network(pixels, self.device, preprocessing.mean, preprocessing.std)
            output = to_array(network.forward_features(batch))
        if output.ndim == 4:
            channels_last = output.shape[-1] == network.num_features != output.shape[1]
            maps = output.transpose(0, 3, 1, 2) if channels_last else output
            return NetworkOutput(*map_cells(maps))
        if output.ndim == 3:
            return NetworkOutput(*token_cells(output, pixels.shape[1:3], self._patch))
        return single_fragment(output.reshape(len(output), -1))

    @property
    def _patch(self) -> int | None:
        """The side of a patch; None for networks without patches."""
        size = getattr(getattr(self._network, "patch_embed", None), "patch_size", None)
        return int(size[0]) if isinstance(size, tuple) else size

    @cached_property
    def _network(self) -> Any:
        if not self.model:
            raise ConfigError("timm: name a network: --backbone timm:NAME")
        timm = import_timm()
        # as an overlay, so that timm reads the file like a published one and drops the classifier
        local = {"file": self.weights, "custom_load": False} if self.weights else None
        try:
            network = timm.create_model(
                self.model, pretrained=True, num_classes=0, pretrained_cfg_overlay=local
            )
        except (RuntimeError, OSError, ValueError) as error:
            raise CheckpointError(
                f"timm: '{self.model}' could not be loaded: {error} (option weights: a local file)"
            ) from None
        if self.size and hasattr(network, "set_input_size"):  # interpolates positions
            network.set_input_size((self.size, self.size))
        return network.eval().requires_grad_(False)

    @cached_property
    def _preprocessing(self) -> Preprocessing:
        stated = import_timm().data.resolve_data_config({}, model=self._network)
        side = min(stated["input_size"][1:])
        processor = {
            "size": math.floor(side / stated["crop_pct"]),
            "crop_size": list(stated["input_size"][1:]),
            "image_mean": stated["mean"],
            "image_std": stated["std"],
            "resample": _FILTERS.get(stated["interpolation"], 3),
        }
        return read_preprocessing(processor, None, self.fit, self.size)


def import_timm() -> Any:
    """`timm`, which needs a working torchvision, or an error that says how to install it."""
    try:
        import timm  # type: ignore[import-not-found,unused-ignore]
        import timm.data  # type: ignore[import-not-found,unused-ignore]
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision for another torch
        raise ConfigError(
            f"the extractor 'timm' needs the package timm, which cannot be imported ({error}): pip "
            "install timm, with a torchvision that fits your torch; or use --backbone transformers"
        ) from None
    return timm
