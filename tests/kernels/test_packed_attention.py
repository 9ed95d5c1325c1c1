"""Packed attention against PyTorch's in double precision, in Triton's interpreter without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from counterfoil.encoders import transformer
from counterfoil.encoders.transformer import Packing, Transformer, TransformerLayer
from counterfoil.kernels import packed_attention as module
from counterfoil.kernels.packed_attention import packed_attention

pytest.importorskip("triton", reason="Triton is not installed")

CASES = [  # lengths, heads, numbers per head
    ([3, 1, 7], 2, 16),
    ([17, 40, 5, 64], 3, 32),
    ([65, 2, 128], 1, 64),
    ([1, 1, 2], 4, 16),
    ([30], 12, 32),
    ([9, 33], 1, 128),
]


@pytest.fixture(autouse=True)
def by_kernel(monkeypatch) -> None:
    monkeypatch.setattr(module, "usable", lambda device, dtype: dtype != torch.float64)


def sides(lengths: list[int], heads: int, width: int, first: bool = False) -> list[Tensor]:
    """Queries, keys and values in half precision, and first queries and the rest with ``first``."""
    draw = torch.Generator().manual_seed(sum(lengths))
    tokens, size = sum(lengths), heads * width
    joined = torch.randn(tokens, size * (2 if first else 3), generator=draw).half()
    queries = torch.randn(len(lengths), size, generator=draw).half()
    return [joined, queries] if first else [joined]


def padded(leaves: list[Tensor], packing: Packing, heads: int) -> Tensor:
    """The way of PyTorch, which `TransformerLayer` takes without the kernel."""
    layer = TransformerLayer(heads, heads, 1, 0.0)
    first = leaves[1] if len(leaves) > 1 else None
    return layer._attend_padded(leaves[0], first, packing, 0.0)


def with_gradients(attend: Callable[[list[Tensor]], Tensor], given: list[Tensor]) -> list[Tensor]:
    leaves = [one.detach().clone().requires_grad_() for one in given]
    attended = attend(leaves)
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(attended.shape, generator=draw).half().to(attended)
    (attended * weight).sum().backward()
    return [attended.detach(), *(leaf.grad for leaf in leaves)]


def assert_near(results: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(results, expected, strict=True):
        assert mine.shape == theirs.shape
        atol = 4 * torch.finfo(mine.dtype).eps * float(theirs.abs().max())
        torch.testing.assert_close(mine.to(theirs), theirs, atol=atol, rtol=0)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("lengths", "heads", "width"), CASES)
def test_attention_and_gradients_are_pytorchs(lengths, heads, width, first) -> None:
    packing = Packing.of(torch.tensor(lengths))
    given = sides(lengths, heads, width, first)

    def fused(leaves: list[Tensor]) -> Tensor:
        queries = leaves[1] if first else None
        found = packed_attention(leaves[0], packing.starts, packing.longest, heads, first=queries)
        assert found is not None
        return found

    mine = with_gradients(fused, given)
    double = [one.double() for one in given]
    assert_near(mine, with_gradients(lambda leaves: padded(leaves, packing, heads), double))


def one_hot_values(lengths: list[int]) -> tuple[Tensor, Packing]:
    """One head whose values are the columns of the identity, so that it returns the weights."""
    joined = sides(lengths, 1, 128)[0]
    rows = [torch.arange(length) for length in lengths]
    joined[:, 256:] = torch.nn.functional.one_hot(torch.cat(rows), 128).half()
    return joined, Packing.of(torch.tensor(lengths))


def by_hand(leaves: list[Tensor], lengths: list[int], factors: Tensor) -> Tensor:
    """Attention of one head of 128 numbers with given factors of dropout."""
    rows, start = [], 0
    for number, length in enumerate(lengths):
        part = leaves[0][start : start + length]
        k, v = part[:, -256:-128], part[:, -128:]
        own = slice(start, start + length) if len(leaves) == 1 else slice(number, number + 1)
        q = part[:, :128] if len(leaves) == 1 else leaves[1][own]
        weights = (q @ k.T / 128**0.5).softmax(1)
        rows.append((weights * factors[own, :length]) @ v)
        start += length
    return torch.cat(rows)


def test_dropout_drops_its_share_and_keeps_the_mean() -> None:
    joined, packing = one_hot_values([120, 90, 101])
    all_of_them = packed_attention(joined, packing.starts, packing.longest, 1)
    torch.manual_seed(0)
    for p in (0.1, 0.5):
        some = packed_attention(joined, packing.starts, packing.longest, 1, p)
        real = all_of_them > 1e-5  # half precision rounds smaller weights to few digits
        dropped = (some == 0) & real
        assert abs(float(dropped.sum() / real.sum()) - p) < 0.02
        kept = real & ~dropped
        ratio = some[kept].double() / all_of_them[kept].double()
        assert abs(float(ratio.median()) - 1 / (1 - p)) < 0.01
        # no row or column, and no neighbor, has a draw of its own
        share = dropped[:120, :120].double()
        assert float((share.mean(0) - p).abs().max()) < 5 * (p * (1 - p) / 120) ** 0.5
        assert float((share.mean(1) - p).abs().max()) < 5 * (p * (1 - p) / 120) ** 0.5
        pairs = (share[:, 1:] * share[:, :-1]).mean(), (share[1:] * share[:-1]).mean()
        assert all(abs(float(pair) - p * p) < 0.02 for pair in pairs)


def test_sequences_heads_and_calls_drop_other_weights_and_a_seed_repeats_them() -> None:
    lengths, heads = [16, 16, 17], 2
    joined = torch.zeros(49, 3 * 32).half()
    joined[:, 64:] = torch.cat([torch.arange(16), torch.arange(16), torch.arange(17)])[:, None] + 1
    packing = Packing.of(torch.tensor(lengths))

    def call() -> Tensor:
        found = packed_attention(joined, packing.starts, packing.longest, heads, 0.5)
        assert found is not None
        return found

    torch.manual_seed(3)
    once, other = call(), call()
    torch.manual_seed(3)
    assert torch.equal(call(), once)
    assert not torch.equal(once, other)
    assert not torch.equal(once[:16], once[16:32])
    assert not torch.equal(once[:, :16], once[:, 16:])


@pytest.mark.parametrize("first", [False, True])
def test_gradients_have_the_dropout_of_the_forward_pass(first) -> None:
    lengths = [20, 30, 9]
    joined, packing = one_hot_values(lengths)
    given = [joined[:, 128:], sides(lengths, 1, 128, True)[1]] if first else [joined]

    def fused(leaves: list[Tensor]) -> Tensor:
        torch.manual_seed(5)
        queries = leaves[1] if first else None
        found = packed_attention(leaves[0], packing.starts, packing.longest, 1, 0.3, first=queries)
        assert found is not None
        return found

    mine = with_gradients(fused, given)
    factors = (mine[0] != 0).double() / 0.7

    expected = with_gradients(
        lambda leaves: by_hand(leaves, lengths, factors), [one.double() for one in given]
    )
    assert_near(mine, expected)


def test_recomputed_layers_repeat_their_dropout() -> None:
    torch.manual_seed(0)
    layers = Transformer(32, 2, 2, 64, 0.2, checkpointing=False).half()
    x = sides([5, 9, 3], 2, 16)[0][:, :32].clone()
    packing = Packing.of(torch.tensor([5, 9, 3]))
    found = []
    for recompute in (False, True):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(1)
        if recompute:
            states = checkpoint(layers, leaf, packing, True, use_reentrant=False)
        else:
            states = layers(leaf, packing, True)
        states.float().square().sum().backward()
        found.append([states.detach(), leaf.grad])
    assert all(torch.equal(*both) for both in zip(*found, strict=True))


def test_a_transformer_runs_by_the_kernel_where_lengths_differ(monkeypatch) -> None:
    calls = []

    def counted(*args, **given) -> Tensor | None:
        calls.append(args[2])
        return packed_attention(*args, **given)

    monkeypatch.setattr(transformer, "packed_attention", counted)
    torch.manual_seed(0)
    layers = Transformer(32, 2, 2, 64, 0.0, checkpointing=False).half()
    x = sides([5, 9, 4], 2, 16)[0][:, :32].clone()
    for lengths, expected in (([5, 9, 4], [9, 9]), ([6, 6, 6], [])):
        packing = Packing.of(torch.tensor(lengths))
        calls.clear()
        mine = layers(x, packing)
        assert calls == expected
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transformer, "packed_attention", lambda *_, **__: None)
            theirs = layers.double()(x.double(), packing)
        layers.half()
        torch.testing.assert_close(mine.double(), theirs, atol=0.02, rtol=0)


def test_what_the_kernel_does_not_take_is_left_to_pytorch() -> None:
    joined = torch.zeros(6, 96).half()
    starts = torch.tensor([0, 2])
    assert packed_attention(joined, starts, 4, 2) is not None
    assert packed_attention(joined.float(), starts, 4, 2) is None
    assert packed_attention(joined, starts, 129, 2) is None
    assert packed_attention(joined, starts, 4, 4) is None  # 8 numbers per head
    assert packed_attention(joined[:, :72], starts, 4, 1) is None  # 24
    assert packed_attention(joined[:0], starts[:0], 0, 2) is None


@pytest.mark.parametrize(
    ("longest", "width", "is_left"), [(65, 128, True), (64, 128, False), (128, 64, False)]
)
def test_a_gpu_too_small_for_the_gradients_has_its_attention_from_pytorch(
    longest, width, is_left, monkeypatch
) -> None:
    """Checked before the forward pass, whose kernel is smaller: the backward pass has no choice."""
    monkeypatch.setattr(module, "shared_memory", lambda device: 99 << 10)  # of capability 8.6
    joined = torch.zeros(longest + 1, 3 * width).half()
    attended = packed_attention(joined, torch.tensor([0, 1]), longest, 1)
    assert (attended is None) == is_left


def test_second_derivatives_are_refused() -> None:
    from counterfoil.core.errors import ArgumentError

    joined = torch.randn(6, 96).half().requires_grad_()
    attended = packed_attention(joined, torch.tensor([0, 2]), 4, 2)
    (gradient,) = torch.autograd.grad(attended.float().sum(), joined, create_graph=True)
    with pytest.raises(ArgumentError, match="first derivatives"):
        gradient.float().sum().backward()
