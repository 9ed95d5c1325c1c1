"""Vision networks small enough for a test, made from configurations, and pictures to show them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from counterfoil.data.images import FileImage
from counterfoil.data.pairs import Split

LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2}
VIT = {"hidden_size": 16, "intermediate_size": 32, **LAYERS, "image_size": 32, "patch_size": 8}
TEXT = {"hidden_size": 16, "intermediate_size": 32, **LAYERS, "vocab_size": 50}
MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]


def save_network(folder: Path, kind: str, **stated: Any) -> Path:
    """A network with random weights in a folder, as `save_pretrained` writes it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    maker = transformers.AutoModel
    if kind in ("detr", "yolos"):
        maker = transformers.AutoModelForObjectDetection
    maker.from_config(_config(transformers, kind)).save_pretrained(folder)
    text = json.dumps({"image_mean": MEAN, "image_std": STD, **stated})
    (folder / "preprocessor_config.json").write_text(text)
    return folder


def _config(transformers: Any, kind: str) -> Any:
    names = {"vit": "ViT", "clip-vision": "CLIPVision", "siglip-vision": "SiglipVision"}
    if kind in names:
        return getattr(transformers, f"{names[kind]}Config")(**VIT)
    if kind == "clip":
        return transformers.CLIPConfig(text_config=TEXT, vision_config=VIT)
    if kind == "dinov2":
        size = {"hidden_size": 16, "image_size": 32, "patch_size": 8}
        return transformers.Dinov2Config(**size, **LAYERS)
    if kind == "swin":
        return transformers.SwinConfig(
            image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 1], window_size=4
        )
    if kind == "convnext":
        return transformers.ConvNextConfig(hidden_sizes=[8, 8, 8, 16], depths=[1, 1, 1, 1])
    if kind == "resnet":
        return transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"
        )
    if kind == "yolos":
        return transformers.YolosConfig(
            **{**VIT, "image_size": [32, 48]}, num_detection_tokens=7, num_labels=5
        )
    return transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"]
        ),
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_queries=7,
        num_labels=5,
    )


@cache
def picture(seed: int = 0, width: int = 32, height: int = 32) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def photos(folder: Path, count: int, side: int = 32) -> Split:
    """A split of picture files."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        picture(number, side, side).save(folder / f"{number}.png")
    ids = [str(number) for number in range(count)]
    refs = [FileImage(folder / f"{key}.png") for key in ids]
    return Split("train", ids, [[f"caption {key}", "x"] for key in ids], pixels=refs)
