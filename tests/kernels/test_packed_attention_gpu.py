"""The compiled attention kernels on a GPU against PyTorch in double precision on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from counterfoil.encoders import transformer
from counterfoil.encoders.transformer import Packing, Transformer
from counterfoil.kernels.packed_attention import packed_attention
from tests.kernels.test_packed_attention import (
    CASES,
    assert_near,
    by_hand,
    one_hot_values,
    padded,
    sides,
    with_gradients,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(lengths: list[int]) -> Packing:
    return Packing.of(torch.tensor(lengths, device="cuda"))


def fused(leaves: list[Tensor], packing: Packing, heads: int, dropout: float = 0.0) -> Tensor:
    first = leaves[1] if len(leaves) > 1 else None
    found = packed_attention(
        leaves[0], packing.starts, packing.longest, heads, dropout, first=first
    )
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("lengths", "heads", "width"), CASES)
def test_attention_and_gradients_are_pytorchs(lengths, heads, width, first, dtype) -> None:
    given = [one.to(dtype) for one in sides(lengths, heads, width, first)]
    packing = on_gpu(lengths)
    mine = with_gradients(lambda leaves: fused(leaves, packing, heads), [g.cuda() for g in given])
    here = Packing.of(torch.tensor(lengths))
    expected = with_gradients(
        lambda leaves: padded(leaves, here, heads), [g.double() for g in given]
    )
    assert_near([one.cpu() for one in mine], expected)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("lengths", [[20, 30, 9], [120, 3, 101]])
def test_gradients_have_the_dropout_of_the_forward_pass(lengths, first) -> None:
    joined, _ = one_hot_values(lengths)
    given = [joined[:, 128:], sides(lengths, 1, 128, True)[1]] if first else [joined]
    packing = on_gpu(lengths)
    torch.manual_seed(5)
    mine = with_gradients(
        lambda leaves: fused(leaves, packing, 1, 0.3), [one.cuda() for one in given]
    )
    mine = [one.cpu() for one in mine]
    factors = (mine[0] != 0).double() / 0.7
    count = sum(length * (1 if first else length) for length in lengths)
    share = float((mine[0] != 0).sum()) / count
    assert abs(share - 0.7) < 4 * (0.3 * 0.7 / count) ** 0.5
    expected = with_gradients(
        lambda leaves: by_hand(leaves, lengths, factors), [one.double() for one in given]
    )
    assert_near(mine, expected)


def test_a_transformer_in_mixed_precision_is_near_the_padded_one(monkeypatch) -> None:
    torch.manual_seed(0)
    layers = Transformer(384, 3, 12, 768, 0.0, checkpointing=False).cuda()
    lengths = [int(n) for n in torch.randint(37, 60, (300,))]
    x = torch.randn(sum(lengths), 384, device="cuda")
    upstream = torch.randn(len(lengths), 384, device="cuda")
    packing = on_gpu(lengths)
    results = []
    for by_kernel in (True, False):
        if not by_kernel:
            monkeypatch.setattr(transformer, "packed_attention", lambda *_, **__: None)
        leaf = x.clone().requires_grad_()
        layers.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            states = layers(leaf, packing, first_only=True)
        (states * upstream).sum().backward()
        weights = [weight.grad for weight in layers.parameters()]
        results.append([states.detach(), leaf.grad, *weights])
    for mine, theirs in zip(*results, strict=True):
        apart = float((mine - theirs).norm() / theirs.norm().clamp(min=1e-12))
        assert apart < 0.02, apart


def test_a_seed_repeats_its_dropout() -> None:
    lengths = [50, 40, 61]
    joined, packing = sides(lengths, 2, 32)[0].cuda(), on_gpu(lengths)
    torch.cuda.manual_seed(3)
    once, other = (fused([joined], packing, 2, 0.1) for _ in range(2))
    torch.cuda.manual_seed(3)
    assert torch.equal(fused([joined], packing, 2, 0.1), once)
    assert not torch.equal(once, other)
