"""The compiled kernels of the gated update on a GPU against PyTorch in double precision."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.in_double import TOLERANCES
from tests.kernels.test_gated_update import CASES, assert_agree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", [*CASES, ((1, 40, 30, 1024), (36, 40, 30))])
def test_updates_and_gradients_are_pytorchs(case, dtype) -> None:
    assert_agree(case, dtype, "cuda")
