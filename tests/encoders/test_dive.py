"""Sets predicted by slots: parity with the public code, and what padding may not do."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from counterfoil.data.batches.collate import ImageBatch, TextBatch
from counterfoil.data.text.tokenizers import HuggingFaceText
from counterfoil.encoders import Encoded, image_encoders, text_encoders
from counterfoil.encoders.dive import SetPrediction, sine_code
from counterfoil.matchers.ensemble import EnsembleEncoder, split_members
from tests.conftest import assert_close, assert_gradient_close, load_fixture
from tests.encoders.test_encoders import ragged
from tests.encoders.test_parity import vocabulary
from tests.models.test_models import tiny_bert  # noqa: F401 - a fixture

RENAMED = {
    "agg_block.latents": "aggregate.latents",
    "agg_block.layers.0.0.fn.to_out.0": "aggregate.attention.to_out",
    "agg_block.layers.0.0.fn": "aggregate.attention",
    "agg_block.layers.0.0.norm_context": "aggregate.context_norm",
    "agg_block.layers.0.0.norm": "aggregate.norm",
    "agg_block.layers.0.2.fn.net": "aggregate.feed",
    "agg_block.layers.0.2.norm": "aggregate.feed_norm",
    "agg_block.last_layer.0": "aggregate.last_norm",
    "residual_norm": "global_norm",
}
SMALL = {"head_dim": 8, "heads": 2, "depth": 2}


def renamed(key: str) -> str:
    old = next(old for old in RENAMED if key.startswith(old))
    return key.replace(old, RENAMED[old], 1)


@pytest.mark.parametrize(
    ("option", "form", "dtype"),
    [
        ("nomask", "paper", torch.float64),
        ("nomask", "reference", torch.float32),
        ("masked", "reference", torch.float64),
        ("sine_masked", "reference", torch.float64),
        ("sine_masked", "reference", torch.float32),
    ],
)
def test_slots_agree_with_the_reference_with_gradients(option, form, dtype) -> None:
    fixture = load_fixture("dive-slots")
    hyper = fixture.hyper
    predict = SetPrediction(
        hyper["dim"],
        hyper["dim"],
        slots=hyper["num_embeds"],
        depth=hyper["depth"],
        heads=hyper["heads"],
        head_dim=hyper["dim_head"],
        sine=fixture.options[option]["pos_enc"] == "sine",
        form=form,
    )
    predict = predict.eval().to(dtype)
    predict.load_state_dict({renamed(key): value for key, value in fixture.weights().items()})
    local = fixture["in.local_feat"].to(dtype).requires_grad_()
    whole = fixture["in.global_feat"].to(dtype).requires_grad_()
    padded = fixture["in.pad_mask"].bool()
    mask = ~padded if fixture.options[option]["mask"] else torch.ones_like(padded)
    encoded = predict(local, mask, whole)
    tolerance = 1e-6 if dtype == torch.float64 else 1e-5
    assert_close(encoded.residuals, fixture[f"out.{option}.slots"], tolerance)
    assert_close(encoded.fragments, fixture[f"out.{option}.set"], tolerance)
    if f"grad.{option}.local_feat" in fixture.tensors:
        around = predict.global_norm(whole)[:, None] + encoded.residuals
        (encoded.residuals.sum() + around.sum()).backward()
        assert_gradient_close(local.grad, fixture[f"grad.{option}.local_feat"])
        assert_gradient_close(whole.grad, fixture[f"grad.{option}.global_feat"])


def test_the_paper_form_is_the_reference_without_its_padding() -> None:
    """What the reference says of an item alone, the paper's form says of it in any batch."""
    torch.manual_seed(0)
    forms = [SetPrediction(8, 6, sine=True, form=form, **SMALL) for form in ("paper", "reference")]
    paper, reference = (predict.eval() for predict in forms)
    reference.load_state_dict(paper.state_dict())
    x, mask = ragged(0, 5, 7, 6)
    whole = torch.randn(5, 8)
    together = paper(x, mask, whole).fragments
    for item in range(5):
        n = int(mask[item].sum())
        alone = reference(x[item : item + 1, :n], mask[item : item + 1, :n], whole[item : item + 1])
        assert torch.allclose(alone.fragments[0], together[item], atol=1e-5)
    assert not torch.allclose(reference(x, mask, whole).fragments, together, atol=1e-2)


def test_positions_are_a_full_turn_over_the_length_of_an_item() -> None:
    code = sine_code(torch.tensor([[4], [8]]), 8, 5)
    assert code.shape == (2, 8, 5)
    for row, length in enumerate((4, 8)):
        for place in range(8):
            turn = 2 * math.pi * (place + 1) / length
            for channel in range(5):
                angle = turn / 10000 ** (2 * (channel // 2) / 5)
                expected = math.cos(angle) if channel % 2 else math.sin(angle)
                assert float(code[row, place, channel]) == pytest.approx(expected, abs=1e-5)


def image_encoder(**options):
    torch.manual_seed(0)
    return image_encoders["dive"](10, 12, **SMALL, **options)


def text_encoder(name: str, bert, **options):
    torch.manual_seed(0)
    if name == "dive-bert":
        text = HuggingFaceText.from_pretrained(str(bert))
        return text_encoders[name](text, 12, pretrained=str(bert), **SMALL, **options)
    return text_encoders[name](vocabulary(20), 12, word_dim=6, **SMALL, **options)


@settings(max_examples=10)
@given(seed=st.integers(0, 99), extra=st.integers(1, 4))
def test_padding_company_and_order_of_regions_never_change_an_image(seed, extra) -> None:
    encoder = image_encoder().eval()
    x, mask = ragged(seed, 5, 6, 10)
    expected = encoder(ImageBatch(x, mask))
    assert expected.mask.all()
    assert expected.fragments.shape == expected.residuals.shape == (5, 4, 12)
    wider = torch.cat([x, 50.0 * torch.randn(5, extra, 10)], 1)
    padded = encoder(ImageBatch(wider, torch.cat([mask, torch.zeros(5, extra).bool()], 1)))
    assert torch.allclose(padded.fragments, expected.fragments, atol=1e-5)
    for item in range(5):
        real = x[item, mask[item]][torch.randperm(int(mask[item].sum()))]
        alone = encoder(ImageBatch(real[None], torch.ones(1, len(real), dtype=torch.bool)))
        assert torch.allclose(alone.fragments[0], expected.fragments[item], atol=1e-5)


@pytest.mark.parametrize("name", ["dive-gru", "dive-bert"])
def test_padding_and_company_never_change_a_text(name, tiny_bert) -> None:  # noqa: F811
    encoder = text_encoder(name, tiny_bert).eval()
    mask = ragged(2, 6, 7, 1)[1]
    ids = torch.randint(5, 20, (6, 7))
    expected = encoder(TextBatch(ids, mask)).fragments
    wider = torch.cat([ids, torch.randint(5, 20, (6, 4))], 1)
    got = encoder(TextBatch(wider, torch.cat([mask, torch.zeros(6, 4).bool()], 1)))
    assert torch.allclose(got.fragments, expected, atol=1e-5)
    for item in range(6):
        n = int(mask[item].sum())
        alone = encoder(TextBatch(ids[item : item + 1, :n], mask[item : item + 1, :n]))
        assert torch.allclose(alone.fragments[0], expected[item], atol=1e-5)


def test_the_whole_of_a_text_is_the_mean_of_the_last_states_of_its_gru(tiny_bert) -> None:  # noqa: F811
    encoder = text_encoder("dive-gru", tiny_bert).eval()
    mask = torch.tensor([[True] * 5, [True, True, False, False, False]])
    ids = torch.randint(5, 20, (2, 5))
    seen = []
    encoder.set.global_norm.register_forward_hook(lambda _, given, __: seen.append(given[0]))
    encoder(TextBatch(ids, mask))
    for item, length in enumerate((5, 2)):
        final = encoder.rnn(encoder.embed(ids[item : item + 1, :length]))[1]  # [2, 1, H]
        assert torch.allclose(seen[0][item], final.mean(0)[0], atol=1e-6)


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("name", ["dive", "dive-gru", "dive-bert"])
def test_gradients_are_finite_and_reach_every_parameter(name, slots, tiny_bert) -> None:  # noqa: F811
    x, mask = ragged(3, 6, 5, 10)
    if name == "dive":
        encoder, batch = image_encoder(slots=slots), ImageBatch(x, mask)
    else:
        encoder = text_encoder(name, tiny_bert, slots=slots)
        batch = TextBatch(torch.randint(5, 20, mask.shape), mask)
    encoded = encoder(batch)
    assert encoded.fragments.shape == (6, slots, 12)
    (encoded.fragments * torch.randn(6, slots, 12)).sum().backward()
    assert all(p.grad.isfinite().all() for p in encoder.parameters() if p.grad is not None)
    silent = {n for n, p in encoder.named_parameters() if p.grad is None or not p.grad.any()}
    # one slot takes all of every key, so it has nothing to ask for
    query_key_weights = (
        {f"set.aggregate.attention.to_{x}.weight" for x in "qk"} if slots == 1 else set()
    )
    query_key_weights |= (
        {f"set.aggregate.norm.{x}" for x in ("weight", "bias")} if slots == 1 else set()
    )
    assert {
        n for n in silent - query_key_weights if "pooler" not in n and "narrow.bias" not in n
    } == set()


@pytest.mark.parametrize("name", ["dive", "dive-gru"])
def test_bf16_and_items_of_one_or_no_fragment_stay_finite(name, tiny_bert) -> None:  # noqa: F811
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    if name == "dive":
        encoder, batch = image_encoder(), ImageBatch(torch.randn(3, 3, 10), mask)
    else:
        encoder = text_encoder(name, tiny_bert)
        batch = TextBatch(torch.randint(5, 20, (3, 3)), mask)
    expected = encoder.eval()(batch).fragments
    assert torch.allclose(expected.norm(dim=-1), torch.ones(3, 4), atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = encoder(batch).fragments
    rough.float().sum().backward()
    assert (rough.float() - expected).abs().max() < 0.1
    assert all(p.grad.isfinite().all() for p in encoder.parameters() if p.grad is not None)


def test_residuals_travel_with_their_items_and_go_where_nobody_reads_them() -> None:
    def part(count: int, size: int) -> Encoded:
        mask = torch.ones(count, size, dtype=torch.bool)
        return Encoded(torch.randn(count, size, 3), mask, residuals=torch.randn(count, size, 3))

    one, two = part(2, 2), part(3, 4)
    whole = Encoded.cat([one, two])
    assert torch.equal(whole.residuals[:2, :2], one.residuals)
    assert not whole.residuals[:2, 2:].any()
    assert torch.equal(whole[2:].trim_to(3).residuals, two.residuals[:, :3])
    assert whole.keep("both").residuals is whole.residuals
    assert whole.keep("fragments").residuals is None
    assert whole.keep("pooled").residuals is None
    assert Encoded.cat([one, part(1, 2).keep("fragments")]).residuals is None


def test_copies_keep_their_own_residuals() -> None:
    members = [image_encoder().eval() for _ in range(2)]
    torch.nn.init.normal_(members[1].set.aggregate.latents)
    batch = ImageBatch(*ragged(5, 3, 4, 10))
    apart = split_members(EnsembleEncoder(members)(batch), 2)
    for member, part in zip(members, apart, strict=True):
        assert torch.equal(part.residuals, member(batch).residuals)
