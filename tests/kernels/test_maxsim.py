"""MaxSim against loops over tokens: by PyTorch, and by the kernel in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import counterfoil as cf
from counterfoil.core.errors import ArgumentError
from counterfoil.kernels import maxsim as module

WAYS = ["torch", "kernel", "packed"] if find_spec("triton") else ["torch"]
"""The kernels run in Triton's interpreter (tests/conftest.py) without a GPU.

With gradients, small batches have kernels of their own; *packed* is the way of large jobs for all.
"""


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


def gradients(score, sides: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of both sides, if every pair has a weight of its own."""
    leaves = [side.detach().clone().requires_grad_() for side in sides]
    scores = score(*leaves, *masks)
    weight = torch.randn(scores.shape, generator=torch.Generator().manual_seed(0))
    (scores * weight.to(scores)).sum().backward()
    return [leaf.grad for leaf in leaves]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch) -> str:
    if request.param != "torch":
        use_kernel(monkeypatch, packed=request.param == "packed")
    return request.param


def use_kernel(monkeypatch, packed: bool = False) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(module, "usable", lambda device, dtype: dtype != torch.float64)
    monkeypatch.setattr(module, "torch_maxima", _refused)
    if packed:
        monkeypatch.setattr("counterfoil.kernels.triton.maxsim_training.MAX_CELLS", 0)


def _refused(*args):
    raise AssertionError("computed by PyTorch, not by the kernel")


def test_vectors_without_numbers_have_gradients_without_numbers() -> None:
    queries, documents = torch.zeros(2, 3, 0), torch.zeros(4, 5, 0)
    for side in (queries, documents):
        side.requires_grad_()
    scores = cf.maxsim(queries, documents)
    scores.sum().backward()
    assert torch.equal(scores.detach(), torch.zeros(2, 4))
    assert (queries.grad.shape, documents.grad.shape) == (queries.shape, documents.shape)


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
    if way != "torch" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter has no products of bfloat16; test_maxsim_gpu has")
    expected = naive(queries.double(), documents.double(), *masks)
    result = cf.maxsim(queries, documents, *masks)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)


def test_products_beyond_the_range_of_half_precision_are_finite(way) -> None:
    queries, documents = torch.full((2, 3, 16), 300.0).half(), torch.full((2, 4, 16), 300.0).half()
    assert (cf.maxsim(queries, documents) == 3 * 16 * 300.0**2).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_halves_are_rounded_only_once(dtype) -> None:
    queries, documents, *masks = random_sides(10, n=30, m=40, width=16)
    sides = queries.to(dtype), documents.to(dtype)
    expected = gradients(cf.maxsim, [side.double() for side in sides], masks)
    for mine, theirs in zip(gradients(cf.maxsim, sides, masks), expected, strict=True):
        assert mine.dtype == dtype
        near_zero = torch.finfo(dtype).eps * 1e-2
        torch.testing.assert_close(
            mine.double(), theirs, atol=near_zero, rtol=torch.finfo(dtype).eps
        )


def test_padding_changes_nothing(way) -> None:
    queries, documents, *masks = (
        x.float() if x.is_floating_point() else x for x in random_sides(3)
    )
    result = cf.maxsim(queries, documents, *masks)
    for vectors, mask in zip((queries, documents), masks, strict=True):
        vectors[~mask] = 1e4
    assert torch.equal(cf.maxsim(queries, documents, *masks), result)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_in_padding_change_neither_scores_nor_gradients(way, value) -> None:
    queries, documents, *masks = random_sides(3)
    sides = [queries.float(), documents.float()]
    scores, expected = cf.maxsim(*sides, *masks), gradients(cf.maxsim, sides, masks)
    for vectors, mask in zip(sides, masks, strict=True):
        vectors[~mask] = value
    assert torch.equal(cf.maxsim(*sides, *masks), scores)
    for mine, theirs in zip(gradients(cf.maxsim, sides, masks), expected, strict=True):
        assert torch.equal(mine, theirs)


def test_a_document_without_tokens_passes_no_gradient_on_even_if_it_is_nan() -> None:
    queries, documents, *masks = random_sides(3)
    queries.requires_grad_()
    upstream = torch.ones(3, 5, dtype=torch.float64)
    upstream[:, 2] = torch.nan
    cf.maxsim(queries, documents, *masks).backward(upstream)
    assert queries.grad.isfinite().all()


def test_nan_in_a_real_vector_is_nan_in_the_scores_of_its_item(way) -> None:
    for masked in (True, False):
        queries, documents, masks = with_nan(masked)
        scores = cf.maxsim(queries.float(), documents.float(), *masks)
        expected = naive(queries, documents, *(masks or all_real(queries, documents)))
        assert torch.equal(scores.isnan(), expected.isnan())
        assert scores.isnan().sum() < scores.numel()
        if way != "packed":  # the interpreter has no position in NaN alone; test_maxsim_gpu has
            leaf = documents.float().requires_grad_()
            assert torch.equal(cf.maxsim(queries.float(), leaf, *masks).isnan(), expected.isnan())


@pytest.mark.parametrize("masked", [True, False])
def test_pairs_with_nan_are_known_without_their_products(masked) -> None:
    queries, documents, masks = with_nan(masked)
    query_mask, document_mask = masks or (None, None)
    tokens = module._Tokens.of(queries, query_mask)
    packed = queries.flatten(0, 1) if tokens.rows is None else queries.flatten(0, 1)[tokens.rows]
    pairs = module._nan_pairs(packed, documents, document_mask, tokens)
    expected = naive(queries, documents, *(masks or all_real(queries, documents)))
    assert torch.equal(pairs, expected.isnan())


def with_nan(masked: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """NaN in a real vector of the first query and document, and in padding of the others."""
    queries, documents, *masks = random_sides(3)
    queries[0, 0, 3] = documents[0, 0, 1] = torch.nan
    if masked:  # the second query and the third document have no tokens
        queries[1, 2, 0] = documents[2, 1, 0] = torch.nan
    return queries, documents, masks if masked else []


def all_real(*sides: Tensor) -> list[Tensor]:
    return [torch.ones(side.shape[:2], dtype=torch.bool) for side in sides]


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
    *sides, query_mask, document_mask = random_sides(5, m=4)
    masks = [query_mask, document_mask]
    expected = gradients(naive, sides, masks)
    result = gradients(cf.maxsim, [side.float() for side in sides], masks)
    for mine, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=1e-5, rtol=1e-5)


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


@pytest.mark.parametrize("cells", [1, 30, 100, 700])
def test_blocks_of_documents_and_query_tokens_give_the_same(monkeypatch, cells) -> None:
    queries, documents, *masks = random_sides(7, n=5, m=9)

    def everything() -> list[Tensor]:
        with torch.no_grad():
            scores = cf.maxsim(queries, documents, *masks)
        return [scores, *gradients(cf.maxsim, (queries, documents), masks)]

    expected = everything()
    monkeypatch.setattr(module, "CPU_CELLS", cells)
    monkeypatch.setattr(module, "CPU_BUFFER", cells)
    for mine, whole in zip(everything(), expected, strict=True):
        torch.testing.assert_close(mine, whole)


@pytest.mark.parametrize("shape", [(320_000, 2, 1030, 128), (32, 5000, 300, 128), (9, 7, 2, 4096)])
def test_a_block_of_many_queries_or_wide_vectors_stays_within_its_limit(shape) -> None:
    tokens, count, longest, width = shape
    packed = torch.zeros(1, 1).expand(tokens, width)  # no memory behind either
    documents = torch.zeros(1, 1, 1).expand(count, longest, width)
    seen = torch.zeros(tokens, count, dtype=torch.uint8)
    for part, blocks in module._blocks(packed, documents):
        for rows in blocks:
            block = seen[rows, part]
            block += 1
            assert block.numel() * longest <= module.CPU_CELLS
            assert max(len(block), block.shape[1] * longest) * width <= module.CPU_CELLS
    assert (seen == 1).all()


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


@pytest.mark.parametrize("way", WAYS[:2])
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
def test_any_shape_agrees_with_double_precision(way, seed, shape, masked, half) -> None:
    queries, documents, *masks = random_sides(seed, *shape)
    dtype = torch.float16 if half else torch.float32
    queries, documents = queries.to(dtype), documents.to(dtype)
    masks = masks if masked else [torch.ones_like(mask) for mask in masks]
    with pytest.MonkeyPatch.context() as patch:
        expected = cf.maxsim(queries.double(), documents.double(), *masks)
        if way != "torch":
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
        ({"queries": [[[0.0] * 8]]}, "queries of list; expected a tensor"),
        ({"query_mask": [[True] * 4] * 3}, "query_mask of list; expected a tensor"),
    ],
)
def test_what_does_not_belong_together_is_an_error(change, message) -> None:
    given = {"queries": torch.zeros(3, 4, 8), "documents": torch.zeros(5, 6, 8)}
    with pytest.raises(ArgumentError, match=message):
        cf.maxsim(**{**given, **change})
