"""HREM's pooling with fragment relations: parity with the public code, and padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from counterfoil.core.errors import ConfigError
from counterfoil.data.batches.collate import ImageBatch
from counterfoil.encoders import image_encoders, poolings
from tests.conftest import assert_close, assert_gradient_close, load_fixture
from tests.encoders.test_encoders import ragged
from tests.encoders.test_parity import mask_of

RENAMED = {
    "aggr.layers.0": "joint.pool.relate",
    "fc.fc": "fc",
    "fc.mlp.layers.0": "mlp.narrow",
    "fc.mlp.layers.1": "mlp.widen",
    "fc.mlp.bns.0": "mlp.norm",
}


def load(fixture, form: str):
    hyper = fixture.hyper
    pooling = {
        "name": "relations",
        "k": hyper["maxk"],
        "residual": hyper["residual_weight"],
        "heads": hyper["nhead"],
        "form": form,
    }
    encoder = image_encoders["mlp"](
        hyper["img_dim"], hyper["embed_size"], residual="raw", pooling=pooling, hidden=32
    )
    state = {}
    for key, value in fixture.weights().items():
        for old, new in RENAMED.items():
            if key.startswith(old):
                state[key.replace(old, new, 1)] = value
    encoder.load_state_dict(state)
    return encoder.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("hrem-image-encoder", "paper"),
        ("hrem-image-encoder", "reference"),
        ("hrem-image-encoder-len1", "reference"),
    ],
)
def test_the_image_encoder_agrees_with_gradients(name, form, dtype) -> None:
    fixture = load_fixture(name)
    encoder = load(fixture, form).to(dtype)
    images = fixture["in.images"].to(dtype).requires_grad_()
    mask = mask_of(fixture["in.img_lens"], images.shape[1])
    encoded = encoder(ImageBatch(images, mask))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-7
    assert_close(encoded.pooled, fixture["out.img_emb"], tolerance)
    raw = encoder.joint.pool(encoded.fragments, mask)
    assert_close(raw, fixture["out.img_emb_notnorm"], tolerance)
    assert_close(encoded.fragments[mask], fixture["out.regions_pre_pool"][mask], tolerance)
    encoded.pooled.sum().backward()
    assert_gradient_close(images.grad[mask], fixture["grad.images"][mask])


def test_only_the_reference_lets_an_item_of_one_region_change_those_after_it() -> None:
    fixture = load_fixture("hrem-image-encoder-len1")
    mask = mask_of(fixture["in.img_lens"], fixture["in.images"].shape[1])
    pooled = load(fixture, "paper")(ImageBatch(fixture["in.images"], mask)).pooled
    differs = (pooled.detach() - fixture["out.img_emb"]).abs().amax(1) > 1e-4
    assert differs.tolist() == [False, False, True, True]
    alone = load(fixture, "reference")(ImageBatch(fixture["in.images"][2:], mask[2:])).pooled
    assert torch.allclose(alone, pooled[2:], atol=1e-6)


@settings(max_examples=10)
@given(seed=st.integers(0, 99), extra=st.integers(1, 4), residual=st.sampled_from([0.0, 0.8, 1.0]))
def test_padding_company_and_order_never_change_a_vector(seed, extra, residual) -> None:
    torch.manual_seed(0)
    pool = poolings["relations"](8, residual=residual, dropout=0.1).eval()
    x, mask = ragged(seed, 5, 6, 8)
    expected = pool(x, mask)
    wider = torch.cat([x, 50.0 * torch.randn(5, extra, 8)], 1)
    padded = pool(wider, torch.cat([mask, torch.zeros(5, extra).bool()], 1))
    assert torch.allclose(padded, expected, atol=1e-5)
    with torch.no_grad():  # torch has another path then
        assert torch.allclose(pool(x, mask), expected, atol=1e-5)
    for item in range(5):
        real = x[item, mask[item]][torch.randperm(int(mask[item].sum()))]
        alone = pool(real[None], torch.ones(1, len(real), dtype=torch.bool))
        assert torch.allclose(alone[0], expected[item], atol=1e-5)


def test_the_vector_is_what_the_paper_writes() -> None:
    """0.8 · mean of the two largest values + 0.2 · mean after the layer, by plain loops."""
    torch.manual_seed(0)
    pool = poolings["relations"](8).eval()
    x, mask = ragged(1, 4, 5, 8)
    pooled = pool(x, mask)
    for item in range(4):
        real = x[item, mask[item]]
        largest = torch.stack([c.sort(descending=True).values[:2].mean() for c in real.T])
        related = pool.relate(real[None])[0].mean(0)
        assert torch.allclose(pooled[item], 0.8 * largest + 0.2 * related, atol=1e-5)


def test_bf16_and_items_without_fragments_stay_finite() -> None:
    torch.manual_seed(0)
    pool = poolings["relations"](8, dropout=0.1)
    x = torch.randn(3, 3, 8, requires_grad=True)
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pooled = pool(x, mask)
    assert pooled.isfinite().all()
    assert not pooled[2].any()
    pooled.float().square().sum().backward()
    assert x.grad.isfinite().all()
    assert not x.grad[~mask].any()


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 heads do not divide an embed_size of 8"):
        poolings["relations"](8, heads=3)
    assert poolings["relations"](12).relate.self_attn.num_heads == 4
    assert poolings["relations"](1024).relate.self_attn.num_heads == 16
