"""VSRN and VSRN++: reasoning over fragments, as the public code and as plain loops have it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from counterfoil.core.config import build_config
from counterfoil.data.batches.collate import ImageBatch, TextBatch
from counterfoil.encoders import image_encoders, poolings, text_encoders
from counterfoil.encoders.layers import FragmentBatchNorm
from counterfoil.encoders.vsrn import RelationLayer
from counterfoil.models import create_model
from counterfoil.training.trainer import Trainer
from tests.conftest import assert_close, assert_gradient_close, load_fixture, thinned
from tests.encoders.test_encoders import ragged
from tests.encoders.test_parity import full_images, vocabulary

PUBLISHED = {"coco": {"unit_regions": True}, "f30k": {"final_norm": True}}


def awake(module: nn.Module) -> nn.Module:
    """Batch normalisations with random weights: fresh ones make every relation layer idle."""
    torch.manual_seed(1)
    for part in module.modules():
        if isinstance(part, FragmentBatchNorm):
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.normal_(part.bias)
    return module


def image_encoder(**options) -> nn.Module:
    torch.manual_seed(0)
    return awake(image_encoders["vsrn"](10, 12, layers=2, **options))


def renamed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state = {}
    for key, value in weights.items():
        key = key.replace("img_rnn", "rnn").replace("W.0", "out").replace("W.1", "norm")
        for layer in range(4):
            key = key.replace(f"Rs_GCN_{layer + 1}", f"relations.layers.{layer}")
        key = "norm" + key[2:] if key.startswith("bn.") else key
        state[key] = value.squeeze(-1) if key.endswith("weight") and value.ndim == 3 else value
    return state


@pytest.mark.parametrize("data", PUBLISHED)
def test_the_reference_form_agrees_with_gradients(data) -> None:
    fixture = load_fixture(f"vsrn-image-encoder-{data}")
    encoder = image_encoders["vsrn"](40, 48, form="reference", **PUBLISHED[data])
    encoder.load_state_dict(renamed(fixture.weights()))
    images = fixture["in.images"].requires_grad_()
    encoded = encoder.eval()(full_images(images))
    assert_close(encoded.fragments, fixture["out.gcn_regions"])
    assert_close(encoded.pooled, fixture["out.img_emb"])
    encoded.pooled.sum().backward()
    assert_gradient_close(images.grad, fixture["grad.images"])


def test_the_forms_differ_in_the_axis_of_unit_length() -> None:
    x, mask = ragged(1, 5, 6, 10)
    for form, axis in {"paper": -1, "reference": 1}.items():
        regions = image_encoder(form=form).eval()(ImageBatch(x, mask)).fragments
        lengths = torch.linalg.vector_norm(regions, dim=axis)
        expected = mask.float() if axis == -1 else torch.ones(5, 12)
        assert torch.allclose(lengths, expected, atol=1e-5)


def test_a_relation_layer_adds_affinities_over_real_fragments_divided_by_their_number() -> None:
    torch.manual_seed(0)
    layer = RelationLayer(6).eval()
    nn.init.constant_(layer.norm.weight, (1 + layer.norm.eps) ** 0.5)  # then the norm is idle
    x, mask = ragged(2, 4, 5, 6)
    got = layer(x, mask)
    for item in range(4):
        count = int(mask[item].sum())
        for i in range(count):
            y = torch.zeros(6)
            for j in range(count):
                y += layer.theta(x[item, i]).dot(layer.phi(x[item, j])) * layer.g(x[item, j])
            assert torch.allclose(got[item, i], x[item, i] + layer.out(y / count), atol=1e-5)


def test_a_fresh_relation_layer_changes_nothing() -> None:
    x, mask = ragged(2, 4, 5, 6)
    assert torch.equal(RelationLayer(6)(x, mask), x)


@given(
    seed=st.integers(0, 99),
    extra=st.integers(1, 4),
    training=st.booleans(),
    options=st.sampled_from([{}, *PUBLISHED.values(), {"form": "reference", "unit_regions": True}]),
)
def test_padding_never_changes_an_encoded_image(seed, extra, training, options) -> None:
    encoder = image_encoder(**options).train(training)
    x, mask = ragged(seed, 5, 6, 10)
    expected = encoder(ImageBatch(x, mask))
    wider = torch.cat([x, torch.full((5, extra, 10), 50.0)], 1)
    got = encoder(ImageBatch(wider, torch.cat([mask, torch.zeros(5, extra).bool()], 1)))
    assert torch.allclose(got.pooled, expected.pooled, atol=1e-5)
    assert torch.allclose(got.fragments[:, :6], expected.fragments, atol=1e-5)
    assert got.fragments[:, 6:].abs().max() == 0


@pytest.mark.parametrize("options", PUBLISHED.values(), ids=PUBLISHED)
@pytest.mark.parametrize("form", ["paper", "reference"])
def test_an_image_is_encoded_alike_in_any_company(options, form) -> None:
    encoder = image_encoder(form=form, **options).eval()
    x, mask = ragged(4, 5, 6, 10)
    whole = encoder(ImageBatch(x, mask))
    for item in range(5):
        real = x[item, mask[item]][None]
        alone = encoder(full_images(real))
        assert torch.allclose(alone.pooled[0], whole.pooled[item], atol=1e-5)
        assert torch.allclose(alone.fragments[0], whole.fragments[item, mask[item]], atol=1e-5)


@pytest.mark.parametrize("name", ["vsrn", "vsrn++"])
@pytest.mark.parametrize("regions", [1, 49])
def test_any_number_of_fragments_and_bfloat16_give_finite_gradients(name, regions) -> None:
    torch.manual_seed(0)
    if name == "vsrn":
        part, x = image_encoder(final_norm=True), torch.randn(4, regions, 10)
    else:
        part, x = awake(poolings["reasoning"](12, readout="gru")), torch.randn(4, regions, 12)
    mask = torch.ones(4, regions, dtype=torch.bool)
    mask[-1] = False  # an item without any fragment

    def encode() -> torch.Tensor:
        return part(ImageBatch(x, mask)).pooled if name == "vsrn" else part(x, mask)

    expected = encode()
    with torch.autocast("cpu", torch.bfloat16):
        got = encode()
    assert torch.allclose(got.float(), expected, atol=0.1)
    (got.float() * torch.randn(4, 12)).sum().backward()
    for key, parameter in part.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key


@pytest.mark.parametrize("readout", ["mean", "gru"])
def test_reasoned_words_ignore_padding_and_company(readout) -> None:
    torch.manual_seed(0)
    pooling = {"name": "reasoning", "readout": readout, "layers": 2}
    encoder = awake(text_encoders["bigru"](vocabulary(30), 12, word_dim=6, pooling=pooling)).eval()
    mask = ragged(2, 5, 7, 1)[1]
    ids = torch.randint(5, 30, (5, 7))
    whole = encoder(TextBatch(ids, mask)).pooled
    wider = torch.cat([ids, torch.randint(5, 30, (5, 3))], 1)
    padded = encoder(TextBatch(wider, torch.cat([mask, torch.zeros(5, 3).bool()], 1)))
    assert torch.allclose(padded.pooled, whole, atol=1e-5)
    for item in range(5):
        alone = encoder(TextBatch(ids[item : item + 1], mask[item : item + 1]))
        assert torch.allclose(alone.pooled[0], whole[item], atol=1e-5)


def test_only_the_gru_minds_the_order_of_reasoned_fragments() -> None:
    x, order = torch.randn(3, 5, 8), torch.tensor([4, 1, 0, 3, 2])
    mask = torch.ones(3, 5, dtype=torch.bool)
    for readout, alike in {"mean": True, "gru": False}.items():
        pool = awake(poolings["reasoning"](8, readout=readout)).eval()
        assert torch.allclose(pool(x[:, order], mask), pool(x, mask), atol=1e-5) == alike


TEXTS = {
    "vsrn": {},
    "vsrn++": {"pooling": {"name": "reasoning", "readout": "gru", "layers": 1}},
}


@pytest.mark.parametrize("name", thinned(TEXTS, "vsrn"))
@pytest.mark.slow
def test_reasoning_models_learn(name, concepts, tmp_path) -> None:
    config = build_config(
        {
            "data": {"min_count": 1},
            "model": {
                "name": name,
                "embed_size": 24,
                "image": {"layers": 1},
                "text": {"word_dim": 12, **TEXTS[name]},
            },
            "objective": "triplet",
            "train": {"epochs": 5, "batch_size": 16, "optimizer": {"lr": 5e-3}},
        }
    )
    torch.manual_seed(0)
    model = create_model(config.model, concepts.train, config.data)
    result = Trainer(model, concepts, config, tmp_path).run()
    assert result.best_rsum > 200  # chance is about 100 on these 32 images
