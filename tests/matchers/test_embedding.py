"""Matchers of whole vectors."""

from __future__ import annotations

import pytest
import torch

from counterfoil.encoders import Encoded, l2_normalize
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cosines_of_vectors_that_are_nearly_alike_are_told_apart_in_mixed_precision(dtype) -> None:
    torch.manual_seed(0)
    alike = torch.randn(256)
    images, texts = (l2_normalize(alike + 0.02 * torch.randn(40, 256)) for _ in range(2))
    exact = images.double() @ texts.double().T
    with torch.autocast("cpu", dtype):
        scores = matchers["cosine"](256)(encoded(images), encoded(texts))
        rounded = images @ texts.T
    assert scores.dtype == torch.float32
    assert float((scores - exact).abs().max()) < 1e-6
    assert (scores.argmax(1) == exact.argmax(1)).all()
    assert (rounded.argmax(1) != exact.argmax(1)).any()  # else this shows nothing
