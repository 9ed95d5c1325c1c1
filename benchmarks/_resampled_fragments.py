"""Any number of images and captions, resampled from the fragments of an index.

A new item has as many fragments as one real item, its parent. Each is drawn from the parent with
probability `OWN`, else from one other item, and moved by a random vector of length `JITTER`. The
items of a block depend on its number alone, so a file of vectors can be continued at any block.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from counterfoil.encoders import Encoded
from counterfoil.search import SearchIndex
from counterfoil.search.items import Side

OWN, JITTER = 0.75, 0.3
BLOCK = 2048
NOISE = 1 << 14
"""Random directions; drawing new ones for every fragment would take most of the time."""


class Resampled:
    """Synthetic items of one side of an index."""

    def __init__(self, index: SearchIndex, side: Side) -> None:
        self.index, self.side = index, side
        items = index.items[side]
        real = items.encoded(items.table.live_ids)
        if real.fragments is None:
            raise SystemExit(f"{index.folder}: its model has no fragments; use one of naaf")
        self.lengths = real.mask.sum(1).numpy()
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.rows = F.normalize(real.fragments[real.mask].float(), dim=-1)
        generator = torch.Generator().manual_seed(1)
        noise = torch.randn(NOISE, self.rows.shape[1], generator=generator)
        self.noise = JITTER * F.normalize(noise, dim=-1)

    def block(self, number: int, count: int = BLOCK) -> Encoded:
        """The first ``count`` items of a block, with fragments at unit length."""
        rng = np.random.default_rng([self.side == "images", number])
        parents, others = rng.integers(len(self.lengths), size=(2, BLOCK))
        longest = int(self.lengths.max())
        own = rng.random((BLOCK, longest)) < OWN
        source = np.where(own, parents[:, None], others[:, None])
        place = (rng.random((BLOCK, longest)) * self.lengths[source]).astype(np.int64)
        noise = rng.integers(NOISE, size=(BLOCK, longest))
        mask = torch.from_numpy(np.arange(longest) < self.lengths[parents][:, None])[:count]
        fragments = self.rows[torch.from_numpy(self.starts[source] + place)[:count]]
        fragments += self.noise[torch.from_numpy(noise)[:count]]
        return Encoded(F.normalize(fragments, dim=-1) * mask[..., None], mask)

    def vectors(self, encoded: Encoded, dim: int) -> np.ndarray:
        """First-stage vectors of the index; of a fit the leading ``dim`` directions."""
        rows = self.index.proxy.vectors(encoded, self.side).rows
        return rows[:, :dim] if self.index.proxy.form == "fitted" else rows

    def write(self, path: Path, total: int, dim: int) -> None:
        """Half-precision vectors of ``total`` items; continues a file that is shorter."""
        width = self.vectors(self.block(0, 1), dim).shape[1]
        done = path.stat().st_size // (2 * width * BLOCK) if path.exists() else 0
        with path.open("r+b" if done else "wb") as file:
            file.seek(done * BLOCK * width * 2)
            file.truncate()
            for number in range(done, -(-total // BLOCK)):
                rows = self.vectors(self.block(number), dim).astype(np.float16)
                file.write(rows.tobytes())


def real_vectors(index: SearchIndex, side: Side, dim: int, count: int, seed: int = 0) -> np.ndarray:
    """First-stage vectors of real items, to search with."""
    keys = index.items[side].table.live_ids
    chosen = np.random.default_rng(seed).choice(keys, min(count, len(keys)), replace=False)
    rows = index.proxy.vectors(index.items[side].encoded(np.sort(chosen)), side, "query").rows
    return rows[:, :dim] if index.proxy.form == "fitted" else rows
