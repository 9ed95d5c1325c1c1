"""BFAN agrees with the public implementation, and stays defined where that is not."""

from __future__ import annotations

import pytest
import torch

from counterfoil.encoders import Encoded
from counterfoil.matchers import matchers
from counterfoil.matchers.bfan import focus
from tests.conftest import assert_close, assert_gradient_close, load_fixture
from tests.matchers.local import encoded_pair

CASES = [(name, opt) for name in ("bfan", "bfan-regions") for opt in load_fixture(name).options]


def bfan(setting: dict, **options) -> torch.nn.Module:
    return matchers["bfan"](
        64, focal=setting["focal_type"], lambda_softmax=setting["lambda_softmax"], **options
    )


@pytest.mark.parametrize(("name", "option"), CASES)
def test_scores_and_gradients_agree(name, option) -> None:
    fixture = load_fixture(name)
    images, texts = encoded_pair(fixture)
    scores = bfan(fixture.options[option])(images, texts)
    assert_close(scores, fixture[f"out.{option}.scores"])
    if f"grad.{option}.images" in fixture.tensors:
        scores.sum().backward()
        assert_gradient_close(images.fragments.grad, fixture[f"grad.{option}.images"])
        assert_gradient_close(texts.fragments.grad, fixture[f"grad.{option}.captions"])


def test_the_score_is_the_sum_of_the_two_directions() -> None:
    fixture = load_fixture("bfan")
    images, texts = encoded_pair(fixture)
    setting = fixture.options["prob.l20"]
    parts = [bfan(setting, direction=side)(images, texts) for side in ("t2i", "i2t")]
    assert_close(parts[0] + parts[1], fixture["out.prob.l20.scores"])
    assert (parts[0] - parts[1]).abs().max() > 0.01


@pytest.mark.parametrize(
    ("focal", "kept"), [("equal", [0.5, 0.3, 0.0, 0.0]), ("prob", [0.5, 0.0, 0.0, 0.0])]
)
def test_only_fragments_above_the_others_keep_their_attention(focal, kept) -> None:
    # the average is 0.25; the average by confidence Σ w^1.5 / Σ √w is 0.31
    weights = torch.tensor([0.5, 0.3, 0.18, 0.02])
    assert focus(weights, torch.ones(4, dtype=torch.bool), focal).tolist() == pytest.approx(kept)


@pytest.mark.parametrize("focal", ["equal", "prob"])
def test_uniform_attention_keeps_every_fragment(focal) -> None:
    mask = torch.tensor([True, True, False])
    weights = torch.tensor([0.5, 0.5, 0.0])
    assert torch.equal(focus(weights, mask, focal), weights)


def test_the_words_add_up_to_the_text_to_image_score() -> None:
    fixture = load_fixture("bfan")
    images, texts = encoded_pair(fixture)
    matcher = bfan(fixture.options["equal.l20"], direction="t2i")
    parts = matcher.word_parts(images[2:3], texts[4:5])
    assert torch.allclose((parts.positive + parts.negative).sum(), matcher(images, texts)[2, 4])
    assert torch.allclose(parts.weights.sum(-1), texts.mask[4].float())
    assert bfan(fixture.options["equal.l20"]).word_parts(images[:1], texts[:1]) is None


def test_a_word_faced_with_one_region_takes_it() -> None:
    word = torch.nn.functional.normalize(torch.randn(1, 1, 8), dim=-1)
    one = torch.ones(1, 1, dtype=torch.bool)
    assert matchers["bfan"](8)(Encoded(word, one), Encoded(word, one)).item() == pytest.approx(2.0)


@pytest.mark.parametrize("focal", ["equal", "prob"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_caption_of_one_word_attends_alike_to_all_regions_it_agrees_with(focal, dtype) -> None:
    """However little it agrees: what is normalised over one word is 1."""
    word = torch.zeros(1, 1, 8, dtype=dtype)
    word[..., 0] = 1.0
    regions = torch.eye(8, dtype=dtype)[[1, 2, 3, 4, 5]]
    regions[:, 0] = torch.tensor([0.9, 0.02, 0.005, 1e-4, -0.5], dtype=dtype)
    regions = torch.nn.functional.normalize(regions, dim=-1)[None]
    masks = torch.ones(1, 5, dtype=torch.bool), torch.ones(1, 1, dtype=torch.bool)
    matcher = matchers["bfan"](8, focal=focal, direction="t2i")
    weights = matcher.word_parts(Encoded(regions, masks[0]), Encoded(word, masks[1])).weights
    assert weights[0].tolist() == pytest.approx([0.25, 0.25, 0.25, 0.25, 0.0], abs=1e-5)
