"""Half precision in between: gradients of any size come through, and faults stay visible."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from counterfoil.encoders.recurrent import MAX_SCALED_GRADIENT, HalfRange, power_of_two


def gradient_of(factor: float) -> tuple[Tensor, Tensor]:
    """Of weights behind and before a tanh: through half precision, and through single."""
    torch.manual_seed(0)
    result = []
    inputs, first, second = torch.randn(5, 7), torch.randn(7, 8), torch.randn(8, 3)
    for half in (True, False):
        stretch, weight = HalfRange(), first.clone().requires_grad_()
        given = [inputs, weight, second]
        x, u, v = [stretch.enter(one) for one in given] if half else given
        states = torch.tanh(x @ u) @ v
        (factor * (stretch.leave(states) if half else states)).square().sum().backward()
        result.append(weight.grad)
    return result[0], result[1]


@pytest.mark.parametrize("factor", [1e-12, 1e-6, 1.0, 1e6, 1e12])
def test_gradients_of_any_size_come_through(factor) -> None:
    half, single = gradient_of(factor)
    assert single.abs().max() > 0
    torch.testing.assert_close(half, single, rtol=0, atol=1e-2 * float(single.abs().max()))


def test_a_gradient_that_is_not_finite_stays_so() -> None:
    for bad in (torch.inf, torch.nan):
        stretch, x = HalfRange(), torch.ones(2, requires_grad=True)
        (stretch.leave(stretch.enter(x)) * torch.tensor([bad, 1.0])).sum().backward()
        assert not torch.isfinite(x.grad).all()


@pytest.mark.parametrize("largest", [1e-30, 3e-4, MAX_SCALED_GRADIENT, 1.0, 7e4, 1e30])
def test_the_largest_gradient_is_scaled_to_the_same_size(largest) -> None:
    scale = power_of_two(torch.tensor([0.0, -largest]))
    assert MAX_SCALED_GRADIENT / 2 < scale * largest <= MAX_SCALED_GRADIENT
    assert torch.frexp(scale)[0] == 0.5  # a power of two: scaling rounds nothing


def test_no_gradient_at_all_is_no_fault() -> None:
    assert power_of_two(torch.zeros(3)) == 1
