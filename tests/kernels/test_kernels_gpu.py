"""The compiled kernels on a GPU against the eager matchers in double precision on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from counterfoil.encoders.encoded import Encoded

pytest.importorskip("triton", reason="Triton is not installed")

from counterfoil.kernels import dispatch
from counterfoil.kernels.triton import launch
from tests.kernels.test_dispatch import MATCHERS, TRAINED, made, sides, single

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = (3, 12, 1, 7, 25, 9, 9, 14, 2, 31, 18, 5)
SCORES, GRADIENTS = 4e-3, 2e-2
"""Largest differences: fragments are compared in half precision, or TF32's in training."""


def _pair() -> tuple[Encoded, Encoded]:
    return sides(3, images=7, regions=36, lengths=LENGTHS)


def _there(encoded: Encoded) -> Encoded:
    one = single(encoded)
    assert one.fragments is not None
    assert one.mask is not None
    return Encoded(one.fragments.cuda(), one.mask.cuda())


def _refused(self, images, texts):
    raise AssertionError("scored by PyTorch, where the kernels should have done it")


@pytest.mark.parametrize("way", ["tiles", "tiles in parts", "lanes"])
@pytest.mark.parametrize("name", MATCHERS)
def test_scores_are_those_of_the_eager_form(name, way, monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "THREAD_PER_CAPTION_CELLS", 0 if way == "lanes" else 1 << 60)
    if way == "tiles in parts":
        monkeypatch.setattr(launch, "BUFFER", 4 * 36 * sum(LENGTHS) * 3)
    images, texts = _pair()
    matcher = made(name).eval()
    with torch.no_grad():
        expected = matcher.double().torch_scores(images, texts)
        monkeypatch.setattr(type(matcher), "torch_scores", _refused)
        result = matcher.float().cuda()(_there(images), _there(texts))
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(result.double().cpu(), expected, atol=SCORES * scale, rtol=0)


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_are_those_of_the_eager_form(name, monkeypatch) -> None:
    images, texts = _pair()
    weight = torch.randn(7, len(LENGTHS), generator=torch.Generator().manual_seed(1))
    matcher = made(name).train()

    def gradients(pair: tuple[Encoded, Encoded], eager: bool) -> list[Tensor]:
        v, u = (one.fragments.detach().requires_grad_() for one in pair)
        sides = Encoded(v, pair[0].mask), Encoded(u, pair[1].mask)
        scores = matcher.torch_scores(*sides) if eager else matcher(*sides)
        (scores * weight.to(scores)).sum().backward()
        return [v.grad * pair[0].mask[..., None], u.grad * pair[1].mask[..., None]]

    matcher.double()
    expected = gradients((images, texts), eager=True)
    monkeypatch.setattr(type(matcher), "torch_scores", _refused)
    matcher.float().cuda()
    result = gradients((_there(images), _there(texts)), eager=False)
    for mine, theirs in zip(result, expected, strict=True):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(mine.double().cpu(), theirs, atol=GRADIENTS * scale, rtol=0)


@pytest.mark.parametrize("way", ["tiles", "lanes"])
@pytest.mark.parametrize("sharpness", [20.0, 40.0])
@pytest.mark.parametrize(("regions", "lengths"), [(36, (1,) * 40), (1, (9,) * 40)])
@pytest.mark.parametrize("name", ["bfan-equal", "bfan-prob"])
def test_rounding_does_not_choose_among_fragments_that_are_tied(
    name, regions, lengths, sharpness, way, monkeypatch
) -> None:
    """One word attends alike to all regions that it agrees with, however little; so does one region
    to the words of a caption."""
    monkeypatch.setattr(dispatch, "THREAD_PER_CAPTION_CELLS", 0 if way == "lanes" else 1 << 60)
    matcher = made(name).eval()
    matcher.lambda_softmax = sharpness
    pairs = [sides(seed, images=7, regions=regions, lengths=lengths) for seed in range(4)]
    with torch.no_grad():
        expected = [matcher.double().torch_scores(*pair) for pair in pairs]
        monkeypatch.setattr(type(matcher), "torch_scores", _refused)
        result = [matcher.float().cuda()(*map(_there, pair)) for pair in pairs]
    for mine, exact in zip(result, expected, strict=True):
        torch.testing.assert_close(mine.double().cpu(), exact, atol=SCORES, rtol=0)
