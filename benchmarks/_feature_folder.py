"""A data set of random features in SCAN's layout, of any size and made fast.

Every image is of one of some kinds. A kind has a sign for each number of its features and a few
words of its own, so that there is something to learn; sizes of numbers and all other words are
random bits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from score_all import caption_lengths

KINDS, WORDS, OWN_WORDS = 2000, 8500, 6
"""Kinds of images; different words, as Flickr30K has; how many of them a kind calls its own."""

CHUNK = 256
HALF, MANTISSA, SIGN = 0x3800, 0x03FF, 0x8000
"""Bits of a number in half precision: 0.5, what makes it anything up to 1, and its sign."""


def write_split(
    folder: Path, split: str, images: int, regions: int = 36, dim: int = 2048, seed: int = 0
) -> None:
    """Write a split with five captions an image, unless features of this size are there."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{split}_ims.npy"
    if path.exists() and np.load(path, mmap_mode="r").shape == (images, regions, dim):
        return
    kinds = np.arange(images) % KINDS
    _write_captions(folder, split, kinds, seed)
    signs = np.random.default_rng(1).integers(0, 2, (KINDS, dim), dtype=np.uint16) * SIGN
    rng = np.random.Generator(np.random.SFC64([seed, 2]))
    out = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=(images, regions, dim))
    for start in range(0, images, CHUNK):
        here = kinds[start : start + CHUNK]
        bits = np.frombuffer(rng.bytes(2 * len(here) * regions * dim), dtype=np.uint16) & MANTISSA
        made = (bits | HALF).reshape(len(here), regions, dim) | signs[here][:, None]
        out[start : start + len(here)] = made.astype(np.uint16, copy=False).view(np.float16)
    out.flush()


def _write_captions(folder: Path, split: str, kinds: np.ndarray, seed: int) -> None:
    """Lengths as `score_all` has them, the marks of start and end included."""
    rng = np.random.default_rng([seed, 3])
    own = np.random.default_rng(4).integers(0, WORDS, (KINDS, OWN_WORDS))
    generator = torch.Generator().manual_seed(seed)
    lengths = caption_lengths(5 * len(kinds), generator).numpy() - 2
    lines = []
    for number, length in enumerate(lengths):
        words = rng.integers(0, WORDS, length)
        shown = own[kinds[number // 5]]
        words[: length // 2] = rng.choice(shown, length // 2)
        lines.append(" ".join(f"word{word}" for word in words))
    (folder / f"{split}_caps.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    ids = "\n".join(f"{split}{number}" for number in range(len(kinds)))
    (folder / f"{split}_ids.txt").write_text(ids + "\n", encoding="utf-8")
