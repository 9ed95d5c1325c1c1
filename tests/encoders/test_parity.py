"""Encoders agree with the public implementations, weights loaded from them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from counterfoil.data.batches.collate import ImageBatch, TextBatch
from counterfoil.data.text.tokenizers import WordText
from counterfoil.data.text.vocabulary import SPECIALS, Vocabulary
from counterfoil.encoders import GPO, image_encoders, text_encoders
from tests.conftest import assert_close, assert_gradient_close, load_fixture

RENAMED = {
    "mlp.layers.0": "mlp.narrow",
    "mlp.layers.1": "mlp.widen",
    "mlp.bns.0": "mlp.norm",
    "gpool": "joint.pool",
}


def load(module: nn.Module, weights: dict[str, torch.Tensor]) -> nn.Module:
    renamed = {}
    for key, value in weights.items():
        for old, new in RENAMED.items():
            key = key.replace(old, new, 1) if key.startswith(old) else key
        if not key.startswith("mlp.bns.1"):  # in the reference state dict, never used there
            renamed[key] = value
    module.load_state_dict(renamed)
    return module.eval()


def vocabulary(size: int) -> WordText:
    return WordText(Vocabulary([*SPECIALS, *(f"w{i}" for i in range(size - len(SPECIALS)))]))


def full_images(x: torch.Tensor) -> ImageBatch:
    return ImageBatch(x, torch.ones(x.shape[:2], dtype=torch.bool))


def mask_of(lengths: torch.Tensor, longest: int) -> torch.Tensor:
    return torch.arange(longest)[None] < lengths[:, None]


def test_gpo_pools_as_the_reference_does_with_gradients() -> None:
    fixture = load_fixture("gpo")
    features = fixture["in.features"].requires_grad_()
    mask = mask_of(fixture["in.lengths"], features.shape[1])
    hyper = fixture.hyper
    gpo = GPO(features.shape[-1], d_pe=hyper["d_pe"], d_hidden=hyper["d_hidden"])
    gpo.load_state_dict(fixture.weights())
    pooled = gpo(features, mask)
    assert_close(pooled, fixture["out.pooled"])
    assert_close(gpo.weights(mask.sum(1).numpy(), mask.shape[1]), fixture["out.pool_weights"])
    pooled.sum().backward()
    assert_gradient_close(features.grad, fixture["grad.features"])


def test_the_vse_infty_image_encoder_agrees_in_evaluation_mode() -> None:
    fixture = load_fixture("vse_infty-image-encoder")
    encoder = load(vse_infty_images(fixture), fixture.weights())
    images = fixture["in.images"].requires_grad_()
    encoded = encoder(ImageBatch(images, mask_of(fixture["in.img_lens"], images.shape[1])))
    assert_close(encoded.pooled, fixture["out.img_emb"])
    encoded.pooled.sum().backward()
    assert_gradient_close(images.grad, fixture["grad.images"])


def test_the_vse_infty_image_encoder_in_reference_form_agrees_in_training_mode() -> None:
    fixture = load_fixture("vse_infty-image-encoder")
    encoder = load(vse_infty_images(fixture, form="reference"), fixture.weights()).train()
    images = fixture["in.images"]
    encoded = encoder(ImageBatch(images, mask_of(fixture["in.img_lens"], images.shape[1])))
    outputs = [k for k in fixture.tensors if k.startswith("out.train_mode")]
    assert_close(encoded.pooled, fixture["out.train_mode.img_emb"])
    for key in outputs:
        if "running" in key:
            name = "running_mean" if "mean" in key else "running_var"
            assert_close(getattr(encoder.mlp.norm, name), fixture[key])


def own_gpo(fixture) -> dict[str, object]:
    return {"name": "gpo", **{key: fixture.hyper[key] for key in ("d_pe", "d_hidden")}}


def vse_infty_images(fixture, **options) -> nn.Module:
    hyper, hidden = fixture.hyper, fixture["w.mlp.layers.0.weight"].shape[0]
    return image_encoders["mlp"](
        hyper["img_dim"],
        hyper["embed_size"],
        residual="raw",
        pooling=own_gpo(fixture),
        hidden=hidden,
        normalize=not hyper["no_imgnorm"],
        **options,
    )


@pytest.mark.parametrize("option", ["plain", "abs", "nonorm"])
def test_the_vsepp_image_encoder_agrees(option: str) -> None:
    fixture = load_fixture("vsepp-image-encoder")
    hyper, option_set = fixture.hyper, fixture.options[option]
    encoder = load(
        image_encoders["fc"](
            hyper["img_dim"],
            hyper["embed_size"],
            pooling="mean",
            absolute=option_set["use_abs"],
            normalize=not option_set["no_imgnorm"],
        ),
        fixture.weights(),
    )
    images = fixture["in.images"].clone().requires_grad_()
    encoded = encoder(full_images(images[:, None]))
    assert_close(encoded.pooled, fixture[f"out.{option}.img_emb"])


@pytest.mark.parametrize("option", ["plain", "abs"])
def test_the_vsepp_text_encoder_agrees(option: str) -> None:
    fixture = load_fixture("vsepp-text-encoder")
    hyper = fixture.hyper
    encoder = load(
        text_encoders["gru"](
            vocabulary(hyper["vocab_size"]),
            hyper["embed_size"],
            word_dim=hyper["word_dim"],
            layers=hyper["num_layers"],
            absolute=fixture.options[option]["use_abs"],
        ),
        fixture.weights(),
    )
    ids = fixture["in.token_ids"]
    encoded = encoder(TextBatch(ids, mask_of(fixture["in.cap_lens"], ids.shape[1])))
    assert_close(encoded.pooled, fixture[f"out.{option}.cap_emb"])


def test_the_vse_infty_text_encoder_agrees() -> None:
    fixture = load_fixture("vse_infty-text-encoder-bigru")
    hyper = fixture.hyper
    encoder = load(
        text_encoders["bigru"](
            vocabulary(hyper["vocab_size"]),
            hyper["embed_size"],
            word_dim=hyper["word_dim"],
            layers=hyper["num_layers"],
            pooling=own_gpo(fixture),
        ),
        fixture.weights(),
    )
    ids = fixture["in.token_ids"]
    encoded = encoder(TextBatch(ids, mask_of(fixture["in.cap_lens"], ids.shape[1])))
    assert_close(encoded.pooled, fixture["out.cap_emb"])


def test_the_scan_image_encoder_agrees_with_gradients() -> None:
    fixture = load_fixture("scan-image-encoder")
    encoder = load(image_encoders["fc"](40, 64, pooling="none"), fixture.weights())
    images = fixture["in.images"].requires_grad_()
    encoded = encoder(full_images(images))
    assert_close(encoded.fragments, fixture["out.img_emb"])
    encoded.fragments.sum().backward()
    assert_gradient_close(images.grad, fixture["grad.images"])


@pytest.mark.parametrize("direction", ["gru", "bigru"])
def test_the_scan_text_encoders_agree(direction: str) -> None:
    fixture = load_fixture(f"scan-text-encoder-{direction}")
    encoder = load(
        text_encoders[direction](vocabulary(50), 64, word_dim=24, pooling="none"),
        fixture.weights(),
    )
    ids = fixture["in.token_ids"]
    encoded = encoder(TextBatch(ids, mask_of(fixture["in.cap_lens"], ids.shape[1])))
    assert_close(encoded.fragments, fixture["out.cap_emb"])


def test_scan_weight_norm_agrees() -> None:
    fixture = load_fixture("scan-image-encoder-wn")
    weights = fixture.weights()
    encoder = image_encoders["fc"](
        fixture["in.images"].shape[-1], 64, pooling="none", weight_norm=True
    )
    state = {"fc.bias": weights["fc.bias"]}
    state["fc.parametrizations.weight.original0"] = weights["fc.weight_g"]
    state["fc.parametrizations.weight.original1"] = weights["fc.weight_v"]
    encoder.load_state_dict(state)
    assert_close(
        encoder.eval()(full_images(fixture["in.images"])).fragments, fixture["out.img_emb"]
    )
