"""Dual encoders (CLIP, SigLIP), trained end to end: patches as regions, tokens as words.

CLIP and SigLIP pool and project at different points. A `Tower` gives both one interface: token
states, one state for the whole input, and a projection of either into the joint space.
"""

from __future__ import annotations

import copy
import math
import re
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.data.batches.collate import ImageBatch, TextBatch
from counterfoil.data.text.tokenizers import HuggingFaceText, TextProcessor
from counterfoil.encoders.bert import loaded_ids, names_of
from counterfoil.encoders.encoded import Encoded
from counterfoil.encoders.images import ImageEncoder, image_encoders
from counterfoil.encoders.layers import JointSpace, xavier_linear
from counterfoil.encoders.pooling import Pooling, create_pooling
from counterfoil.encoders.texts import states_at_end, text_encoders
from counterfoil.features.pretrained import dual_config, dual_refusals, dual_settings, no_bars

Half = Literal["vision", "text"]
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

OWN_POOLING = "own"
"""The pretrained model's pooling: CLIP's class or last token, SigLIP's head."""


class Tower(nn.Module, ABC):
    """One half of a dual encoder; loaded parameters learn at the reduced rate.

    The first ``freeze`` layers and the embedding are frozen (-1: everything). Each layer learns
    ``layer_decay`` times as fast as the one above it.
    """

    pretrained: frozenset[str] = frozenset()

    def __init__(self, whole: Any, half: Half, freeze: int, layer_decay: float) -> None:
        super().__init__()
        self.config = whole.config  # of both halves, so that `transformers` can read a saved one
        self.model: Any = getattr(whole, f"{half}_model")
        self.layer_decay = layer_decay
        self.layers = int(self.model.config.num_hidden_layers)
        own = {"vision": "visual_projection", "text": "text_projection"}[half]
        self.projection: nn.Module = getattr(whole, own, None) or nn.Identity()
        if not -1 <= freeze <= self.layers or not 0 < layer_decay <= 1:
            raise ConfigError(
                f"freeze {freeze}, layer_decay {layer_decay}: expected freeze within "
                f"-1…{self.layers} (the number of layers; -1: all) and layer_decay above 0, at "
                "most 1"
            )
        for name, parameter in self.named_parameters():
            frozen = freeze == -1 or (freeze > 0 and self.depth(name) <= freeze)
            parameter.requires_grad_(not frozen)

    @property
    @abstractmethod
    def width(self) -> int:
        """Width of the joint space."""

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.hidden_size)

    def depth(self, name: str) -> int:
        """0 for the embedding, k + 1 for layer k, layers + 1 for everything above."""
        layer = _LAYER.search(name)
        if layer is not None:
            return int(layer[1]) + 1
        below = ".embeddings." in name or ".pre_layrnorm." in name  # CLIP's own spelling
        return 0 if below else self.layers + 1

    def rate_factor(self, name: str) -> float:
        """Factor on the learning rate of a parameter, by its depth."""
        return self.layer_decay ** max(0, self.layers - self.depth(name))

    def save(self, folder: Path) -> None:
        """Write the architecture only; the weights are saved with the whole model."""
        self.config.save_pretrained(folder)


class VisionTower(Tower):
    """Pixels [B, 3, H, W] to states of the patches [B, N, hidden] and of the image [B, hidden]."""

    def __init__(self, whole: Any, freeze: int, layer_decay: float) -> None:
        super().__init__(whole, "vision", freeze, layer_decay)
        self.patch = int(self.model.config.patch_size)
        self.side = int(self.model.config.image_size)
        self.clip = self.config.model_type == "clip"

    @property
    def width(self) -> int:
        return int(self.config.projection_dim) if self.clip else self.hidden_size

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        resized = tuple(pixels.shape[-2:]) != (self.side, self.side)
        output = self.model(pixel_values=pixels, interpolate_pos_encoding=resized)
        states = output.last_hidden_state
        if self.clip:  # drop the class token; CLIP normalizes only that one
            states = self.model.post_layernorm(states[:, 1:])
        return states, output.pooler_output


class TextTower(Tower):
    """Token ids [B, W] to states of the tokens [B, W, hidden] and of the text [B, hidden]."""

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
        if self.clip:  # causal attention: only the last token has attended to all others
            states = self.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
            return states, states_at_end(states, mask)
        # SigLIP was trained on captions padded to one length, without an attention mask
        length = ids.shape[1]
        padded = F.pad(ids, (0, self.positions - length), value=self.pad)
        states = self.model(input_ids=padded).last_hidden_state
        return states[:, :length], states[:, -1]


def load_dual(name: str, half: Half, weights: bool, checkpointing: bool) -> tuple[Any, set[int]]:
    """A dual encoder of which ``half`` will be used, and the Python ids of its loaded parameters.

    ``weights=False``: random weights, and one layer in the other half. ``checkpointing``: recompute
    activations in the backward pass.
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
    """The learned scale and bias of a dual encoder's logits."""
    bias = getattr(whole, "logit_bias", None)
    scale = whole.logit_scale.detach().exp()
    return float(scale), float(bias.detach()) if bias is not None else 0.0


class JointTokens(JointSpace):
    """Projects a tower's states to the joint space, by its own projection or by a new layer.

    Tokens and the pooled vector are both normalized, so matchers of either can use the encoder.
    """

    def __init__(
        self, tower: Tower, embed_size: int, pooling: Pooling, projection: str, part: str
    ) -> None:
        super().__init__(embed_size, "none")
        if projection == "own" and tower.width != embed_size:
            raise ConfigError(
                f"model.{part}: the joint space of the pretrained model has {tower.width} "
                f"dimensions, but model.embed_size is {embed_size}: set "
                f"model.embed_size={tower.width}, or model.{part}.projection=new"
            )
        new = projection == "new"
        self.fc = xavier_linear(tower.hidden_size, embed_size) if new else None
        self.whole = pooling == OWN_POOLING
        self.token_pool = None if self.whole else create_pooling(pooling, embed_size)

    def encode(self, tower: Tower, states: Tensor, whole: Tensor, mask: Tensor) -> Encoded:
        project = self.fc if self.fc is not None else tower.projection
        tokens: Tensor = project(states)
        encoded: Encoded = self(tokens, mask)
        if self.whole:
            return replace(encoded, pooled=self.finish(project(whole)))
        if self.token_pool is None:
            return encoded
        return replace(encoded, pooled=self.finish(self.token_pool(tokens, mask)))


@image_encoders.register("dual")
class DualImageEncoder(ImageEncoder):
    """Vision half of CLIP or SigLIP: pixels in, patches as regions and a pooled token out.

    ``pretrained`` is a local folder or a name on the hub. ``size`` is the side of the images, if
    not the pretrained one; positions are interpolated. ``pooling="own"`` is the model's class token
    or attention head; any other pools the patches. ``projection="new"`` learns a layer to any
    ``embed_size``. ``freeze`` is the number of frozen layers (-1: all), ``layer_decay`` the factor
    on the learning rate per layer downwards. ``checkpointing`` trades time for memory.
    """

    reads_pixels = True
    joint: JointTokens
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        input_dim: int,
        embed_size: int,
        *,
        pretrained: str = "openai/clip-vit-base-patch32",
        weights: bool = True,
        size: int = 0,
        pooling: Pooling = OWN_POOLING,
        projection: Literal["own", "new"] = "own",
        freeze: int = 0,
        layer_decay: float = 1.0,
        checkpointing: bool = False,
    ) -> None:
        super().__init__(input_dim, embed_size, "none", normalize=True, absolute=False)
        whole, loaded = load_dual(pretrained, "vision", weights, checkpointing)
        self.pretrained_scale = pretrained_scale(whole) if weights else None
        self.tower = VisionTower(whole, freeze, layer_decay)
        self.tower.pretrained = names_of(self.tower, loaded)
        patch = self.tower.patch
        if input_dim != 3 * patch**2:
            raise DataError(
                f"'{pretrained}' reads pixels in patches of {patch} by {patch}, but the data has "
                f"fragments of {input_dim} numbers: give it images (data.source with pixels, "
                f"or load_pairs(…, extractor='pixels:{pretrained}'))"
            )
        preprocessing = dual_settings(pretrained, size).preprocessing
        self.side = preprocessing.size[0]
        self.register_buffer("mean", torch.tensor(preprocessing.mean).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(preprocessing.std).view(1, 3, 1, 1))
        self.joint = JointTokens(self.tower, embed_size, pooling, projection, "image")

    @property
    def portable_options(self) -> dict[str, Any]:
        """Replacements for options that name files, for a model saved with its weights."""
        return {"weights": False}

    def pixels(self, patches: Tensor) -> Tensor:
        """Patches [B, N, patch · patch · 3] of bytes to normalized images [B, 3, H, W]."""
        patch, count = self.tower.patch, math.isqrt(patches.shape[1])
        if count != self.side // patch or count**2 != patches.shape[1]:
            raise DataError(
                f"expected images of {self.side // patch} by {self.side // patch} patches, got "
                f"{patches.shape[1]} patches: extract them with the model's own size"
            )
        grid = patches.view(-1, count, count, patch, patch, 3).permute(0, 5, 1, 3, 2, 4)
        whole = grid.reshape(-1, 3, count * patch, count * patch).float()
        # the model expects the full size, although no patch covers what the grid leaves over
        rest = self.side - count * patch
        return F.pad((whole - self.mean) / self.std, (0, rest, 0, rest))

    def forward(self, images: ImageBatch) -> Encoded:
        states, whole = self.tower(self.pixels(images.fragments))
        return self.joint.encode(self.tower, states, whole, images.mask)


@text_encoders.register("dual")
class DualTextEncoder(nn.Module):
    """Text half of CLIP or SigLIP: its tokens as words, and a pooled token.

    Options are those of the image half; an empty ``pretrained`` is that of the image half.
    """

    def __init__(
        self,
        text: TextProcessor,
        embed_size: int,
        *,
        pretrained: str = "",
        weights: bool = True,
        pooling: Pooling = OWN_POOLING,
        projection: Literal["own", "new"] = "own",
        freeze: int = 0,
        layer_decay: float = 1.0,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        whole, loaded = load_dual(pretrained, "text", weights, checkpointing)
        self.tower = TextTower(whole, freeze, layer_decay, text.pad)
        self.tower.pretrained = names_of(self.tower, loaded)
        if isinstance(text, HuggingFaceText):
            text.max_length = min(text.max_length, self.tower.positions)
        self.joint = JointTokens(self.tower, embed_size, pooling, projection, "text")

    @property
    def portable_options(self) -> dict[str, Any]:
        """Replacements for options that name files, for a model saved with its weights."""
        return {"weights": False}

    @property
    def word_table(self) -> nn.Embedding:
        """The embedding of token ids; word attributions read it."""
        table: nn.Embedding = self.tower.model.embeddings.token_embedding
        return table

    def forward(self, texts: TextBatch) -> Encoded:
        states, whole = self.tower(texts.ids, texts.mask)
        return self.joint.encode(self.tower, states, whole, texts.mask)
