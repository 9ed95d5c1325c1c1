"""Matchers of whole vectors."""

from __future__ import annotations

import torch

from counterfoil.encoders import Encoded
from counterfoil.matchers import matchers
from tests.conftest import assert_close, assert_gradient_close, load_fixture


def encoded(x: torch.Tensor) -> Encoded:
    return Encoded(None, torch.ones(len(x), 1, dtype=torch.bool), x)


def test_order_scores_agree_with_the_reference_with_gradients() -> None:
    fixture = load_fixture("vsepp-order")
    images, texts = fixture["in.img_emb"].requires_grad_(), fixture["in.cap_emb"].requires_grad_()
    scores = matchers["order"](64)(encoded(images), encoded(texts))
    (name,) = [key for key in fixture.tensors if key.startswith("out.")]
    assert_close(scores, fixture[name])
    scores.sum().backward()
    assert_gradient_close(images.grad, fixture["grad.img_emb"])
    assert_gradient_close(texts.grad, fixture["grad.cap_emb"])


def test_order_scores_do_not_depend_on_how_images_are_cut_into_blocks() -> None:
    images, texts = encoded(torch.rand(150, 8)), encoded(torch.rand(9, 8))
    matcher = matchers["order"](8)
    whole = matcher(images, texts)
    one_by_one = torch.cat([matcher(images[i : i + 1], texts) for i in range(150)])
    assert torch.allclose(whole, one_by_one)


def test_order_is_zero_where_the_image_entails_the_text() -> None:
    text = torch.rand(1, 8)
    assert float(matchers["order"](8)(encoded(text + 1), encoded(text))) == 0.0
