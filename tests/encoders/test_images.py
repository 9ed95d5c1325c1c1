"""CHAN's image encoders: like the public code in its form, indifferent to padding in ours."""

from __future__ import annotations

import pytest
import torch

from counterfoil.core.errors import ConfigError
from counterfoil.data.batches.collate import ImageBatch
from counterfoil.encoders import image_encoders
from tests.conftest import assert_close, assert_gradient_close, load_fixture

NAMES = ("self-attention", "transformer")
RENAMED = {
    "feedforward.ln.": "norm.",
    "feedforward.ln_1.": "norm.",
    "feedforward.ln_2.": "mlp_norm.",
    "feedforward.attn.": "attention.",
    "feedforward.mlp.c_fc.": "mlp.widen.",
    "feedforward.mlp.c_proj.": "mlp.narrow.",
}


def loaded(name: str, fixture, **options) -> torch.nn.Module:
    hyper = fixture.hyper
    encoder = image_encoders[name](
        hyper["img_dim"], hyper["embed_size"], heads=hyper["n_head"], **options
    )
    weights = {}
    for key, value in fixture.weights().items():
        for old, new in RENAMED.items():
            key = key.replace(old, new)
        weights[key] = value
    encoder.load_state_dict(weights)
    return encoder.eval()


def fixture_of(name: str):
    return load_fixture(f"chan-image-{name.replace('-', '')}")


def lengths_mask(fixture) -> torch.Tensor:
    return torch.arange(36)[None] < fixture["in.img_lens"][:, None]


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_form_agrees_at_every_real_region(name) -> None:
    fixture = fixture_of(name)
    mask = lengths_mask(fixture)
    with torch.no_grad():
        result = loaded(name, fixture, form="reference")(ImageBatch(fixture["in.images"], mask))
    assert_close(result.fragments[mask], fixture["out.img_emb"][mask])
    assert not result.fragments[~mask].any()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_agree_where_padding_counts_as_regions(name) -> None:
    fixture = fixture_of(name)
    images = fixture["in.images"].requires_grad_()
    whole = torch.ones(images.shape[:2], dtype=torch.bool)
    result = loaded(name, fixture, form="reference")(ImageBatch(images, whole)).fragments
    assert_close(result, fixture["out.img_emb"])
    result.sum().backward()
    assert_gradient_close(images.grad, fixture["grad.images"])


def test_the_papers_self_attention_is_the_references_on_full_images() -> None:
    fixture = fixture_of("self-attention")
    images = ImageBatch(fixture["in.images"], torch.ones(6, 36, dtype=torch.bool))
    assert_close(loaded("self-attention", fixture)(images).fragments, fixture["out.img_emb"])


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_padding_company_and_order_never_change_a_region(name, grad) -> None:
    torch.manual_seed(0)
    encoder = image_encoders[name](10, 12).eval()
    x = torch.randn(4, 7, 10)
    mask = torch.arange(7)[None] < torch.tensor([7, 1, 4, 5])[:, None]
    with torch.set_grad_enabled(grad):
        expected = encoder(ImageBatch(x, mask)).fragments
        for item in range(4):
            real = x[item, mask[item]]
            order = torch.randperm(len(real))
            alone = encoder(ImageBatch(real[order][None], mask[item, mask[item]][None])).fragments
            assert torch.allclose(alone[0], expected[item, mask[item]][order], atol=1e-5)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_an_image_without_regions_is_zero_and_harms_nobody(name, grad) -> None:
    encoder = image_encoders[name](10, 12).eval()
    x = torch.randn(2, 3, 10, requires_grad=grad)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    with torch.set_grad_enabled(grad):
        result = encoder(ImageBatch(x, mask)).fragments
    assert result.isfinite().all()
    assert not result[~mask].any()
    if grad:
        result.sum().backward()
        assert x.grad.isfinite().all()
        assert not x.grad[~mask].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["paper", "reference"])
def test_the_gradient_reaches_every_parameter(name, form) -> None:
    torch.manual_seed(0)
    encoder = image_encoders[name](10, 12, form=form)
    x, mask = torch.randn(3, 5, 10), torch.ones(3, 5, dtype=torch.bool)
    (encoder(ImageBatch(x, mask)).fragments * torch.randn(3, 5, 12)).sum().backward()
    assert [n for n, p in encoder.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    assert image_encoders["self-attention"](10, 12).attention.num_heads == 4
    with pytest.raises(ConfigError, match=r"model\.image\.heads"):
        image_encoders["self-attention"](10, 12, heads=8)
