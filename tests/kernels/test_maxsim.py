"""MaxSim against loops over tokens: by PyTorch, and by the kernel in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import counterfoil as cf
from counterfoil.core.errors import ArgumentError
from counterfoil.kernels import maxsim as module

WAYS = ["torch", "kernel"]
"""The kernel runs in Triton's interpreter (tests/conftest.py) without a GPU."""


def random_sides(
    seed: int, n: int = 3, q: int = 4, m: int = 5, k: int = 6, width: int = 8
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, documents, and masks with holes; one query and one document have no tokens."""
    draw = torch.Generator().manual_seed(seed)
    queries = torch.randn(n, q, width, generator=draw, dtype=torch.float64)
    documents = torch.randn(m, k, width, generator=draw, dtype=torch.float64)
    query_mask = torch.rand(n, q, generator=draw) < 0.7
    document_mask = torch.rand(m, k, generator=draw) < 0.7
    query_mask[0, 0] = document_mask[0, 0] = True
    if n > 1:
        query_mask[1] = False
    if m > 2:
        document_mask[2] = False
    return queries, documents, query_mask, document_mask


def naive(queries: Tensor, documents: Tensor, query_mask: Tensor, document_mask: Tensor) -> Tensor:
    """A loop over pairs and tokens."""
    rows = []
    for query, real in zip(queries, query_mask, strict=True):
        row = []
        for document, there in zip(documents, document_mask, strict=True):
            score = queries.new_zeros(())
            for token in query[real] if bool(there.any()) else query[:0]:
                score = score + (document[there] @ token).max()
            row.append(score)
        rows.append(torch.stack(row))
    return torch.stack(rows)


@pytest.fixture(params=WAYS)
def way(request, monkeypatch) -> str:
    if request.param == "kernel":
        use_kernel(monkeypatch)
    return request.param


def use_kernel(monkeypatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(module, "usable", lambda device, dtype: dtype != torch.float64)
    monkeypatch.setattr(module, "torch_maxima", _refused)


def _refused(*args):
    raise AssertionError("computed by PyTorch, not by the kernel")


def test_a_small_example_by_hand() -> None:
    queries = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])
    documents = torch.tensor([[[0.5, 0.1], [0.2, 0.3]], [[-1.0, -1.0], [-2.0, -3.0]]])
    assert cf.maxsim(queries, documents).tolist() == [[pytest.approx(1.1), pytest.approx(-3.0)]]


@pytest.mark.parametrize("shape", [(3, 4, 5, 6, 8), (2, 7, 35, 3, 20), (1, 1, 1, 1, 1)])
def test_scores_are_those_of_a_loop(way, shape) -> None:
    queries, documents, *masks = random_sides(sum(shape), *shape)
    expected = naive(queries, documents, *masks)
    result = cf.maxsim(queries.float(), documents.float(), *masks)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)


def test_without_masks_every_token_counts(way) -> None:
    queries, documents, query_mask, document_mask = random_sides(1, k=5)
    expected = naive(
        queries, documents, torch.ones_like(query_mask), torch.ones_like(document_mask)
    )
    result = cf.maxsim(queries.float(), documents.float())
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_summed_in_single_precision(way, dtype) -> None:
    queries, documents, *masks = random_sides(2, width=16)
    queries, documents = queries.to(dtype), documents.to(dtype)
    if way == "kernel" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter has no products of bfloat16; test_maxsim_gpu has")
    expected = naive(queries.double(), documents.double(), *masks)
    result = cf.maxsim(queries, documents, *masks)
    assert result.dtype == torch.float32
    rounding = torch.finfo(dtype).eps * float(expected.abs().max())
    torch.testing.assert_close(result.double(), expected, atol=2 * rounding, rtol=0)


def test_padding_changes_nothing(way) -> None:
    queries, documents, *masks = (
        x.float() if x.is_floating_point() else x for x in random_sides(3)
    )
    result = cf.maxsim(queries, documents, *masks)
    for vectors, mask in zip((queries, documents), masks, strict=True):
        vectors[~mask] = 1e4
    assert torch.equal(cf.maxsim(queries, documents, *masks), result)


def test_empty_items_score_zero_and_get_no_gradient(way) -> None:
    queries, documents, query_mask, document_mask = random_sides(4)
    queries, documents = queries.float().requires_grad_(), documents.float().requires_grad_()
    scores = cf.maxsim(queries, documents, query_mask, document_mask)
    assert (scores[1] == 0).all()
    assert (scores[:, 2] == 0).all()
    scores.sum().backward()
    assert (queries.grad[~query_mask] == 0).all()
    assert (documents.grad[~document_mask] == 0).all()
    assert (documents.grad[document_mask] != 0).any()


@pytest.mark.parametrize(("n", "m"), [(0, 3), (3, 0), (0, 0)])
def test_no_items_give_no_scores(n, m) -> None:
    queries, documents = torch.zeros(n, 2, 4), torch.zeros(m, 5, 4, requires_grad=True)
    scores = cf.maxsim(queries, documents)
    assert scores.shape == (n, m)
    scores.sum().backward()
    assert documents.grad.shape == documents.shape


def test_no_tokens_score_zero() -> None:
    assert cf.maxsim(torch.zeros(2, 0, 4), torch.ones(3, 5, 4)).tolist() == [[0.0] * 3] * 2
    assert cf.maxsim(torch.ones(2, 3, 4), torch.ones(3, 0, 4)).tolist() == [[0.0] * 3] * 2


def test_gradients_are_those_of_a_loop(way) -> None:
    queries, documents, *masks = random_sides(5, m=4)
    weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))

    def gradients(score, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (queries, documents)]
        (score(*leaves, *masks) * weight.to(dtype)).sum().backward()
        return [leaf.grad.double() for leaf in leaves]

    expected = gradients(naive, torch.float64)
    for mine, theirs in zip(gradients(cf.maxsim, torch.float32), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_gradients_agree_with_finite_differences() -> None:
    queries, documents, *masks = random_sides(6, m=3, k=3, width=4)
    leaves = queries.requires_grad_(), documents.requires_grad_()
    assert torch.autograd.gradcheck(lambda q, d: cf.maxsim(q, d, *masks), leaves)


def test_only_one_side_may_need_a_gradient() -> None:
    queries, documents, *masks = random_sides(6)
    queries.requires_grad_()
    cf.maxsim(queries, documents, *masks).sum().backward()
    assert queries.grad is not None
    assert documents.grad is None
    with torch.no_grad():
        assert not cf.maxsim(queries, documents, *masks).requires_grad


def test_of_equal_maxima_the_first_gets_the_gradient(way) -> None:
    documents = torch.ones(1, 6, 4, requires_grad=True)
    cf.maxsim(torch.ones(2, 3, 4), documents).sum().backward()
    assert documents.grad[0, :, 0].tolist() == [6.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_blocks_of_documents_give_the_same(monkeypatch) -> None:
    queries, documents, *masks = random_sides(7, m=9)

    def both() -> tuple[Tensor, Tensor]:
        leaf = documents.detach().requires_grad_()
        scores = cf.maxsim(queries, leaf, *masks)
        scores.square().sum().backward()
        return scores.detach(), leaf.grad

    expected = both()
    monkeypatch.setattr(module, "CPU_CELLS", 1)
    monkeypatch.setattr(module, "BUFFER", 1)
    for mine, whole in zip(both(), expected, strict=True):
        torch.testing.assert_close(mine, whole)


def test_mixed_precision_multiplies_in_half_precision() -> None:
    queries, documents, *masks = random_sides(8, width=32)
    queries, documents = queries.float().requires_grad_(), documents.float()
    with torch.autocast("cpu", torch.bfloat16):
        scores = cf.maxsim(queries, documents, *masks)
    halves = cf.maxsim(queries.bfloat16(), documents.bfloat16(), *masks)
    assert torch.equal(scores, halves)
    assert scores.dtype == torch.float32
    scores.sum().backward()
    assert queries.grad.dtype == torch.float32


@settings(max_examples=settings.default.max_examples // 4)
@given(
    seed=st.integers(0, 10**6),
    shape=st.tuples(
        st.integers(1, 3),
        st.integers(1, 5),
        st.integers(1, 40),
        st.integers(1, 9),
        st.sampled_from([1, 8, 17, 40, 136]),
    ),
    masked=st.booleans(),
    half=st.booleans(),
)
def test_any_shape_by_the_kernel(seed, shape, masked, half) -> None:
    queries, documents, *masks = random_sides(seed, *shape)
    dtype = torch.float16 if half else torch.float32
    queries, documents = queries.to(dtype), documents.to(dtype)
    masks = masks if masked else [torch.ones_like(mask) for mask in masks]
    with pytest.MonkeyPatch.context() as patch:
        expected = cf.maxsim(queries.double(), documents.double(), *masks)
        use_kernel(patch)
        result = cf.maxsim(queries, documents, *(masks if masked else ()))
    torch.testing.assert_close(result.double(), expected, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": torch.zeros(4, 8)}, r"queries of shape \[4, 8\].*x\[None\]"),
        ({"documents": torch.zeros(5, 6, 9)}, "queries of 8 numbers, documents of 9"),
        ({"documents": torch.zeros(5, 6, 8, dtype=torch.long)}, "documents of dtype torch.int64"),
        ({"query_mask": torch.ones(3, 5, dtype=torch.bool)}, r"query_mask of shape \[3, 5\]"),
        ({"document_mask": torch.ones(5, 6)}, "document_mask of .* dtype torch.float32"),
        ({"documents": torch.zeros(5, 6, 8, device="meta")}, "tensors on cpu, meta"),
    ],
)
def test_what_does_not_belong_together_is_an_error(change, message) -> None:
    given = {"queries": torch.zeros(3, 4, 8), "documents": torch.zeros(5, 6, 8)}
    with pytest.raises(ArgumentError, match=message):
        cf.maxsim(**{**given, **change})
