"""The compiled kernels of weighted sums on a GPU against PyTorch in double precision."""

from __future__ import annotations

import pytest
import torch

from counterfoil.kernels.weighted_sums import weighted_sums
from tests.kernels.in_double import TOLERANCES
from tests.kernels.test_weighted_sums import CASES, assert_agree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LARGE = [((16, 128, 14, 128, 40), (1, 128, 14, 128, 40)), ((128, 1792, 16, 36), (128, 1792, 1, 36))]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", CASES)
def test_sums_and_gradients_are_pytorchs(case, dtype) -> None:
    assert_agree(case, dtype, "cuda")


@pytest.mark.parametrize("case", LARGE)
def test_those_of_a_batch_of_gsmn(case) -> None:
    """Sums of a hundred million products, in bfloat16 beside single precision."""
    values = torch.randn(*case[0], device="cuda", dtype=torch.bfloat16).requires_grad_()
    weights = torch.rand(*case[1], device="cuda").requires_grad_()
    above = torch.randn(*case[0][:-1], device="cuda")
    sums = weighted_sums(values, weights)
    fused = [sums, *torch.autograd.grad(sums, (values, weights), above)]
    single = values.detach().float().requires_grad_()
    plain = (single * weights).sum(-1)
    by_pytorch = [plain, *torch.autograd.grad(plain, (single, weights), above)]
    for mine, theirs in zip(fused, by_pytorch, strict=True):
        scale = float(theirs.abs().amax())
        tolerance = 4e-3 if mine.dtype == torch.bfloat16 else 2e-6
        assert torch.allclose(mine.float(), theirs, atol=tolerance * scale)
