"""Small teachers, and a split that they score, for tests of guides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from counterfoil.core.config import build_config
from counterfoil.core.storage.arrays import ArrayFile
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.batches.collate import pad_fragments, pad_texts
from counterfoil.data.fragments import Fragments, FragmentTable
from counterfoil.data.pairs import Split
from counterfoil.models import Model, create_model
from counterfoil.models.store import save_pretrained
from tests.conftest import make_split


def save_teacher(split: Split, folder: Path, name: str = "vse-fc", seed: int = 0, **data) -> Model:
    """An untrained model, saved; what it scores is as good a target as any."""
    config = build_config(
        {
            "model": {"name": name, "embed_size": 16, "text": {"word_dim": 8}},
            "data": {"min_count": 1, **data},
        }
    )
    torch.manual_seed(seed)
    model = create_model(config.model, split, config.data).eval()
    save_pretrained(model, folder)
    return model


def small_split(folder: Path, images: int = 12, seed: int = 0) -> Split:
    folder.mkdir(parents=True, exist_ok=True)
    return make_split(folder, "train", images, seed)


def with_unreadable(split: Split, folder: Path, images: list[int]) -> Split:
    """The same split, some of its images' features not numbers."""
    table = split.fragments
    features = table.features.rows(range(len(split)))
    features[images] = np.nan
    np.save(folder / "broken.npy", features)
    broken = FragmentTable(ArrayFile(folder / "broken.npy"), table.rows, table.lengths, table.boxes)
    return Split(split.name, split.ids, split.captions, fragments=broken)


def direct_scores(models: list[Model], split: Split) -> torch.Tensor:
    """Every image with every caption, by each model itself, and their mean."""
    images = [split.fragments.read(i) for i in range(len(split))]
    return torch.stack([score_as_trained(model, images, split.texts) for model in models]).mean(0)


def score_as_trained(model: Model, images: list[Fragments], texts: list[str]) -> torch.Tensor:
    """Scores with unknown words read as <unk>, as training reads them."""
    with torch.inference_mode(), eval_mode(model):
        batch = pad_texts([model.text.encode(text) for text in texts], model.text.pad)
        return model(pad_fragments(images), batch).float()
