"""CHAN agrees with the public implementation in its form, and up to a factor in the paper's."""

from __future__ import annotations

import pytest
import torch

from counterfoil.encoders import Encoded
from counterfoil.matchers import matchers
from tests.conftest import assert_close, assert_gradient_close, load_fixture
from tests.matchers.local import encoded_pair

FILES = ["chan", "chan-ragged-regions"]
CASES = [(name, option) for name in FILES for option in load_fixture(name).options]


def chan(fixture, option: str, form: str = "reference") -> torch.nn.Module:
    coding, pooling = option.split(".")
    return matchers["chan"](
        64,
        coding=coding.removesuffix("Coding").lower(),
        pooling=pooling.removesuffix("Pooling").lower(),
        beta=fixture.hyper["belta"],
        alpha=fixture.hyper["alpha"],
        form=form,
    )


@pytest.mark.parametrize(("name", "option"), CASES)
def test_scores_and_gradients_agree(name, option) -> None:
    fixture = load_fixture(name)
    images, texts = encoded_pair(fixture)
    scores = chan(fixture, option)(images, texts)
    assert_close(scores, fixture[f"out.{option}.scores"])
    if f"grad.{option}.images" in fixture.tensors:
        scores.sum().backward()
        assert_gradient_close(images.fragments.grad, fixture[f"grad.{option}.images"])
        assert_gradient_close(texts.fragments.grad, fixture[f"grad.{option}.captions"])


@pytest.mark.parametrize(("name", "option"), CASES)
def test_the_papers_form_differs_by_the_scale_of_lse_alone(name, option) -> None:
    fixture = load_fixture(name)
    images, texts = encoded_pair(fixture)
    scale = fixture.hyper["belta"] if "LSE" in option else 1.0
    scores = chan(fixture, option, form="paper")(images, texts)
    assert_close(scores, fixture[f"out.{option}.scores"] * scale)


def test_a_real_similarity_of_minus_one_is_not_padding() -> None:
    side = torch.eye(4)[:1][None]
    one = torch.ones(1, 1, dtype=torch.bool)
    score = matchers["chan"](4, pooling="mean")(Encoded(side, one), Encoded(-side, one))
    assert score.item() == -1.0


@pytest.mark.parametrize("pooling", ["mean", "sum"])
def test_the_words_add_up_to_the_score(pooling) -> None:
    fixture = load_fixture("chan-ragged-regions")
    images, texts = encoded_pair(fixture)
    matcher = matchers["chan"](64, pooling=pooling)
    for image, text in ((0, 0), (5, 8)):
        result = matcher.word_parts(images[image : image + 1], texts[text : text + 1])
        score = matcher(images, texts)[image, text]
        assert torch.allclose((result.positive + result.negative).sum(), score)
        assert torch.equal(result.weights.sum(-1) > 0, texts.mask[text])
        assert not result.weights[:, ~images.mask[image]].any()


@pytest.mark.parametrize("options", [{"pooling": "lse"}, {"coding": "tha", "pooling": "mean"}])
def test_a_method_that_is_not_a_sum_over_words_has_no_word_parts(options) -> None:
    images, texts = encoded_pair(load_fixture("chan"))
    assert matchers["chan"](64, **options).word_parts(images[:1], texts[:1]) is None
