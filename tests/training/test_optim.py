"""Parameter groups: who decays, and at which rate."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from counterfoil.core.config import OptimizerConfig
from counterfoil.encoders.layers import FragmentBatchNorm
from counterfoil.training.optim import create_optimizer


class Parts(nn.Module):
    """One of everything that a model may have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.words = nn.Embedding(4, 2)
        self.kind = nn.Parameter(torch.ones(2))
        self.norm = nn.LayerNorm(3)
        self.batch_norm = FragmentBatchNorm(3)
        self.rnn = nn.GRU(2, 2)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.language_model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        self.language_model.pretrained = True


def settings_of(optimizer, module) -> dict[str, tuple[float, float]]:
    """Rate and decay of each parameter by name."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        names[id(parameter)]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


@pytest.mark.parametrize("no_decay", [None, "norms-and-biases"])
@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_biases_and_norms_decay_unless_told_not_to(name, no_decay) -> None:
    parts = Parts()
    config = OptimizerConfig(name=name, lr=1.0, weight_decay=0.5, no_decay=no_decay)
    result = settings_of(create_optimizer(parts, config), parts)
    assert result.keys() == dict(parts.named_parameters()).keys()
    for key, (rate, decay) in result.items():
        assert rate == (0.1 if key.startswith("language_model") else 1.0)
        spared = "bias" in key or "norm" in key or key == "language_model.1.weight"
        kept = key == "temperature" or (spared and no_decay is not None)
        assert decay == (0.0 if kept else 0.5), key


def test_the_first_group_has_the_full_rate_and_decays() -> None:
    config = OptimizerConfig(lr=0.3, weight_decay=0.5, no_decay="norms-and-biases")
    first = create_optimizer(Parts(), config).param_groups[0]
    assert (first["lr"], first["weight_decay"]) == (0.3, 0.5)


def test_what_does_not_decay_keeps_its_size() -> None:
    parts = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    before = {name: value.clone() for name, value in parts.state_dict().items()}
    config = OptimizerConfig(lr=0.1, weight_decay=0.5, no_decay="norms-and-biases")
    optimizer = create_optimizer(parts, config)
    (0 * sum(p.sum() for p in parts.parameters())).backward()
    optimizer.step()
    after = parts.state_dict()
    assert [name for name in before if not after[name].equal(before[name])] == ["0.weight"]
