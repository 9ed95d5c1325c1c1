"""Encoded items on disk are read back as they were written, in any order and selection."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from counterfoil.core.storage import arrays
from counterfoil.encoders import Encoded, stored
from counterfoil.encoders.stored import EncodedReader, EncodedWriter, Extent

LENGTHS = [3, 1, 0, 4, 2, 2, 5, 1, 3]
PRESENT = np.array([True, True, False, True, True, False, True, True, True])


@pytest.fixture
def items(tmp_path):
    """What was written, padded, and a reader of it; two blocks."""
    rng = torch.Generator().manual_seed(0)
    mask = torch.arange(5)[None] < torch.tensor(LENGTHS)[:, None]
    links = torch.rand(9, 5, 5, generator=rng) < 0.5
    written = Encoded(
        torch.randn(9, 5, 6, generator=rng) * mask[..., None],
        mask,
        pooled=torch.randn(9, 4, generator=rng),
        boxes=torch.rand(9, 5, 4, generator=rng) * mask[..., None],
        graph=links & mask[:, :, None] & mask[:, None, :],
    )
    writer = EncodedWriter(tmp_path, "float32", Extent())
    for start, end in ((0, 5), (5, 9)):
        present = PRESENT[start:end]
        chosen = start + np.flatnonzero(present)
        extent = writer.append(written[torch.from_numpy(chosen)], present)
    return written, EncodedReader(tmp_path, "float32", extent)


@pytest.mark.parametrize("order", [range(9), [8, 0, 1, 3, 4, 2, 6, 7], [5, 2], [7], [3, 3, 4], []])
def test_any_items_are_read_as_written(items, order) -> None:
    written, reader = items
    read, present = reader.read(list(order))
    assert present.tolist() == PRESENT[list(order)].tolist()
    for row, item in enumerate(order):
        count = LENGTHS[item] if PRESENT[item] else 0
        assert int(read.mask[row].sum()) == count
        assert torch.equal(read.fragments[row, :count], written.fragments[item, :count])
        assert torch.equal(read.boxes[row, :count], written.boxes[item, :count])
        assert torch.equal(read.graph[row, :count, :count], written.graph[item, :count, :count])
        assert not read.fragments[row, count:].any()
        assert torch.equal(read.pooled[row], written.pooled[item] * bool(PRESENT[item]))


def test_items_that_follow_each_other_are_read_at_once(items, monkeypatch) -> None:
    _, reader = items
    reads = []
    read_into = arrays.read_into
    monkeypatch.setattr(
        stored, "read_into", lambda *given: reads.append(given[2]) or read_into(*given)
    )
    reader.read(range(9))
    assert len(reads) == len(reader.files) == 4
