"""Dual encoders (CLIP, SigLIP), trained end to end: patches as regions, tokens as words."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from counterfoil.data.batches import ImageBatch, TextBatch
from counterfoil.data.texts import HuggingFaceText, TextProcessor
from counterfoil.encoders.encoded import Encoded
from counterfoil.encoders.images import ImageEncoder, image_encoders
from counterfoil.encoders.joint import JointSpace, xavier_linear
from counterfoil.encoders.pooling import Pooling, create_pooling
from counterfoil.encoders.provenance import names_of
from counterfoil.encoders.texts import text_encoders
from counterfoil.encoders.towers import TextTower, Tower, VisionTower, load_dual, pretrained_scale
from counterfoil.errors import ConfigError, DataError
from counterfoil.features.dual_settings import dual_settings

OWN = "own"
"""The pooling that is the pretrained model's: CLIP's class or last token, SigLIP's head."""


class JointTokens(JointSpace):
    """States of a tower to the joint space: by its own projection, or by a new layer.

    Tokens and the vector of the whole are both brought to unit length, so that matchers of either
    read the same encoder.
    """

    def __init__(
        self, tower: Tower, embed_size: int, pooling: Pooling, projection: str, part: str
    ) -> None:
        super().__init__(embed_size, "none")
        if projection == "own" and tower.width != embed_size:
            raise ConfigError(
                f"model.{part}: the pretrained halves share a space of {tower.width} numbers, "
                f"model.embed_size is {embed_size}: set model.embed_size={tower.width}, or "
                f"model.{part}.projection=new"
            )
        new = projection == "new"
        self.fc = xavier_linear(tower.hidden_size, embed_size) if new else None
        self.whole = pooling == OWN
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
    """The half of CLIP or SigLIP that sees: pixels in, patches as regions and a pooled token out.

    ``pretrained`` is a local folder or a hub's name. ``size`` shows it larger pictures than it was
    made for, its positions stretched. ``pooling="own"`` is its class token or attention head; any
    other pools the patches. ``projection="new"`` learns a layer to any ``embed_size``. ``freeze``
    keeps so many layers as they are (-1: all), ``layer_decay`` slows the lower ones down,
    ``checkpointing`` trades time for memory.
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
        pooling: Pooling = OWN,
        projection: Literal["own", "new"] = "own",
        freeze: int = 0,
        layer_decay: float = 1.0,
        checkpointing: bool = False,
    ) -> None:
        super().__init__(input_dim, embed_size, "none", normalise=True, absolute=False)
        whole, loaded = load_dual(pretrained, "vision", weights, checkpointing)
        self.pretrained_scale = pretrained_scale(whole) if weights else None
        self.tower = VisionTower(whole, freeze, layer_decay)
        self.tower.pretrained = names_of(self.tower, loaded)
        patch = self.tower.patch
        if input_dim != 3 * patch**2:
            raise DataError(
                f"'{pretrained}' reads pixels in patches of {patch} by {patch}, not fragments of "
                f"{input_dim} numbers: give it images (data.source with pixels, "
                f"or load_pairs(…, extractor='pixels:{pretrained}'))"
            )
        wanted = dual_settings(pretrained, size).preprocessing
        self.side = wanted.size[0]
        self.register_buffer("mean", torch.tensor(wanted.mean).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(wanted.std).view(1, 3, 1, 1))
        self.joint = JointTokens(self.tower, embed_size, pooling, projection, "image")

    @property
    def portable_options(self) -> dict[str, Any]:
        """What replaces the options that name files once the weights are saved."""
        return {"weights": False}

    def pixels(self, patches: Tensor) -> Tensor:
        """Patches [B, N, patch · patch · 3] of bytes as the normalised picture [B, 3, H, W]."""
        patch, count = self.tower.patch, math.isqrt(patches.shape[1])
        if count != self.side // patch or count**2 != patches.shape[1]:
            raise DataError(
                f"the model sees pictures of {self.side // patch} by {self.side // patch} patches, "
                f"these have {patches.shape[1]} in all"
            )
        grid = patches.view(-1, count, count, patch, patch, 3).permute(0, 5, 1, 3, 2, 4)
        whole = grid.reshape(-1, 3, count * patch, count * patch).float()
        # what is left over beside the last patch is seen by no patch, but counted in the size
        rest = self.side - count * patch
        return F.pad((whole - self.mean) / self.std, (0, rest, 0, rest))

    def forward(self, images: ImageBatch) -> Encoded:
        states, whole = self.tower(self.pixels(images.fragments))
        return self.joint.encode(self.tower, states, whole, images.mask)


@text_encoders.register("dual")
class DualTextEncoder(nn.Module):
    """The half of CLIP or SigLIP that reads: its tokens as words, and a pooled token.

    Options are as those of the image half; an empty ``pretrained`` is that of the image half.
    """

    def __init__(
        self,
        text: TextProcessor,
        embed_size: int,
        *,
        pretrained: str = "",
        weights: bool = True,
        pooling: Pooling = OWN,
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
        """What replaces the options that name files once the weights are saved."""
        return {"weights": False}

    @property
    def word_table(self) -> nn.Embedding:
        """Where ids become vectors, for what asks how much each word matters."""
        table: nn.Embedding = self.tower.model.embeddings.token_embedding
        return table

    def forward(self, texts: TextBatch) -> Encoded:
        states, whole = self.tower(texts.ids, texts.mask)
        return self.joint.encode(self.tower, states, whole, texts.mask)
