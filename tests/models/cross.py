"""Cross-encoders with the weights of the reference fixtures, as models."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from counterfoil.data.batches.collate import ImageBatch, TextBatch
from counterfoil.models import Model
from counterfoil.models.importers import import_checkpoint
from tests.conftest import Fixture


def mask_of(lengths: torch.Tensor, longest: int) -> torch.Tensor:
    return torch.arange(longest)[None] < lengths[:, None]


def write_pieces(folder: Path, count: int) -> Path:
    """BERT's list of pieces, as short as a fixture's table of word vectors."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "Dog", "dog", "##gy", "."]
    pieces += [f"w{number}" for number in range(len(pieces), count)]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    return folder / "vocab.txt"


def write_sizes(folder: Path, hyper: dict) -> None:
    (folder / "model.json").write_text(json.dumps(hyper))


def model_of(fixture: Fixture, family: str, folder: Path) -> Model:
    """The weights of a fixture, written as the public code writes them and read back."""
    torch.save(fixture.weights(), folder / "model_step_1.pt")
    write_sizes(folder, fixture.hyper)
    pieces = write_pieces(folder, fixture.hyper["vocab_size"])
    return import_checkpoint(folder / "model_step_1.pt", family, pieces).model


def images_of(fixture: Fixture, dtype: torch.dtype = torch.float32) -> ImageBatch:
    """Its regions, with gradients; the boxes of 7 numbers are made again from 4."""
    features = fixture["in.img_feat"].to(dtype).requires_grad_()
    whole = torch.full((len(features),), features.shape[1])
    mask = mask_of(fixture.tensors.get("in.num_bbs", whole), features.shape[1])
    return ImageBatch(features, mask, fixture["in.img_pos_feat"][..., :4].to(dtype))


def texts_of(fixture: Fixture, key: str = "in.input_ids") -> TextBatch:
    ids = fixture[key]
    whole = torch.full((len(ids),), ids.shape[1])
    return TextBatch(ids, mask_of(fixture.tensors.get("in.txt_lens", whole), ids.shape[1]))
