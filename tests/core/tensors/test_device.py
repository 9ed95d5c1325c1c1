"""A model beyond the machine's memory is refused before anything of it is allocated."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from counterfoil.core.config import build_config
from counterfoil.core.errors import ConfigError
from counterfoil.core.tensors.device import MemoryGuard
from counterfoil.models import create_model


@pytest.mark.parametrize(
    "change",
    [
        {"embed_size": 65_536, "ensemble_size": 64},
        {"text": {"word_dim": 2**31}},
        {"embed_size": 65_536, "text": {"layers": 1000}},
    ],
)
def test_a_model_of_absurd_size_is_refused_before_its_weights_are_allocated(
    change, concepts, monkeypatch
) -> None:
    monkeypatch.setattr("counterfoil.core.tensors.device.machine_memory", lambda: 2**30)
    config = build_config({"model": {"name": "rvse-mlp", **change}})
    with pytest.raises(ConfigError, match=r"model: its weights need more than 0.2 GiB"):
        create_model(config.model, concepts.train, config.data)


@pytest.mark.parametrize("change", [{"word_dim": 0}, {"word_dim": -4}, {"layers": 0}])
def test_numbers_that_torch_refuses_are_config_errors_that_name_the_part(change, concepts) -> None:
    config = build_config({"model": {"name": "rvse-mlp", "embed_size": 8, "text": change}})
    with pytest.raises(ConfigError, match=r"model.text: '\w+' cannot be built with"):
        create_model(config.model, concepts.train, config.data)


def test_the_guard_does_not_import_the_compiler() -> None:
    assert not hasattr(MemoryGuard.__torch_dispatch__, "__wrapped__")  # torch wraps to import it


def test_the_guard_counts_all_tensors_and_changes_none() -> None:
    torch.manual_seed(0)
    free = nn.Linear(100, 100)
    torch.manual_seed(0)
    with MemoryGuard(limit=10**6) as guard:
        guarded = nn.Linear(100, 100)
    assert torch.equal(free.weight, guarded.weight)
    assert guard.allocated == 4 * 100 * 101
    with pytest.raises(ConfigError), MemoryGuard(limit=10**6):
        nn.Sequential(*(nn.Linear(100, 100) for _ in range(100)))
    with pytest.raises(ConfigError, match="more than 20,000 weights"), MemoryGuard(limit=10**9):
        nn.ParameterList(torch.empty(1) for _ in range(20_001))
    with MemoryGuard(limit=1000):
        assert torch.empty(10**6, 10**6, device="meta").numel() == 10**12
