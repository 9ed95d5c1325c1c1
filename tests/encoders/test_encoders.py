"""What holds for every encoder and pooling: masks, permutations, batches, gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.data.batches.collate import ImageBatch, TextBatch
from counterfoil.encoders import Encoded, image_encoders, l2_normalize, poolings, text_encoders
from counterfoil.encoders.layers import FragmentBatchNorm, linear_before_norm
from tests.encoders.test_parity import vocabulary

IMAGE_FORMS = {
    "fc": {},
    "fc-order": {"absolute": True},
    "mlp": {"residual": "none"},
    "mlp-projected": {"residual": "projected", "final_norm": True},
    "mlp-raw": {"residual": "raw"},
}
WORD_ENCODERS = ("gru", "bigru")


def image_encoder(form: str, pooling: str = "gpo"):
    return image_encoders[form.split("-")[0]](10, 12, pooling=pooling, **IMAGE_FORMS[form])


def ragged(seed: int, items: int, longest: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (items,), generator=generator)
    mask = torch.arange(longest)[None] < lengths[:, None]
    x = torch.randn(items, longest, dim, generator=generator)
    return x * mask[..., None], mask


@given(
    pooling=st.sampled_from(sorted(poolings)),
    seed=st.integers(0, 99),
    extra=st.integers(1, 5),
)
def test_padding_and_order_never_change_a_pooled_vector(pooling, seed, extra) -> None:
    torch.manual_seed(0)
    pool = poolings[pooling](8)
    x, mask = ragged(seed, 5, 6, 8)
    expected = pool(x, mask)
    junk = torch.full((5, extra, 8), 50.0)
    padded = pool(torch.cat([x, junk], 1), torch.cat([mask, torch.zeros(5, extra).bool()], 1))
    assert torch.allclose(padded, expected, atol=1e-5)
    for item in range(5):
        real = x[item, mask[item]][torch.randperm(int(mask[item].sum()))]
        alone = pool(real[None], torch.ones(1, len(real), dtype=torch.bool))
        assert torch.allclose(alone[0], expected[item], atol=1e-5)


@pytest.mark.parametrize("pooling", sorted(poolings))
def test_an_item_without_fragments_pools_to_zero(pooling) -> None:
    pool = poolings[pooling](8)
    x = torch.randn(2, 3, 8, requires_grad=True)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    pooled = pool(x, mask)
    assert torch.equal(pooled[1], torch.zeros(8))
    pooled.sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad[~mask].abs().max() == 0


@pytest.mark.parametrize("form", IMAGE_FORMS)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_padding_never_changes_an_encoded_image(form, mode) -> None:
    torch.manual_seed(0)
    encoder = image_encoder(form)
    getattr(encoder, mode)()
    x, mask = ragged(1, 6, 5, 10)
    expected = encoder(ImageBatch(x, mask))
    wider = torch.cat([x, torch.randn(6, 3, 10)], 1)
    got = encoder(ImageBatch(wider, torch.cat([mask, torch.zeros(6, 3).bool()], 1)))
    assert torch.allclose(got.pooled, expected.pooled, atol=1e-5)
    assert torch.allclose(got.fragments[:, :5], expected.fragments, atol=1e-5)


@pytest.mark.parametrize("name", WORD_ENCODERS)
def test_padding_and_batch_never_change_an_encoded_text(name) -> None:
    torch.manual_seed(0)
    encoder = text_encoders[name](vocabulary(30), 12, word_dim=6).eval()
    mask = ragged(2, 6, 7, 1)[1]
    ids = torch.randint(5, 30, (6, 7))
    expected = encoder(TextBatch(ids, mask))
    wider = torch.cat([ids, torch.randint(5, 30, (6, 4))], 1)
    got = encoder(TextBatch(wider, torch.cat([mask, torch.zeros(6, 4).bool()], 1)))
    assert torch.allclose(got.pooled, expected.pooled, atol=1e-6)
    for item in range(6):
        alone = encoder(TextBatch(ids[item : item + 1], mask[item : item + 1]))
        assert torch.allclose(alone.pooled[0], expected.pooled[item], atol=1e-6)


@pytest.mark.parametrize("form", IMAGE_FORMS)
def test_the_gradient_reaches_every_parameter_of_an_image_encoder(form) -> None:
    encoder = image_encoder(form)
    x, mask = ragged(3, 6, 5, 10)
    target = torch.randn(6, 12)
    (encoder(ImageBatch(x, mask)).pooled * target).sum().backward()
    silent = [n for n, p in encoder.named_parameters() if p.grad is None or not p.grad.any()]
    # what batch normalisation subtracts again has no gradient but rounding
    assert [n for n in silent if not n.startswith(("mlp.narrow.bias", "mlp.widen.bias"))] == []


def test_the_gradient_of_a_bias_before_a_batch_norm_is_exactly_zero_in_training_alone() -> None:
    torch.manual_seed(0)
    layer, norm = torch.nn.Linear(5, 4), FragmentBatchNorm(4)
    x, target = torch.randn(3, 6, 5), torch.randn(3, 6, 4)
    found = norm(linear_before_norm(layer, norm, x))
    assert torch.equal(found, FragmentBatchNorm(4)(layer(x)))
    (found * target).sum().backward()
    assert not layer.bias.grad.any()
    assert layer.weight.grad.any()
    (norm.eval()(linear_before_norm(layer, norm, x)) * target).sum().backward()
    assert layer.bias.grad.any()


def test_batch_norm_over_real_fragments_equals_torchs_on_these_alone() -> None:
    torch.manual_seed(0)
    ours, theirs = FragmentBatchNorm(4), torch.nn.BatchNorm1d(4)
    x, mask = ragged(4, 5, 6, 4)
    mine = ours(x, mask)[mask]
    assert torch.allclose(mine, theirs(x[mask]), atol=1e-5)
    assert torch.allclose(ours.running_mean, theirs.running_mean, atol=1e-6)
    assert torch.allclose(ours.running_var, theirs.running_var, atol=1e-6)
    assert torch.allclose(
        ours.eval()(x), theirs.eval()(x.flatten(0, 1)).reshape(x.shape), atol=1e-5
    )


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-9, 0.0])
def test_the_gradient_of_unit_length_is_the_one_autograd_finds(scale) -> None:
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + 1e-8)

    x = (scale * torch.randn(3, 4, 5, dtype=torch.float64)).requires_grad_()
    weights = torch.randn(3, 4, 5, dtype=torch.float64)
    result, expected = (
        torch.autograd.grad((way(x) * weights).sum(), x)[0] for way in (l2_normalize, plain)
    )
    assert torch.isfinite(result).all()
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
    if scale == 1.0:
        assert torch.autograd.gradgradcheck(l2_normalize, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_normalized_in_single_precision(dtype) -> None:
    torch.manual_seed(0)
    x = (3 * torch.randn(50, 300)).to(dtype).requires_grad_()
    exact = l2_normalize(x.detach().double())
    rounding = torch.finfo(dtype).eps * exact.abs()
    assert ((l2_normalize(x.detach()).double() - exact).abs() <= 0.51 * rounding + 1e-7).all()
    with torch.autocast("cpu", dtype):
        normalized = l2_normalize(x)
    assert normalized.dtype == torch.float32
    assert float((normalized.detach() - exact).abs().max()) < 1e-7
    (gradient,) = torch.autograd.grad((normalized * torch.arange(300)).sum(), x)
    wide = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad((l2_normalize(wide) * torch.arange(300)).sum(), wide)
    assert gradient.dtype == dtype
    assert torch.allclose(gradient.double(), wanted, rtol=1e-2, atol=1e-2)


def test_concatenated_batches_of_different_lengths_keep_their_masks() -> None:
    parts = [
        Encoded(torch.ones(2, n, 3), torch.ones(2, n, dtype=torch.bool), torch.ones(2, 3))
        for n in (2, 4)
    ]
    whole = Encoded.cat(parts)
    assert whole.fragments.shape == (4, 4, 3)
    assert whole.mask.sum(1).tolist() == [2, 2, 4, 4]
    assert whole[torch.tensor([3])].mask.sum() == 4


def test_boxes_and_links_travel_with_the_items_they_belong_to() -> None:
    def part(count: int, length: int, seed: int) -> Encoded:
        generator = torch.Generator().manual_seed(seed)
        return Encoded(
            torch.randn(count, length, 3, generator=generator),
            torch.ones(count, length, dtype=torch.bool),
            torch.ones(count, 3),
            torch.rand(count, length, 4, generator=generator),
            torch.rand(count, length, length, generator=generator) > 0.5,
        )

    first, second = part(2, 2, 0), part(1, 4, 1)
    whole = Encoded.cat([first, second])
    assert whole.boxes.shape == (3, 4, 4)
    assert whole.graph.shape == (3, 4, 4)
    assert torch.equal(whole[2:].graph, second.graph)
    assert torch.equal(whole[torch.tensor([2, 0])].boxes[1, :2], first.boxes[0])
    assert not whole.graph[:2, 2:].any()
    assert not whole.graph[:2, :, 2:].any()
    back = whole[:2].trim_to(2)
    assert torch.equal(back.boxes, first.boxes)
    assert torch.equal(back.graph, first.graph)
    assert torch.equal(back.to("cpu").gather().graph, first.graph)
    kept = whole.keep("fragments")
    assert kept.boxes is whole.boxes
    assert kept.pooled is None
    assert whole.keep("pooled").graph is None
    assert Encoded.cat([first, Encoded(first.fragments, first.mask)]).boxes is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_gpo_pools_the_same_bits_with_and_without_gradients(mode, dtype) -> None:
    gpo = poolings["gpo"](6).to(dtype)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 9, 6, generator=generator, dtype=dtype).round(decimals=1)  # ties, zeros
    mask = torch.arange(9)[None] < torch.tensor([9, 4, 1, 0, 6])[:, None]
    x[0, 3, 2], x[1, 0, 1], x[4, 2, 5] = torch.nan, torch.inf, -torch.inf
    expected = gpo(x.clone().requires_grad_(), mask).detach()
    before = x.clone()
    with mode():
        pooled = gpo(x, mask)
    assert torch.equal(x.nan_to_num(7.0), before.nan_to_num(7.0))
    assert pooled.isnan()[0, 2]
    assert torch.equal(pooled.nan_to_num(7.0), expected.nan_to_num(7.0))
