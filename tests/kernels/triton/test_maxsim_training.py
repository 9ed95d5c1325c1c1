"""Kernels of a MaxSim training step against PyTorch in double precision, in the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

import counterfoil as cf
from counterfoil.kernels import maxsim as module
from tests.conftest import thinned
from tests.kernels.test_maxsim import gradients, naive, random_sides, use_kernel

training = pytest.importorskip("counterfoil.kernels.triton.maxsim_training")

Masks = Sequence[Tensor | None]

SHAPES = [
    (3, 1, 64, 1, 16),
    (1, 5, 40, 10, 100),  # documents of several programs
    (3, 30, 3, 37, 128),
    (64, 3, 2, 5, 24),
    (130, 2, 3, 4, 8),
    (2, 33, 3, 13, 384),
    (1, 130, 3, 9, 16),
    (1, 3, 2, 5, 1024),
]


@pytest.fixture(autouse=True)
def by_kernels(monkeypatch) -> None:
    use_kernel(monkeypatch)
    monkeypatch.setattr(module, "_scores", _refused)


def _refused(*args, **given):
    raise AssertionError("computed for a large job, not by the kernels of a training step")


def both(sides: Sequence[Tensor], masks: Masks) -> list[Tensor]:
    """Scores and gradients, if every pair has a weight of its own."""
    scores = []

    def recorded_maxsim(*given: Tensor | None) -> Tensor:
        scores.append(cf.maxsim(*given))
        return scores[0]

    of_sides = gradients(recorded_maxsim, sides, masks)
    return [scores[0].detach(), *of_sides]


def in_double(sides: Sequence[Tensor], masks: Masks) -> list[Tensor]:
    """The same by PyTorch in double precision."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_scores", SCORES)
        patch.setattr(module, "torch_maxima", TORCH_MAXIMA)
        return both([side.double() for side in sides], masks)


def assert_near(results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for number, (mine, theirs) in enumerate(zip(results, expected, strict=True)):
        # scores are in single precision; gradients are rounded twice, with the upstream gradient
        rounding = 1e-5 if number == 0 else 4 * torch.finfo(mine.dtype).eps
        atol = rounding * float(theirs.abs().max())
        torch.testing.assert_close(mine.double(), theirs, atol=max(atol, 1e-6), rtol=0)


HALF, SINGLE = torch.float16, torch.float32


@pytest.mark.parametrize(
    ("dtype", "masked"),
    thinned(product((HALF, SINGLE), (True, False)), (HALF, True), (SINGLE, False)),
)
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_and_gradients_are_those_in_double_precision(shape, masked, dtype) -> None:
    queries, documents, *masks = random_sides(sum(shape), *shape)
    sides = queries.to(dtype), documents.to(dtype)
    masks = masks if masked else [None, None]
    assert_near(both(sides, masks), in_double(sides, masks))


@pytest.mark.parametrize("mask", [0, 1])
def test_each_mask_alone(mask) -> None:
    queries, documents, *masks = random_sides(2)
    masks[mask] = None
    sides = queries.float(), documents.float()
    assert_near(both(sides, masks), in_double(sides, masks))


def test_gradients_are_those_of_a_loop() -> None:
    *sides, query_mask, document_mask = random_sides(3, q=30, k=36, width=16)
    masks = query_mask, document_mask
    expected = gradients(naive, sides, masks)
    for mine, theirs in zip(
        gradients(cf.maxsim, [side.float() for side in sides], masks), expected, strict=True
    ):
        torch.testing.assert_close(mine.double(), theirs, atol=1e-5, rtol=1e-5)


FORWARD, BACKWARD = "_forward_blocks", "_backward_blocks"


@pytest.mark.parametrize(
    ("dtype", "blocks"),
    thinned(product((HALF, SINGLE), (FORWARD, BACKWARD)), (HALF, FORWARD), (SINGLE, BACKWARD)),
)
def test_block_sizes_for_any_size_of_batch_give_the_same(monkeypatch, dtype, blocks) -> None:
    queries, documents, *masks = random_sides(4, 5, 20, 35, 6, 136)
    sides = queries.to(dtype), documents.to(dtype)
    expected = in_double(sides, masks)
    sizes = (1, 30, 200), (40, 30, 24), (512, 30, 200)
    options = {
        option
        for size in sizes
        for option in getattr(training, blocks)(torch.zeros(1, dtype=dtype).expand(size))
    }
    for option in options:
        monkeypatch.setattr(training, blocks, lambda queries, option=option: (option,))
        assert_near(both(sides, masks), expected)


def test_a_gpu_too_small_for_the_preferred_blocks_gets_smaller_ones() -> None:
    from triton.runtime.errors import OutOfResources

    tried = []

    def run(blocks: str) -> None:
        tried.append(blocks)
        if blocks != "small":
            raise OutOfResources(2, 1, "shared memory")

    training._first_that_fits(run, ("large", "small"))
    assert tried == ["large", "small"]
    with pytest.raises(OutOfResources):
        training._first_that_fits(run, ("large",))


@pytest.mark.parametrize(("side", "other"), [(0, "_document"), (1, "_query")])
def test_only_the_side_that_needs_a_gradient_has_a_kernel_run(monkeypatch, side, other) -> None:
    queries, documents, *masks = random_sides(5)
    sides = [queries.float(), documents.float()]
    expected = gradients(cf.maxsim, sides, masks)[side]
    monkeypatch.setattr(training, f"{other}_gradients", _refused)
    weight = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    sides[side].requires_grad_()
    (cf.maxsim(*sides, *masks) * weight).sum().backward()
    assert torch.equal(sides[side].grad, expected)
    assert sides[1 - side].grad is None


def test_views_and_expanded_tensors_give_the_same() -> None:
    queries, documents, *masks = random_sides(6, n=4)
    sides = [queries.float(), documents.float()]
    expected = both(sides, masks)
    views = [side.permute(2, 1, 0).contiguous().permute(2, 1, 0) for side in sides]
    turned = [mask.T.contiguous().T for mask in masks]
    assert not any(x.is_contiguous() for x in (*views, *turned))
    for mine, theirs in zip(both(views, turned), expected, strict=True):
        assert torch.equal(mine, theirs)
    leaf = sides[0].clone().requires_grad_()
    cf.maxsim(leaf, sides[1], *masks).sum().backward()  # an expanded upstream gradient
    again = sides[0].clone().requires_grad_()
    cf.maxsim(again, sides[1], *masks).backward(torch.ones(4, 5))
    assert torch.equal(leaf.grad, again.grad)


def test_mixed_precision_multiplies_in_half_precision() -> None:
    queries, documents, *masks = random_sides(8, width=32)
    queries, documents = queries.float().requires_grad_(), documents.float()
    with torch.autocast("cpu", torch.float16):
        scores = cf.maxsim(queries, documents, *masks)
        scores.sum().backward()
    half = queries.detach().half().requires_grad_()
    halves = cf.maxsim(half, documents.half(), *masks)
    halves.sum().backward()
    assert torch.equal(scores, halves)
    assert queries.grad.dtype == torch.float32
    assert torch.equal(queries.grad, half.grad.float())


def test_the_first_of_equal_maxima_counts_in_any_step() -> None:
    queries = torch.ones(2, 3, 16)
    documents = torch.zeros(3, 11, 16)
    for document, positions in zip(documents, [(5, 6, 10), (3, 4), (0, 8)], strict=True):
        document[list(positions)] = 1
    documents.requires_grad_()
    cf.maxsim(queries, documents).sum().backward()
    assert documents.grad[:, :, 0].nonzero().tolist() == [[0, 5], [1, 3], [2, 0]]
    assert (documents.grad[[0, 1, 2], [5, 3, 0]] == 6).all()


def test_a_large_job_is_packed(monkeypatch) -> None:
    queries, documents = torch.zeros(4, 5, 16), torch.zeros(6, 7, 16)
    assert training.fits(queries, documents)
    monkeypatch.setattr(training, "MAX_CELLS", 4 * 5 * 6 - 1)
    assert not training.fits(queries, documents)
    with pytest.raises(AssertionError, match="large job"):
        cf.maxsim(queries.requires_grad_(), documents)


@pytest.mark.parametrize("shape", [(0, 5, 6, 7, 16), (4, 0, 6, 7, 16), (4, 5, 0, 7, 16)])
def test_empty_batches_are_left_to_pytorch(shape) -> None:
    n, q, m, k, width = shape
    assert not training.fits(torch.zeros(n, q, width), torch.zeros(m, k, width))


def test_without_gradients_scores_are_those_of_large_jobs() -> None:
    with torch.no_grad(), pytest.raises(AssertionError, match="large job"):
        cf.maxsim(torch.zeros(4, 5, 16, requires_grad=True), torch.zeros(6, 7, 16))


SCORES, TORCH_MAXIMA = module._scores, module.torch_maxima
