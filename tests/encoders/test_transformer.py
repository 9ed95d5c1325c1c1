"""New weights of the transformer: BERT's in its size, wider in smaller ones, or alike."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from counterfoil.encoders.transformer import (
    SPREAD,
    Transformer,
    initialize,
    select_rows,
    spread_for,
)


@pytest.mark.parametrize(
    ("inputs", "spread"), [(3072, SPREAD), (768, SPREAD), (256, 0.0625), (64, 0.125), (7, 0.125)]
)
def test_small_layers_get_wider_weights_and_berts_keep_theirs(inputs, spread) -> None:
    assert spread_for(inputs) == pytest.approx(spread)
    torch.manual_seed(0)
    layer = nn.Linear(inputs, 20_000 // inputs + 40)
    initialize(layer)
    assert float(layer.weight.detach().std()) == pytest.approx(spread, rel=0.1)
    assert not layer.bias.any()


@pytest.mark.parametrize("width", [32, 64, 128, 256])
def test_sums_over_a_small_layer_are_about_as_large_as_its_inputs(width) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(width, 4 * width)
    initialize(layer)
    sums = layer(torch.randn(200, width))
    assert 0.6 < float(sums.detach().std()) < 1.4


def test_attention_that_begins_alike_goes_to_what_is_alike_in_the_first_layer_alone() -> None:
    torch.manual_seed(0)
    width, heads = 48, 4
    transformer = Transformer(width, 2, heads, 0, 0.0, False)
    initialize(transformer)
    others = {name: value.clone() for name, value in transformer.state_dict().items()}
    words = nn.functional.layer_norm(torch.randn(6, width), (width,))
    regions = nn.functional.layer_norm(words.flip(0) + 0.7 * torch.randn(6, width), (width,))

    def right() -> float:
        """How often, over words and heads, most attention goes to the region that is alike."""
        q = transformer.layers[0].qkv(words)[:, :width].unflatten(1, (heads, -1))
        k = transformer.layers[0].qkv(regions)[:, width : 2 * width].unflatten(1, (heads, -1))
        best = torch.einsum("whd,rhd->hwr", q, k).argmax(-1)
        return float((best == torch.arange(6).flip(0)).float().mean())

    assert right() < 0.5
    transformer.attend_alike()
    assert right() > 0.7
    changed = {n for n, value in transformer.state_dict().items() if not value.equal(others[n])}
    assert changed == {"layers.0.qkv.weight"}
    kept = transformer.layers[0].qkv.weight[2 * width :]
    assert kept.equal(others["layers.0.qkv.weight"][2 * width :])


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_rows_are_selected_and_put_back_as_index_select_does(rows) -> None:
    torch.manual_seed(rows)
    places = torch.randperm(7)[:rows]
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(select_rows(x, places), x.index_select(0, places))
    weights = torch.randn(rows, 3, dtype=torch.float64)
    (ours,) = torch.autograd.grad((select_rows(x, places) * weights).sum(), x)
    (theirs,) = torch.autograd.grad((x.index_select(0, places) * weights).sum(), x)
    assert torch.equal(ours, theirs)
    if rows:
        assert torch.autograd.gradgradcheck(lambda x: select_rows(x, places).sin(), x)
