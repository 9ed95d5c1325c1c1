"""New weights of the transformer: BERT's in its size, wider in smaller ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from counterfoil.encoders.transformer import SPREAD, initialise, spread_for


@pytest.mark.parametrize(
    ("inputs", "spread"), [(3072, SPREAD), (768, SPREAD), (256, 0.0625), (64, 0.125), (7, 0.125)]
)
def test_small_layers_get_wider_weights_and_berts_keep_theirs(inputs, spread) -> None:
    assert spread_for(inputs) == pytest.approx(spread)
    torch.manual_seed(0)
    layer = nn.Linear(inputs, 20_000 // inputs + 40)
    initialise(layer)
    assert float(layer.weight.detach().std()) == pytest.approx(spread, rel=0.1)
    assert not layer.bias.any()


@pytest.mark.parametrize("width", [32, 64, 128, 256])
def test_sums_over_a_small_layer_are_about_as_large_as_its_inputs(width) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(width, 4 * width)
    initialise(layer)
    sums = layer(torch.randn(200, width))
    assert 0.6 < float(sums.detach().std()) < 1.4
