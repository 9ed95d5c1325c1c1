"""SCAN and BFAN on a CPU: the compiled path gives what PyTorch gives in double precision."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.encoders import Encoded
from counterfoil.evaluation import score_engine
from counterfoil.evaluation.score_engine import score_matrix
from counterfoil.kernels import host_attention as host
from counterfoil.kernels import host_sides
from counterfoil.kernels.compiled import library
from counterfoil.kernels.host_products import PlainProducts
from counterfoil.kernels.host_sides import Kept
from counterfoil.matchers import bfan, matchers
from tests.kernels.test_host_naaf import doubled, host_scores, side

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")

OPTIONS = [
    ("scan-t2i", {}),
    ("scan-t2i", {"aggregation": "mean", "raw_norm": "l2norm"}),
    ("scan-t2i", {"aggregation": "max", "lambda_softmax": 40.0}),
    ("scan-i2t", {}),
    ("scan-i2t", {"aggregation": "sum", "raw_norm": "l2norm", "lambda_softmax": 20.0}),
    ("bfan", {"direction": "t2i"}),
    ("bfan", {"direction": "i2t"}),
    ("bfan", {}),
    ("bfan-prob", {}),
]


def compiled_scores(matcher, images: Encoded, texts: Encoded):
    pair = (images.fragments, images.mask), (texts.fragments, texts.mask)
    return host.host_attention(matcher.recipes(), *pair, kept=Kept(large=True))


def made(name: str, dim: int, **options):
    if name == "bfan-prob":
        name, options = "bfan", {"focal": "prob", **options}
    return matchers[name](dim, **options).eval()


@given(
    regions=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    words=st.lists(st.integers(1, 12), min_size=1, max_size=40),
    which=st.sampled_from(OPTIONS),
    anywhere=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_scores_are_those_of_double_precision(regions, words, which, anywhere, seed) -> None:
    name, options = which
    matcher = made(name, 8, **options)
    images, texts = side(regions, 8, seed, anywhere), side(words, 8, seed + 1, anywhere)
    found = compiled_scores(matcher, images, texts)
    exact = []
    for tie in (0.0, bfan.TIE, 1e-3):
        with patch.object(bfan, "TIE", tie):
            exact.append(matcher.eager(doubled(images), doubled(texts)))
    # where an answer is just below the average, rounding may decide whether BFAN attends to it
    sure = sum((one - exact[1]).abs() for one in exact) < 1e-9
    assert torch.allclose(found.double()[sure], exact[1][sure], atol=2e-5)


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_many_pairs_are_scored_so_and_few_are_not(monkeypatch, name, options) -> None:
    matcher = made(name, 16, **options)
    images, texts = side([7, 4, 36], 16, 0), side([5, 30, 3, 3] * 9, 16, 1)
    calls = []
    first = host.HostSides.of
    monkeypatch.setattr(host.HostSides, "of", lambda *args: calls.append(1) or first(*args))
    few = score_matrix(matcher, images, texts)
    assert not calls
    monkeypatch.setattr(score_engine, "LARGE", 0)
    many = score_matrix(matcher, images, texts)
    assert calls
    assert torch.allclose(many, few, atol=2e-5)


def test_both_directions_of_scan_are_scored_so(monkeypatch) -> None:
    matcher = matchers["scan"](16).eval()
    images, texts = side([7, 4, 5], 16, 0), side([5, 30, 3], 16, 1)
    few = score_matrix(matcher, images, texts)
    monkeypatch.setattr(score_engine, "LARGE", 0)
    assert torch.allclose(score_matrix(matcher, images, texts), few, atol=2e-6)


def test_blocks_make_no_difference(monkeypatch) -> None:
    images, texts = side([5] * 11, 16, 0), side([3, 9, 4] * 8, 16, 1)
    for name in ("scan-t2i", "scan-i2t"):
        matcher = matchers[name](16).eval()
        whole = compiled_scores(matcher, images, texts)
        for block in (1, 12):
            monkeypatch.setattr(host, "COMPILED_BLOCK", block)
            assert torch.allclose(compiled_scores(matcher, images, texts), whole, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["scan-t2i", "scan-i2t"])
def test_halves_are_summed_in_single_precision(name, dtype) -> None:
    matcher = matchers[name](32).eval()
    images, texts = side([6] * 5, 32, 0), side([4, 7, 2], 32, 1)
    halves = [replace(x, fragments=x.fragments.to(dtype)) for x in (images, texts)]
    found = compiled_scores(matcher, *halves)
    assert found.dtype == dtype
    expected = matcher.eager(*(doubled(x) for x in halves))
    assert torch.allclose(found.double(), expected, atol=4e-2 if dtype == torch.bfloat16 else 4e-3)


@pytest.mark.parametrize("name", ["scan-t2i", "scan-i2t", "bfan"])
def test_sums_of_weights_that_would_not_fit_are_left_to_others(name) -> None:
    matcher = matchers[name](8, lambda_softmax=40.0).eval()
    images, texts = side([100], 8, 0), side([1, 100], 8, 1)
    images.fragments[:] = texts.fragments[1, 0]  # type: ignore[index]
    assert compiled_scores(matcher, images, texts) is None
    milder = matchers[name](8, lambda_softmax=20.0).eval()
    found = compiled_scores(milder, images, texts)
    expected = milder.eager(doubled(images), doubled(texts))
    assert torch.allclose(found.double(), expected, atol=2e-5)


def test_masks_may_lie_in_any_order() -> None:
    matcher, texts = matchers["scan-t2i"](8).eval(), side([4, 2], 8, 1)
    images = side([3, 2, 1], 8, 0)
    turned = replace(images, mask=images.mask.T.contiguous().T)
    found = compiled_scores(matcher, turned, texts)
    assert torch.equal(found, compiled_scores(matcher, images, texts))


def test_what_it_is_not_made_for_is_left_to_others() -> None:
    images, texts = side([3, 2], 8, 0), side([4], 8, 1)
    matcher = matchers["scan-t2i"](8).eval()
    broken = replace(images, fragments=images.fragments.clone())
    broken.fragments[0, 0, 0] = torch.nan
    trained = replace(images, fragments=images.fragments.clone().requires_grad_())
    empty = side([3, 0], 8, 0)
    for other in (broken, trained, doubled(images), empty):
        assert compiled_scores(matcher, other, texts) is None
    for unsuited in (matchers["scan-t2i"](8, raw_norm="softmax"), matchers["chan"](8)):
        assert compiled_scores(unsuited.eval(), images, texts) is None
    sharp = matchers["scan-t2i"](8, lambda_softmax=100.0).eval()
    assert compiled_scores(sharp, images, texts) is None
    pair = (images.fragments, images.mask), (texts.fragments, texts.mask)
    assert host.host_attention(matcher.recipes(), *pair, kept=None) is None


class Factored(PlainProducts):
    """Products that are yet to be multiplied by something, as those of digits are."""

    def times(self, words, scale):
        block = super().times(words, scale)

        def unfinished(images, out):
            block(images, out)
            factors = 1.0 + torch.arange(out.shape[0] * out.shape[1]).view(out.shape[:2]) % 7
            out /= factors[..., None]
            return factors

        return unfinished


@pytest.mark.parametrize("name", ["scan-t2i", "scan-i2t", "bfan", "naaf"])
def test_factors_of_products_are_multiplied_in_once(monkeypatch, name) -> None:
    matcher = matchers[name](16).eval()
    images, texts = side([5, 3, 4] * 3, 16, 0), side([3, 9, 4] * 8, 16, 1)
    score = compiled_scores if name != "naaf" else partial(host_scores, large=True)
    whole = score(matcher, images, texts)
    monkeypatch.setattr(host_sides, "products_of", lambda v, rounded: Factored(v))
    assert torch.allclose(score(matcher, images, texts), whole, atol=1e-5)
