"""Compiled tiles against those that are not."""

from __future__ import annotations

import pytest
import torch

from counterfoil.encoders import Encoded, l2_normalize
from counterfoil.kernels import spec
from counterfoil.matchers import fragment_matcher, matchers
from counterfoil.scoring.engine import score_matrix
from counterfoil.scoring.plan import plan_scores

DIM = 8


def side(lengths: list[int], seed: int) -> Encoded:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    fragments = l2_normalize(torch.randn(*mask.shape, DIM, generator=generator))
    fragments = fragments * mask[..., None]
    return Encoded(fragments, mask, fragments.mean(1))


@pytest.fixture
def everywhere(monkeypatch):
    """Any job is large, any device compiles; what is traced runs as it is, without a compiler."""
    monkeypatch.setattr(spec, "LARGE_JOB_CELLS", 0)
    monkeypatch.setattr(fragment_matcher, "can_compile", lambda device: True)
    monkeypatch.setattr(fragment_matcher, "COMPILE_BACKEND", "eager")
    monkeypatch.setattr(fragment_matcher, "_uncompilable", set())
    torch._dynamo.reset()


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("sgr", "sgraf", "imram")]


@pytest.mark.parametrize("name", ["saf", *SLOW])
@pytest.mark.slow
def test_compiled_tiles_of_any_size_are_what_the_others_are(name, everywhere) -> None:
    matcher = matchers[name](DIM).eval()
    images, texts = side([4, 2, 3], 0), side([3, 1, 5, 2, 2], 1)
    with torch.inference_mode():
        expected = matcher(images, texts)
    result = score_matrix(matcher, images, texts, plan=plan_scores(images, texts, cells=60))
    assert torch.allclose(result, expected, atol=1e-6)
    assert not fragment_matcher._uncompilable
    assert any(backend == "eager" for _, backend in fragment_matcher._compiled)


def test_what_cannot_be_compiled_runs_as_it_is(everywhere, monkeypatch) -> None:
    def refuse(kind, backend):
        def compiled(*args):
            raise RuntimeError("no compiler")

        return compiled

    monkeypatch.setattr(fragment_matcher, "_compile_tile", refuse)
    matcher = matchers["saf"](DIM).eval()
    images, texts = side([4, 2], 0), side([3, 1], 1)
    with torch.inference_mode():
        expected = matcher(images, texts)
    assert torch.allclose(score_matrix(matcher, images, texts), expected, atol=1e-6)
    assert type(matcher) in fragment_matcher._uncompilable


def test_small_jobs_and_training_are_not_compiled(everywhere, monkeypatch) -> None:
    def never(*args):
        raise AssertionError("compiled")

    monkeypatch.setattr(fragment_matcher, "compiled_tile", never)
    matcher = matchers["imram"](DIM)
    images, texts = side([4, 2], 0), side([3, 1], 1)
    matcher(images, texts).sum().backward()
    monkeypatch.setattr(spec, "LARGE_JOB_CELLS", 1 << 60)
    score_matrix(matcher.eval(), images, texts)
