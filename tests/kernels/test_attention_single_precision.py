"""PyTorch's tiled path in single precision gives what it gives in double precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from counterfoil.encoders import Encoded
from counterfoil.matchers import matchers


def side(lengths: list[int], dim: int, seed: int, anywhere: bool = False) -> Encoded:
    """Unit fragments with noise at padded places; real ones first, or anywhere."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(1, *lengths) + 1
    x = F.normalize(torch.randn(len(lengths), longest, dim, generator=generator), dim=-1)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    if anywhere:
        mask = mask[:, torch.randperm(longest, generator=generator)]
    return Encoded(x, mask)


def doubled(encoded: Encoded) -> Encoded:
    assert encoded.fragments is not None
    return replace(encoded, fragments=encoded.fragments.double())


def compare(matcher, images: Encoded, texts: Encoded, atol: float = 2e-5) -> None:
    with torch.inference_mode():
        scores = matcher(images, texts)
        expected = matcher(doubled(images), doubled(texts))
    assert scores.dtype == torch.float32
    assert expected.dtype == torch.float64
    assert torch.allclose(scores.double(), expected, atol=atol)


@settings(max_examples=40, deadline=None)
@given(
    regions=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    words=st.lists(st.integers(1, 12), min_size=1, max_size=40),
    which=st.sampled_from(
        [
            ("naaf", {}),
            ("naaf", {"intra": "none"}),
            ("naaf", {"negative": False}),
            ("naaf-reference", {"mining": False}),
            ("naaf", {"lambda_softmax": 9.0, "lambda_intra": 3.0}),
            ("scan-t2i", {}),
            ("scan-i2t", {}),
        ]
    ),
    boundary=st.sampled_from([-2.0, -0.103, 0.0, 0.301, 0.703, 0.999]),
    anywhere=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_scores_are_those_of_double_precision(
    regions, words, which, boundary, anywhere, seed
) -> None:
    name, options = which
    matcher = matchers[name](8, **options).eval()
    if name == "naaf":
        matcher.estimates("t2i").boundary.fill_(boundary)
    elif name == "naaf-reference":
        matcher.reference.state[1] = boundary
    compare(matcher, side(regions, 8, seed, anywhere), side(words, 8, seed + 1, anywhere))


def test_below_a_high_boundary_words_attend_to_nothing() -> None:
    images, texts = side([4, 4, 4], 8, 0), side([5, 3], 8, 1)
    assert images.fragments is not None
    assert texts.fragments is not None
    texts.fragments[0, :2] = images.fragments[1, :2]  # these two match; the others do not
    texts.fragments[1, 0] = images.fragments[0, 0]
    compare(matchers["naaf"](8, boundary=0.97).eval(), images, texts, atol=1e-5)


@pytest.mark.parametrize("tiny", [1e-8, 1e-6, 1e-5])
def test_a_tiny_similarity_is_raised_no_further_than_by_double_precision(tiny) -> None:
    regions = torch.tensor([[[1.0, 0.0], [0.6, -0.8]]])
    words = F.normalize(torch.tensor([[[tiny, 1.0], [-0.5, 0.1]]]), dim=-1)
    images, texts = (Encoded(x, torch.ones(1, 2, dtype=torch.bool)) for x in (regions, words))
    compare(matchers["naaf"](2, boundary=0.1).eval(), images, texts, atol=1e-6)


@pytest.mark.parametrize("scale", [20.0, 40.0])
@pytest.mark.parametrize("cosine", [-1.0, -0.95, -0.5])
def test_the_one_region_is_attended_to_however_unlike_it_is(cosine, scale) -> None:
    matcher = matchers["naaf"](2, boundary=-2.0, lambda_softmax=scale).eval()
    regions = torch.tensor([[[1.0, 0.0]]])
    words = torch.tensor([[[cosine, (1 - cosine**2) ** 0.5]]])
    images, texts = (Encoded(x, torch.ones(1, 1, dtype=torch.bool)) for x in (regions, words))
    assert torch.allclose(matcher(images, texts), torch.tensor(2 * cosine))


@pytest.mark.parametrize("name", ["naaf", "scan-t2i", "bfan"])
def test_fragments_need_not_be_of_length_one(name) -> None:
    images, texts = side([3, 2], 8, 0), side([4, 2], 8, 1)
    long = replace(images, fragments=30 * images.fragments)
    compare(matchers[name](8).eval(), long, texts, atol=1e-3)


def test_a_caption_that_is_not_a_number_spoils_no_other() -> None:
    matcher = matchers["naaf"](8, boundary=0.6).eval()
    images, texts = side([4] * 3, 8, 0), side([2] * 20 + [9] * 20, 8, 1)
    with torch.inference_mode():
        expected = matcher(images, texts)
    assert texts.fragments is not None
    texts.fragments[30, 0] = torch.nan
    with torch.inference_mode():
        scores = matcher(images, texts)
    others = torch.arange(40) != 30
    assert scores[:, 30].isnan().all()
    assert torch.allclose(scores[:, others], expected[:, others], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["naaf", "scan-t2i", "scan-i2t", "chan"])
def test_halves_are_compared_in_single_precision(name, dtype) -> None:
    halves = [
        replace(x, fragments=x.fragments.to(dtype))
        for x in (side([6] * 5, 32, 0), side([4, 7, 2], 32, 1))
    ]
    matcher = matchers[name](32).eval()
    compare(matcher, *halves, atol=1e-5)
