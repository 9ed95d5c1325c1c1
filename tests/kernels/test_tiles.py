"""How much of a grid of pairs is done at once."""

from __future__ import annotations

import pytest
import torch

from counterfoil.evaluation.score_plan import free_memory
from counterfoil.kernels.tiles import free_on_gpu, plan_tiles

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 100 bytes: 40 are free, and of the 30 that this process has, tensors take 10."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10)


def test_what_this_process_keeps_for_new_tensors_is_free(gpu) -> None:
    assert free_on_gpu(GPU) == free_memory(GPU) == 60


def test_a_tile_takes_a_quarter_of_what_is_free(gpu) -> None:
    plan = plan_tiles(3, 5, cells_per_pair=1, floats_per_cell=1, device=GPU)
    assert (plan.rows, plan.columns) == (3, 1)  # 60 / 4 bytes are three numbers
    plan = plan_tiles(1, 5, cells_per_pair=1, floats_per_cell=1, device=GPU)
    assert (plan.rows, plan.columns) == (1, 3)
