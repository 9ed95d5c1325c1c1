"""Similarities of sets: parity with the public code, and with plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from counterfoil.core.errors import ConfigError
from counterfoil.encoders import Encoded
from counterfoil.matchers import matchers
from tests.conftest import assert_close, assert_gradient_close, load_fixture
from tests.matchers.test_conformance import DIM, side, with_junk

KINDS = ["smooth-chamfer", "chamfer", "max", "avg"]


def of_sets(rows: torch.Tensor, size: int) -> Encoded:
    sets = rows.unflatten(0, (-1, size))
    return Encoded(sets, torch.ones(sets.shape[:2], dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_set_similarities_agree_with_the_reference_with_gradients(kind, dtype) -> None:
    fixture = load_fixture("dive-similarity")
    option = kind.replace("-", "_")
    images = fixture["in.img_sets"].to(dtype).requires_grad_()
    texts = fixture["in.cap_sets"].to(dtype).requires_grad_()
    hyper = fixture.hyper
    sharpness = {"temperature": hyper["temperature"]} if kind == "smooth-chamfer" else {}
    matcher = matchers["smooth-chamfer"](images.shape[-1], kind=kind, **sharpness)
    sets = of_sets(images, hyper["img_set_size"]), of_sets(texts, hyper["txt_set_size"])
    scores = matcher(*sets)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-7
    assert_close(scores, fixture[f"out.{option}.scores"], tolerance)
    if f"grad.{option}.img_sets" in fixture.tensors:
        scores.sum().backward()
        assert_gradient_close(images.grad, fixture[f"grad.{option}.img_sets"])
        assert_gradient_close(texts.grad, fixture[f"grad.{option}.cap_sets"])


def by_loops(x: torch.Tensor, y: torch.Tensor, kind: str, sharpness: float) -> float:
    """One pair of sets, [n, D] and [m, D]."""
    cosines = [[float(a @ b) for b in y] for a in x]
    flat = [c for row in cosines for c in row]
    if kind == "max":
        return max(flat)
    if kind == "avg":
        return sum(1 / (1 + math.exp(-c)) for c in flat) / len(flat)

    def best(values: list[float]) -> float:
        if kind == "chamfer":
            return max(values)
        return math.log(sum(math.exp(sharpness * c) for c in values)) / sharpness

    columns = list(zip(*cosines, strict=True))
    one = sum(best(row) for row in cosines) / len(cosines)
    return (one + sum(best(list(column)) for column in columns) / len(columns)) / 2


@settings(max_examples=8)
@given(
    seed=st.integers(0, 99),
    kind=st.sampled_from(KINDS),
    sizes=st.tuples(*[st.lists(st.integers(1, 4), min_size=1, max_size=4) for _ in range(2)]),
    sharpness=st.sampled_from([0.5, 16.0, 100.0]),
)
def test_any_sets_score_as_plain_loops_say_whatever_is_padded(seed, kind, sizes, sharpness) -> None:
    images, texts = side(sizes[0], 5, seed), side(sizes[1], 4, seed + 1)
    matcher = matchers["smooth-chamfer"](DIM, kind=kind, temperature=sharpness)
    scores = matcher(with_junk(images, seed), with_junk(texts, seed))
    for i in range(len(images)):
        for j in range(len(texts)):
            x, y = images.fragments[i, images.mask[i]], texts.fragments[j, texts.mask[j]]
            expected = by_loops(x, y, kind, sharpness)
            assert float(scores[i, j]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_finite_with_empty_sets_and_in_bf16(kind) -> None:
    images, texts = side([4, 1, 0], 4, 0), side([2, 0], 4, 1)
    matcher = matchers["smooth-chamfer"](DIM, kind=kind)
    images.fragments.requires_grad_()
    scores = matcher(images, texts)
    assert not scores[2].any()
    assert not scores[:, 1].any()
    scores.sum().backward()
    assert images.fragments.grad.isfinite().all()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (matcher(images, texts).float() - scores).abs().max() < 0.05


def test_a_sharp_smooth_chamfer_is_chamfer_and_a_set_is_most_like_itself() -> None:
    sets = side([4, 4, 4, 4], 4, 3)
    smooth = matchers["smooth-chamfer"](DIM, temperature=1000.0)(sets, sets)
    hard = matchers["smooth-chamfer"](DIM, kind="chamfer")(sets, sets)
    assert torch.allclose(smooth, hard, atol=5e-3)
    assert torch.allclose(hard.diagonal(), torch.ones(4), atol=1e-5)
    assert (hard.argmax(1) == torch.arange(4)).all()
    assert torch.allclose(hard, hard.T, atol=1e-6)


def test_a_temperature_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"matcher\.temperature"):
        matchers["smooth-chamfer"](DIM, temperature=0.0)
