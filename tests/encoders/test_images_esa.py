"""ESA: attention per channel, as the public code computes it and as a plain loop does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.core.config import build_config
from counterfoil.data.batches.collate import ImageBatch, TextBatch
from counterfoil.encoders import image_encoders, poolings, text_encoders
from counterfoil.models import create_model
from counterfoil.training.trainer import Trainer
from tests.conftest import assert_close, assert_gradient_close, load_fixture
from tests.encoders.test_encoders import ragged
from tests.encoders.test_parity import full_images, load, mask_of, vocabulary


def renamed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key.replace("linear1", "joint.pool.score"): value for key, value in weights.items()}


def reference_image_encoder(**options):
    fixture = load_fixture("esa-image-encoder")
    encoder = image_encoders["mlp"](40, 64, residual="raw", pooling="channel-attention", **options)
    return fixture, load(encoder, renamed(fixture.weights()))


def test_the_image_encoder_agrees_in_evaluation_mode_with_gradients() -> None:
    fixture, encoder = reference_image_encoder()
    images = fixture["in.images"].requires_grad_()
    encoded = encoder(full_images(images))
    assert_close(encoded.pooled, fixture["out.img_emb"])
    encoded.pooled.sum().backward()
    assert_gradient_close(images.grad, fixture["grad.images"])


def test_views_by_region_masks_agree_in_training_mode() -> None:
    """The public code normalises before it masks, hence the form that counts every row."""
    fixture, encoder = reference_image_encoder(form="reference")
    images = fixture["in.images"].repeat_interleave(2, 0)
    masks = torch.stack([fixture["in.keep_mask1"], fixture["in.keep_mask2"]], 1).flatten(0, 1)
    encoded = encoder.train()(ImageBatch(images, masks.bool()))
    assert_close(encoded.pooled, fixture["out.train_views.img_emb"])


def test_the_text_encoder_agrees() -> None:
    fixture = load_fixture("esa-text-encoder")
    encoder = load(
        text_encoders["bigru"](
            vocabulary(50), 64, word_dim=24, dropout=0.1, pooling="channel-attention"
        ),
        renamed(fixture.weights()),
    )
    ids = fixture["in.token_ids"]
    encoded = encoder(TextBatch(ids, mask_of(fixture["in.cap_lens"], ids.shape[1])))
    assert_close(encoded.pooled, fixture["out.cap_emb"])


@given(seed=st.integers(0, 99), longest=st.sampled_from([1, 2, 5, 49]))
def test_each_channel_is_a_softmax_mean_over_real_fragments_in_any_order(seed, longest) -> None:
    torch.manual_seed(seed)
    pool = poolings["channel-attention"](6)
    x, mask = ragged(seed, 4, longest, 6)
    pooled = pool(x, mask)
    for item in range(4):
        real = x[item, mask[item]]
        scores = real @ pool.score.weight.T + pool.score.bias
        for channel in range(6):
            weights = (scores[:, channel] - scores[:, channel].max()).exp()
            expected = (weights / weights.sum() * real[:, channel]).sum()
            assert torch.allclose(pooled[item, channel], expected, atol=1e-5)
    order = torch.randperm(longest)
    assert torch.allclose(pool(x[:, order], mask[:, order]), pooled, atol=1e-5)


def test_dropout_disturbs_training_only() -> None:
    torch.manual_seed(0)
    pool = poolings["channel-attention"](8, dropout=0.5)
    x, mask = ragged(3, 5, 6, 8)
    assert not torch.equal(pool(x, mask), pool(x, mask))
    pool.eval()
    assert torch.equal(pool(x, mask), pool(x, mask))


@pytest.mark.parametrize("regions", [1, 49])
def test_any_number_of_fragments_and_bfloat16_give_finite_gradients(regions) -> None:
    torch.manual_seed(0)
    encoder = image_encoders["mlp"](10, 12, residual="raw", pooling="channel-attention")
    images = full_images(torch.randn(4, regions, 10))
    expected = encoder(images).pooled
    with torch.autocast("cpu", torch.bfloat16):
        pooled = encoder(images).pooled
    assert torch.allclose(pooled.float(), expected, atol=0.05)
    (pooled.float() * torch.randn(4, 12)).sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_esa_learns_from_two_views_of_each_pair(concepts, tmp_path) -> None:
    config = build_config(
        {
            "data": {"min_count": 1, "views": 2, "drop_regions": 0.2, "word_noise": 0.2},
            "model": {"name": "esa", "embed_size": 24, "text": {"word_dim": 12}},
            "objective": {"sel": {"hardest": False}},
            "train": {"epochs": 2, "batch_size": 24, "optimizer": {"lr": 1e-2}},
        }
    )
    torch.manual_seed(0)
    model = create_model(config.model, concepts.train, config.data)
    result = Trainer(model, concepts, config, tmp_path).run()
    assert result.best_rsum > 200  # chance is about 100 on these 32 images
