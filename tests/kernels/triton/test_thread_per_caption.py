"""Words, or regions, that take a turn together: numbers that do not divide by two, and masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from counterfoil.encoders.encoded import Encoded
from counterfoil.kernels import dispatch
from counterfoil.kernels.spec import KernelSpec
from counterfoil.kernels.triton import thread_per_caption as lane_scoring
from tests.conftest import thinned
from tests.kernels.test_dispatch import MATCHERS, D, both_ways

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction

from counterfoil.kernels.triton import thread_per_caption_kernels

LENGTHS = (1, 5, 1, 2, 6, 1, 3, 2, 6, 1)
"""By four, and by length: a group of one word; of five at most, and unlike; and of six."""


@pytest.fixture(autouse=True)
def side_by_side(monkeypatch):
    """Four captions side by side, whatever the job's size and the device."""
    monkeypatch.setattr(lane_scoring, "WIDTH", 4)
    monkeypatch.setattr(dispatch, "THREAD_PER_CAPTION_CELLS", 0)
    monkeypatch.setattr(dispatch, "usable", lambda device, dtype: True)


def sides(
    seed: int, regions: int, last_is_real: tuple[bool, ...], lengths: tuple[int, ...]
) -> tuple[Encoded, Encoded]:
    """Unit fragments, words near some region, in double precision."""
    draw = torch.Generator().manual_seed(seed)
    real = torch.ones(len(last_is_real), regions, dtype=torch.bool)
    real[:, -1] = torch.tensor(last_is_real)
    v = torch.randn(*real.shape, D, generator=draw, dtype=torch.float64)
    v = F.normalize(v, dim=-1)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    near = v.flatten(0, 1)[torch.randint(real.numel(), mask.shape, generator=draw)]
    u = near + 0.3 * torch.randn(*mask.shape, D, generator=draw, dtype=torch.float64)
    return Encoded(v, real), Encoded(F.normalize(u, dim=-1) * mask[..., None], mask)


@pytest.mark.parametrize(
    ("regions", "masked"),
    [
        pytest.param(1, False, marks=pytest.mark.slow),
        (3, True),
        pytest.param(4, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", thinned(MATCHERS, "scan-t2i-lse", "scan-i2t-lse", "chamfer"))
def test_no_fragment_is_left_out_or_counted_twice(name, regions, masked) -> None:
    images, texts = sides(regions, regions, (not masked, True), LENGTHS)
    torch.testing.assert_close(*both_ways(name, images, texts), atol=2e-5, rtol=1e-5)


@settings(max_examples=max(2, settings.default.max_examples // 8))
@given(
    seed=st.integers(0, 10**6),
    regions=st.integers(2, 5),
    last_is_real=st.booleans(),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    name=st.sampled_from([name for name in MATCHERS if not name.startswith("chan")]),
)
def test_any_numbers_of_words_and_regions(seed, regions, last_is_real, lengths, name) -> None:
    images, texts = sides(seed, regions, (last_is_real,), tuple(lengths))
    torch.testing.assert_close(*both_ways(name, images, texts), atol=5e-5, rtol=1e-5)


@pytest.fixture
def strays(monkeypatch) -> list[int]:
    """Addresses that the kernels read from outside of the tensors that they were given."""
    if not isinstance(thread_per_caption_kernels.text_queries, InterpretedFunction):
        pytest.skip("only Triton's interpreter shows its addresses")
    spans: list[tuple[int, int]] = []
    result: list[int] = []

    def note(*args, **kwargs) -> None:
        spans[:] = [
            (x.data_ptr(), x.data_ptr() + x.numel() * x.element_size())
            for x in args
            if isinstance(x, Tensor)
        ]

    load = interpreter.InterpreterBuilder.create_masked_load

    def watched(self, pointers, *rest):
        at = np.ravel(pointers.data).astype(np.int64)[:, None]
        first, end = np.array(spans).T
        result.extend(at[~((first <= at) & (at < end)).any(1), 0].tolist())
        return load(self, pointers, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", watched)
    for kernel in (
        thread_per_caption_kernels.text_queries,
        thread_per_caption_kernels.image_queries,
    ):
        monkeypatch.setattr(kernel, "pre_run_hooks", [note])
    return result


@pytest.mark.parametrize("name", ["scan-t2i-lse", "naaf", "bfan-equal", "chan-lse", "chamfer"])
@pytest.mark.parametrize("lengths", thinned([((1,),), ((2, 3),)], ((2, 3),)))
def test_kernels_read_nothing_but_what_they_are_given(name, lengths, strays) -> None:
    images, texts = sides(2, 3, (True, False), lengths)
    result, expected = both_ways(name, images, texts)
    assert strays == []
    torch.testing.assert_close(result, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "spec",
    [
        KernelSpec("scan", query_side="image", scale=4.0),
        KernelSpec("naaf", scale=20.0, propagation="soft", gate_scale=20.0),
    ],
)
def test_words_have_the_same_gram_matrices_whatever_is_multiplied_together(
    spec, monkeypatch
) -> None:
    lengths = [3] * 21 + [5] * 9 + [1]
    words = torch.randn(sum(lengths), D, generator=torch.Generator().manual_seed(0))
    whole = lane_scoring.interleaved_words(words, lengths, [spec])
    monkeypatch.setattr(lane_scoring, "MOST_GROUPS", 2)
    parts = lane_scoring.interleaved_words(words, lengths, [spec])
    assert torch.equal(parts.query_gram_at, whole.query_gram_at)
    torch.testing.assert_close(parts.query_gram, whole.query_gram)
