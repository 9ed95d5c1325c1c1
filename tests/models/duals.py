"""Dual encoders small enough for a test, and pictures with captions that they can learn from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from counterfoil.core.config import build_config
from counterfoil.data.images import FileImage
from counterfoil.data.pairs import Pairs, Split
from counterfoil.features import with_fragments
from counterfoil.models import create_model
from tests.data.text.test_text import save_tiny_tokenizer

MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SIDE, PATCH, WIDTH = 16, 8, 12
COLOURS = {
    "dog": (200, 30, 30),
    "cat": (30, 200, 30),
    "car": (30, 30, 200),
    "bus": (220, 220, 40),
    "tree": (20, 120, 60),
    "boat": (240, 240, 240),
}


def save_dual(folder: Path, kind: str, side: int = SIDE, **stated) -> Path:
    """A CLIP or SigLIP with random weights, its tokenizer and its way of seeing, in a folder."""
    from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel

    torch.manual_seed(0)
    vision = {"hidden_size": 16, **LAYERS, "image_size": side, "patch_size": PATCH}
    text = {"hidden_size": 16, **LAYERS, "vocab_size": 22, "max_position_embeddings": 16}
    if kind == "clip":
        text |= {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
        config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=WIDTH)
        model = CLIPModel(config)
    else:
        text |= {"projection_size": 16, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
        config = SiglipConfig(text_config=text, vision_config=vision)
        model = SiglipModel(config)
        with torch.no_grad():
            model.logit_bias.fill_(-7.5)
    with torch.no_grad():
        model.logit_scale.fill_(3.0)
    model.save_pretrained(folder)
    save_tiny_tokenizer(folder)
    processor = {"image_mean": MEAN, "image_std": STD, "do_center_crop": kind == "clip", **stated}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def width_of(kind: str) -> int:
    return WIDTH if kind == "clip" else 16


def photo_split(folder: Path, name: str, images: int, seed: int) -> Split:
    """Photos of two coloured halves, each the colour of a thing that both captions name."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    names, captions, refs = list(COLOURS), [], []
    for number in range(images):
        one, other = rng.choice(len(names), size=2, replace=False)
        pixels = np.empty((20, 24, 3))
        pixels[:, :12], pixels[:, 12:] = COLOURS[names[one]], COLOURS[names[other]]
        noisy = (pixels + rng.normal(0, 6, pixels.shape)).clip(0, 255).astype(np.uint8)
        path = folder / f"{name}-{number}.png"
        Image.fromarray(noisy).save(path)
        refs.append(FileImage(path))
        captions.append(
            [f"a {names[one]} and a {names[other]}", f"a {names[one]} near the {names[other]}"]
        )
    return Split(name, [f"{name}-{n}" for n in range(images)], captions, pixels=refs)


def photo_pairs(folder: Path) -> Pairs:
    sizes = {"train": 24, "dev": 8, "test": 8}
    splits = {n: photo_split(folder, n, count, k) for k, (n, count) in enumerate(sizes.items())}
    return Pairs("photos", splits)


def write_table(folder: Path, pairs: Pairs) -> Path:
    """The pairs as a table that every command can read."""
    rows = [
        {"image": str(ref.path.relative_to(folder)), "caption": text, "split": split.name}
        for split in pairs
        for ref, texts in zip(split.pixels, split.captions, strict=True)
        for text in texts
    ]
    path = folder / "captions.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def seen(pairs: Pairs, dual: Path, **options) -> Pairs:
    """The pairs with their pixels as a dual encoder wants them."""
    return with_fragments(pairs, Path("unused"), "pixels", {"model": str(dual), **options})


def dual_config(kind: str, dual: Path, matcher=None, image=None, text=None, **tree):
    model = {
        "name": kind,
        "embed_size": width_of(kind),
        "image": {"pretrained": str(dual), **(image or {})},
        "text": text or {},
        "matcher": matcher or {},
    }
    return build_config({"model": model, **tree})


def make_dual(kind: str, dual: Path, pairs: Pairs, **parts):
    torch.manual_seed(0)
    config = dual_config(kind, dual, **parts)
    model = create_model(config.model, pairs.train, config.data)
    model.fragments_from = pairs.train.fragments.made_by
    return model
