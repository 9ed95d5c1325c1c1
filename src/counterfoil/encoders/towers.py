"""The halves of a pretrained dual encoder of `transformers`, each as a module of its own.

CLIP and SigLIP pool and project in different places. A `Tower` brings them to one form: states of
its tokens, one state for the whole, and a projection of either into the space both halves share.
"""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from counterfoil.encoders.provenance import loaded_ids
from counterfoil.errors import ConfigError
from counterfoil.features.dual_settings import dual_config, dual_refusals
from counterfoil.features.pretrained import no_bars

Half = Literal["vision", "text"]
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class Tower(nn.Module, ABC):
    """One half of a dual encoder; the parameters that it loaded learn at the reduced rate.

    ``freeze`` layers from the bottom, with the embedding below them, do not learn (-1: nothing
    does). Going down, each layer learns ``layer_decay`` times as fast as the one above it.
    """

    pretrained: frozenset[str] = frozenset()

    def __init__(self, whole: Any, half: Half, freeze: int, layer_decay: float) -> None:
        super().__init__()
        self.config = whole.config  # of both halves: what is saved can be read by anyone
        self.model: Any = getattr(whole, f"{half}_model")
        self.layer_decay = layer_decay
        self.layers = int(self.model.config.num_hidden_layers)
        own = {"vision": "visual_projection", "text": "text_projection"}[half]
        self.projection: nn.Module = getattr(whole, own, None) or nn.Identity()
        if not -1 <= freeze <= self.layers or not 0 < layer_decay <= 1:
            raise ConfigError(
                f"freeze {freeze}, layer_decay {layer_decay}: this half has {self.layers} layers, "
                "of which 0 or more (-1: all there is) can be frozen; a decay is above 0, at most 1"
            )
        for name, parameter in self.named_parameters():
            # layer k has depth k + 1; what is above the layers is deeper than all of them
            frozen = freeze == -1 or (freeze > 0 and self.depth(name) <= freeze)
            parameter.requires_grad_(not frozen)

    @property
    @abstractmethod
    def width(self) -> int:
        """Of the space that both halves share."""

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.hidden_size)

    def depth(self, name: str) -> int:
        """0 for the embedding, then the layers one by one, then what is above them."""
        layer = _LAYER.search(name)
        if layer is not None:
            return int(layer[1]) + 1
        below = ".embeddings." in name or ".pre_layrnorm." in name  # CLIP's own spelling
        return 0 if below else self.layers + 1

    def rate_factor(self, name: str) -> float:
        """What the learning rate of a parameter is multiplied by, for its depth."""
        return self.layer_decay ** max(0, self.layers - self.depth(name))

    def save(self, folder: Path) -> None:
        """Write the architecture only; the weights are saved with the whole model."""
        self.config.save_pretrained(folder)


class VisionTower(Tower):
    """Pixels [B, 3, H, W] to states of the patches [B, N, hidden] and of the whole [B, hidden]."""

    def __init__(self, whole: Any, freeze: int, layer_decay: float) -> None:
        super().__init__(whole, "vision", freeze, layer_decay)
        self.patch = int(self.model.config.patch_size)
        self.side = int(self.model.config.image_size)
        self.clip = self.config.model_type == "clip"

    @property
    def width(self) -> int:
        return int(self.config.projection_dim) if self.clip else self.hidden_size

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        other = tuple(pixels.shape[-2:]) != (self.side, self.side)
        made = self.model(pixel_values=pixels, interpolate_pos_encoding=other)
        states = made.last_hidden_state
        if self.clip:  # the class token comes first; only its own state is normalised by the model
            states = self.model.post_layernorm(states[:, 1:])
        return states, made.pooler_output


class TextTower(Tower):
    """Token ids [B, W] to states of the tokens [B, W, hidden] and of the whole [B, hidden]."""

    def __init__(self, whole: Any, freeze: int, layer_decay: float, pad: int) -> None:
        super().__init__(whole, "text", freeze, layer_decay)
        self.clip, self.pad = self.config.model_type == "clip", pad
        self.positions = int(self.model.config.max_position_embeddings)
        if not self.clip:  # SigLIP's projection is part of its text model
            self.projection, self.model.head = self.model.head, nn.Identity()

    @property
    def width(self) -> int:
        layer = self.projection
        return layer.out_features if isinstance(layer, nn.Linear) else self.hidden_size

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        if self.clip:  # reads from left to right: its last token has seen all
            made = self.model(input_ids=ids, attention_mask=mask.long())
            last = mask.sum(1).clamp(min=1) - 1
            states = made.last_hidden_state
            return states, states[torch.arange(len(ids), device=ids.device), last]
        # SigLIP learned from captions padded to one length, and reads the padding, too
        length = ids.shape[1]
        padded = F.pad(ids, (0, self.positions - length), value=self.pad)
        made = self.model(input_ids=padded)
        return made.last_hidden_state[:, :length], made.last_hidden_state[:, -1]


def load_dual(name: str, half: Half, weights: bool, checkpointing: bool) -> tuple[Any, set[int]]:
    """A dual encoder of which one half is wanted, and the identities of the parameters it loaded.

    ``weights=False``: random, the other half tiny. ``checkpointing`` keeps few activations and
    computes the others again in the backward pass.
    """
    loaded: set[int] = set()
    config = dual_config(name)
    from transformers import AutoModel

    with dual_refusals(name), no_bars():
        if weights:
            whole, report = AutoModel.from_pretrained(
                name, dtype=torch.float32, output_loading_info=True
            )
            loaded = loaded_ids(whole, report)
        else:
            small = copy.deepcopy(config)
            other = small.text_config if half == "vision" else small.vision_config
            other.num_hidden_layers = 1
            whole = AutoModel.from_config(small)
            whole.config = config
    if checkpointing:
        whole.gradient_checkpointing_enable({"use_reentrant": False})
    return whole, loaded


def pretrained_scale(whole: Any) -> tuple[float, float]:
    """What a dual encoder learned to multiply its cosines by, and to add to them."""
    bias = getattr(whole, "logit_bias", None)
    scale = whole.logit_scale.detach().exp()
    return float(scale), float(bias.detach()) if bias is not None else 0.0
