"""CLIP and SigLIP as encoders: parity with `transformers`, tokens, freezing, rates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from counterfoil.core.config import OptimizerConfig
from counterfoil.core.errors import CheckpointError, ConfigError, DataError
from counterfoil.data.batches.collate import pad_fragments, pad_texts
from counterfoil.data.text.tokenizers import HuggingFaceText
from counterfoil.encoders.dual import DualImageEncoder, DualTextEncoder
from counterfoil.features import Pixels
from counterfoil.training.optim import create_optimizer
from tests.conftest import assert_close, assert_gradient_close
from tests.features.tiny_networks import picture
from tests.models.duals import MEAN, PATCH, SIDE, STD, save_dual, width_of

KINDS = ("clip", "siglip")
CAPTIONS = ["a dog and a cat", "the horse", "a doggy near the boat and a lamp ."]
INPUT = 3 * PATCH**2


@pytest.fixture(scope="module")
def duals(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("duals")
    return {kind: save_dual(root / kind, kind) for kind in KINDS}


def images(folder, seeds=(1, 2, 3)):
    tool = Pixels(model=str(folder))
    return pad_fragments([tool.extract(picture(seed, 40, 24)) for seed in seeds]).to("cpu")


def texts(text, captions=CAPTIONS):
    return pad_texts([text.encode(caption) for caption in captions], text.pad)


def see(kind, duals, **options):
    return DualImageEncoder(INPUT, width_of(kind), pretrained=str(duals[kind]), **options).eval()


def read(kind, duals, **options):
    text = HuggingFaceText.from_pretrained(str(duals[kind]))
    made = DualTextEncoder(text, width_of(kind), pretrained=str(duals[kind]), **options).eval()
    return made, text


def published(folder):
    from transformers import AutoModel

    return AutoModel.from_pretrained(folder).eval()


def shown(kind: str, seed: int) -> torch.Tensor:
    """The picture as that model's processor would prepare it, step by step."""
    image = picture(seed, 40, 24)
    if kind == "clip":  # the shorter side to the size asked for, then the middle
        box = ((40 - 24) / 2, 0, (40 + 24) / 2, 24)
        image = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box=box)
    else:
        image = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    values = (np.asarray(image, dtype=np.float64) / 255 - np.array(MEAN)) / np.array(STD)
    return torch.tensor(values.transpose(2, 0, 1), dtype=torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_the_pooled_image_is_that_of_the_published_model(kind, duals) -> None:
    pixels = torch.stack([shown(kind, seed) for seed in (1, 2, 3)])
    expected = published(duals[kind]).get_image_features(pixel_values=pixels).pooler_output
    result = see(kind, duals)(images(duals[kind]))
    assert_close(result.pooled, F.normalize(expected.detach(), dim=-1))


@pytest.mark.parametrize("kind", KINDS)
def test_the_pooled_text_is_that_of_the_published_model(kind, duals) -> None:
    encoder, text = read(kind, duals)
    model = published(duals[kind])
    coded = text.tokenizer(
        CAPTIONS, padding="max_length", max_length=16, truncation=True, return_tensors="pt"
    )
    mask = {"attention_mask": coded["attention_mask"]} if kind == "clip" else {}
    expected = model.get_text_features(input_ids=coded["input_ids"], **mask).pooler_output
    assert_close(encoder(texts(text)).pooled, F.normalize(expected.detach(), dim=-1))


def test_patches_are_projected_as_the_class_token_is(duals) -> None:
    model = published(duals["clip"])
    pixels = torch.stack([shown("clip", seed) for seed in (1, 2, 3)])
    states = model.vision_model(pixel_values=pixels).last_hidden_state[:, 1:]
    expected = model.visual_projection(model.vision_model.post_layernorm(states))
    result = see("clip", duals)(images(duals["clip"]))
    assert_close(result.fragments, F.normalize(expected.detach(), dim=-1))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_company_change_nothing(kind, duals) -> None:
    encoder, text = read(kind, duals)
    together = encoder(texts(text))
    for row, caption in enumerate(CAPTIONS):
        alone = encoder(texts(text, [caption]))
        count = alone.mask.shape[1]
        assert_close(together.pooled[row], alone.pooled[0].detach())
        assert_close(together.fragments[row, :count], alone.fragments[0].detach())
        assert not together.fragments[row, count:].any()


def test_captions_longer_than_the_positions_are_cut(duals) -> None:
    encoder, text = read("clip", duals)
    long = texts(text, ["a dog and " * 20])
    assert long.ids.shape[1] == 16
    assert encoder(long).pooled.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_other_poolings_and_projections_can_be_had(kind, duals) -> None:
    folder = str(duals[kind])
    encoder = DualImageEncoder(INPUT, 7, pretrained=folder, projection="new", pooling="mean").eval()
    result = encoder(images(duals[kind]))
    assert result.fragments.shape == (3, 4, 7)
    states, _ = encoder.tower(encoder.pixels(images(duals[kind]).fragments))
    assert_close(result.pooled, F.normalize(encoder.joint.fc(states).mean(1), dim=-1).detach())
    assert see(kind, duals, pooling="none")(images(duals[kind])).pooled is None


def test_larger_pictures_stretch_the_positions(duals) -> None:
    tool = Pixels(model=str(duals["clip"]), size=24)
    encoder = see("clip", duals, size=24)
    result = encoder(pad_fragments([tool.extract(picture(1))]).to("cpu"))
    assert result.fragments.shape[1] == 9
    with pytest.raises(DataError, match="3 by 3 patches, got 4"):
        encoder(images(duals["clip"]))


def test_a_size_that_patches_do_not_fill_is_seen_as_the_model_sees_it(tmp_path) -> None:
    folder = save_dual(tmp_path, "siglip", side=19)
    batch = pad_fragments([Pixels(model=str(folder)).extract(picture(1))]).to("cpu")
    result = DualImageEncoder(INPUT, 16, pretrained=str(folder)).eval()(batch)
    image = np.asarray(picture(1).resize((19, 19), Image.Resampling.BICUBIC), dtype=np.float64)
    values = ((image / 255 - np.array(MEAN)) / np.array(STD)).transpose(2, 0, 1)[None]
    pixels = torch.tensor(values, dtype=torch.float32)
    expected = published(folder).get_image_features(pixel_values=pixels).pooler_output
    assert_close(result.pooled, F.normalize(expected.detach(), dim=-1))


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_gives_the_same_gradients(kind, duals) -> None:
    grads = []
    for checkpointing in (False, True):
        encoder = see(kind, duals, checkpointing=checkpointing).train()
        encoder(images(duals[kind])).pooled[:, 0].sum().backward()
        weight = encoder.tower.model.encoder.layers[0].mlp.fc1.weight
        grads.append(weight.grad)
    assert_gradient_close(grads[1], grads[0])


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_layers_do_not_learn_and_those_above_do(kind, duals) -> None:
    encoder = see(kind, duals, freeze=1)
    learns = {name: p.requires_grad for name, p in encoder.tower.named_parameters()}
    assert not any(on for name, on in learns.items() if ".embeddings." in name)
    assert not any(on for name, on in learns.items() if ".layers.0." in name)
    assert all(on for name, on in learns.items() if ".layers.1." in name)
    assert all(on for name, on in learns.items() if "post_layernorm" in name)
    assert not any(p.requires_grad for p in see(kind, duals, freeze=-1).parameters())
    assert all(p.requires_grad for p in see(kind, duals).parameters())
    with pytest.raises(ConfigError, match="freeze within -1…2"):
        see(kind, duals, freeze=3)


@pytest.mark.parametrize("kind", KINDS)
def test_lower_layers_learn_more_slowly(kind, duals) -> None:
    encoder, _ = read(kind, duals, layer_decay=0.5)
    config = OptimizerConfig(lr=1.0, pretrained_lr_factor=0.1)
    optimizer = create_optimizer(encoder, config)
    rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert len(rate) == sum(1 for _ in encoder.parameters())
    model = encoder.tower.model
    assert rate[id(model.final_layer_norm.weight)] == pytest.approx(0.1)
    assert rate[id(model.encoder.layers[1].mlp.fc1.weight)] == pytest.approx(0.1)
    assert rate[id(model.encoder.layers[0].mlp.fc1.weight)] == pytest.approx(0.05)
    assert rate[id(model.embeddings.token_embedding.weight)] == pytest.approx(0.025)


def test_a_new_projection_learns_at_the_full_rate(duals) -> None:
    encoder = DualImageEncoder(INPUT, 7, pretrained=str(duals["clip"]), projection="new")
    optimizer = create_optimizer(encoder, OptimizerConfig(lr=1.0, pretrained_lr_factor=0.1))
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, pytest.approx(0.1)]
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {
        id(p) for p in encoder.joint.parameters()
    }


def test_bf16_is_near_to_full_precision(duals) -> None:
    encoder = see("clip", duals)
    exact = encoder(images(duals["clip"])).pooled
    with torch.autocast("cpu", torch.bfloat16):
        near = encoder(images(duals["clip"])).pooled
    assert float((exact * near.float()).sum(-1).min()) > 0.99


def test_what_does_not_fit_says_what_to_do(duals) -> None:
    folder = str(duals["clip"])
    with pytest.raises(ConfigError, match=r"set model\.embed_size=12, or model\.image\.projection"):
        DualImageEncoder(INPUT, 1024, pretrained=folder)
    with pytest.raises(DataError, match="reads pixels in patches of 8 by 8"):
        DualImageEncoder(2048, 12, pretrained=folder)
    with pytest.raises(CheckpointError, match=r"path of a local folder"):
        DualImageEncoder(INPUT, 12, pretrained="/nowhere/at/all")
