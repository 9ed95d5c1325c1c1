"""The compiled MaxSim kernel on a GPU against PyTorch in double precision on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import counterfoil as cf
from counterfoil.kernels import maxsim as module
from tests.kernels.test_maxsim import all_real, gradients, naive, random_sides, use_kernel, with_nan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = [
    (7, 9, 70, 36, 128),
    (40, 13, 300, 36, 128),
    (3, 40, 65, 33, 96),
    (40, 13, 150, 36, 1024),
    (2, 5, 3, 300, 768),
    (1, 32, 200, 7, 200),
    (130, 30, 128, 37, 100),
    (3, 1, 1, 1, 16),
    (2, 130, 3, 49, 384),
]


@pytest.fixture(autouse=True, params=["small batch", "packed"])
def by_kernel(request, monkeypatch) -> None:
    use_kernel(monkeypatch, packed=request.param == "packed")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_and_gradients_are_those_in_double_precision(shape, masked, dtype) -> None:
    queries, documents, *masks = random_sides(sum(shape), *shape)
    queries, documents = queries.to(dtype), documents.to(dtype)
    masks = masks if masked else [None, None]
    weight = torch.randn(shape[0], shape[2], generator=torch.Generator().manual_seed(0))

    def both(device: str, kind: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(device, kind).requires_grad_() for x in (queries, documents)]
        there = [mask if mask is None else mask.to(device) for mask in masks]
        scores = cf.maxsim(*leaves, *there)
        (scores * weight.to(scores)).sum().backward()
        return [scores.detach().double().cpu(), *(leaf.grad.double().cpu() for leaf in leaves)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "usable", lambda device, dtype: False)
        patch.setattr(module, "torch_maxima", TORCH_MAXIMA)
        expected = both("cpu", torch.float64)
    result = both("cuda", dtype)
    rounding = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        result[0], expected[0], atol=1e-5 * float(expected[0].abs().max()), rtol=0
    )
    for mine, theirs in zip(result[1:], expected[1:], strict=True):
        # near-equal maxima may change places in single precision: compare all but a few
        off = (mine - theirs).abs() > rounding * theirs.abs().max()
        assert float(off.double().mean()) < 2e-3


def test_the_same_bytes_every_time() -> None:
    queries, documents, *masks = (x.cuda() for x in random_sides(1, 40, 13, 300, 36, 128))
    results = []
    for _ in range(2):
        leaves = [x.detach().half().requires_grad_() for x in (queries, documents)]
        scores = cf.maxsim(*leaves, *masks)
        scores.square().sum().backward()
        results.append([scores.detach(), *(leaf.grad for leaf in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("masked", [True, False])
def test_nan_in_a_real_vector_is_nan_in_the_scores_of_its_item(masked, dtype) -> None:
    queries, documents, masks = with_nan(masked)
    expected = naive(queries, documents, *(masks or all_real(queries, documents))).isnan()
    sides = [side.to("cuda", dtype) for side in (queries, documents)]
    masks = [mask.cuda() for mask in masks]
    assert torch.equal(cf.maxsim(*sides, *masks).isnan().cpu(), expected)
    sides[1].requires_grad_()
    assert torch.equal(cf.maxsim(*sides, *masks).isnan().cpu(), expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_nan_and_infinity_in_padding_change_neither_scores_nor_gradients(dtype, value) -> None:
    *sides, query_mask, document_mask = (x.cuda() for x in random_sides(3, 7, 9, 70, 36, 128))
    masks, sides = [query_mask, document_mask], [side.to(dtype) for side in sides]

    def both() -> list[Tensor]:
        return [cf.maxsim(*sides, *masks), *gradients(cf.maxsim, sides, masks)]

    expected = both()
    for vectors, mask in zip(sides, masks, strict=True):
        vectors[~mask] = value
    assert all(torch.equal(a, b) for a, b in zip(both(), expected, strict=True))


def test_positions_beyond_16_bits_get_their_gradient() -> None:
    documents = torch.zeros(2, 40_000, 16, dtype=torch.float16, device="cuda")
    documents[1, 39_999] = documents[0, 35_000] = 1
    documents.requires_grad_()
    cf.maxsim(torch.ones(2, 3, 16, dtype=torch.float16, device="cuda"), documents).sum().backward()
    assert documents.grad.sum().item() == 2 * 2 * 3 * 16
    assert (documents.grad[0, 35_000] == 6).all()
    assert (documents.grad[1, 39_999] == 6).all()


TORCH_MAXIMA = module.torch_maxima
