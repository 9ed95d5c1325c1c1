"""A model that has learned the small data, and ways to spoil them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import counterfoil as cf
from counterfoil.core.storage.arrays import ArrayFile
from counterfoil.data.batches.collate import pad_fragments, pad_texts
from counterfoil.data.pairs import Split
from counterfoil.models import Model
from counterfoil.objectives import Context, create_objective


@pytest.fixture(scope="session")
def learned(concepts) -> Model:
    """Taught by a few steps with all negatives of small batches."""
    model = cf.create("scan-t2i", concepts, embed_size=32, text={"word_dim": 16})
    split, objective = concepts.train, create_objective("triplet")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rng = np.random.default_rng(0)
    for step in range(60):
        chosen = rng.choice(len(split), size=24, replace=False)
        images = pad_fragments([split.fragments.read(int(image)) for image in chosen])
        captions = [split.captions[image][step % 2] for image in chosen]
        texts = pad_texts([model.text.encode(caption) for caption in captions], model.text.pad)
        positives = torch.eye(len(chosen), dtype=torch.bool)
        loss = objective.compute(model(images, texts), positives, Context(logging=False)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def with_unreadable(split: Split, images: list[int], folder: Path) -> Split:
    """The split with some images' fragments spoiled on disk."""
    assert split.fragments is not None
    values = np.array(np.load(split.fragments.features.path))
    values[images] = np.nan
    np.save(folder / "spoiled.npy", values)
    table = replace(split.fragments, features=ArrayFile(folder / "spoiled.npy"))
    return replace(split, fragments=table)
