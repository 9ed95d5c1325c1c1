"""IMRAM agrees with the public implementation, step by step."""

from __future__ import annotations

import pytest
import torch

from counterfoil.core.errors import ConfigError
from counterfoil.encoders import Encoded
from counterfoil.kernels import tiled
from counterfoil.matchers import matchers
from tests.conftest import assert_close, assert_gradient_close, load_fixture
from tests.matchers.local import encoded_pair

SIDES = {"text": "t2i", "image": "i2t"}
MODES = ("text", "full")


def imram(fixture, option: str) -> torch.nn.Module:
    setting = fixture.options[option]
    mode = setting["model_mode"].removesuffix("_IMRAM")
    matcher = matchers["imram"](
        64,
        steps=setting["iteration_step"],
        mode=mode,
        lambda_softmax=setting["lambda_softmax"],
        normalize=not setting["no_IMRAM_norm"],
    )
    weights = {}
    for side in SIDES if mode == "full" else [mode]:
        for kind in ("weight", "bias"):
            weights[f"{side}.memory.gate.{kind}"] = fixture[f"w.gate_{SIDES[side]}.{kind}"]
            weights[f"{side}.memory.update.{kind}"] = fixture[f"w.linear_{SIDES[side]}.{kind}"]
    matcher.load_state_dict(weights)
    return matcher


@pytest.mark.parametrize("option", load_fixture("imram").options)
def test_scores_agree(option) -> None:
    fixture = load_fixture("imram")
    images, texts = encoded_pair(fixture)
    assert_close(imram(fixture, option)(images, texts), fixture[f"out.{option}.scores"])


def test_gradients_agree() -> None:
    option = "full_IMRAM.nonorm"
    # in float64: one similarity of the last step is 1e-9 from the kink of the LeakyReLU
    fixture = load_fixture("imram")
    pair = encoded_pair(fixture)
    images, texts = (
        Encoded(side.fragments.detach().double().requires_grad_(), side.mask) for side in pair
    )
    scores = imram(fixture, option).double()(images, texts)
    scores.sum().backward()
    assert_gradient_close(images.fragments.grad, fixture[f"grad.{option}.images"])
    assert_gradient_close(texts.fragments.grad, fixture[f"grad.{option}.captions"])


def test_every_step_agrees() -> None:
    fixture = load_fixture("imram")
    images, texts = encoded_pair(fixture)
    matcher = imram(fixture, "full_IMRAM.nonorm")
    for step, score in enumerate(matcher.text(texts, images)):
        assert_close(score, fixture[f"out.full_IMRAM.nonorm.text_step{step}"])
    for step, score in enumerate(matcher.image(images, texts)):
        assert_close(score.T, fixture[f"out.full_IMRAM.nonorm.image_step{step}"])


def test_parameters_get_the_same_gradient_from_tiles_that_are_recomputed(monkeypatch) -> None:
    fixture = load_fixture("imram")
    images, texts = (side[:3] for side in encoded_pair(fixture))
    gradients = []
    for cells in (tiled.CPU_CELLS, 1 << 14):
        monkeypatch.setattr(tiled, "CPU_CELLS", cells)
        matcher = imram(fixture, "full_IMRAM.norm")
        matcher(images, texts).square().sum().backward()
        gradients.append([parameter.grad for parameter in matcher.parameters()])
    for whole, cut in zip(*gradients, strict=True):
        assert whole.abs().max() > 0
        assert_gradient_close(cut, whole, 1e-5)


def test_one_step_is_scan_with_means_and_has_nothing_to_learn() -> None:
    images, texts = encoded_pair(load_fixture("imram"))
    single = matchers["imram"](64, steps=1)
    assert list(single.parameters()) == []
    options = {"aggregation": "mean", "lambda_softmax": 9.0}
    both = [matchers[f"scan-{side}"](64, **options)(images, texts) for side in ("t2i", "i2t")]
    assert torch.allclose(single(images, texts), both[0] + both[1], atol=1e-5)


def test_fewer_steps_than_one_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.matcher\.steps"):
        matchers["imram"](64, steps=0)


def test_tiles_are_planned_for_the_queries_that_every_pair_has() -> None:
    assert matchers["imram"](64, steps=1).cells_per_pair(12, 36) == 12 * 36
    text, full = (matchers["imram"](64, mode=mode).cells_per_pair(12, 36) for mode in MODES)
    per_query = (3 + 5) * 64 // 8  # numbers of the first and of the second update
    assert text == 12 * 36 + 12 * per_query
    assert full == text + 36 * per_query
    with torch.autocast("cpu", torch.bfloat16):
        half = matchers["imram"](64).cells_per_pair(12, 36)
    assert half - 12 * 36 == (full - 12 * 36) / 2
