"""Recurrent networks over packed rows, against PyTorch's own packing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from counterfoil.encoders.recurrent import run_gru, run_padded


def by_pytorch(rnn: nn.GRU, inputs: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(
        inputs, lengths.clamp(min=1), batch_first=True, enforce_sorted=False
    )
    return pad_packed_sequence(rnn(packed)[0], batch_first=True, total_length=inputs.shape[1])[0]


def assert_same_gradients(found: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    weights = torch.randn_like(found)
    mine = torch.autograd.grad((found * weights).sum(), leaves)
    theirs = torch.autograd.grad((expected * weights).sum(), leaves)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    spare=st.integers(0, 2),
    bidirectional=st.booleans(),
    layers=st.integers(1, 2),
)
def test_states_and_gradients_are_those_of_pytorchs_packing(
    lengths: list[int], spare: int, bidirectional: bool, layers: int
) -> None:
    torch.manual_seed(0)
    rnn = nn.GRU(3, 4, layers, batch_first=True, bidirectional=bidirectional).double()
    width = max(1, *lengths) + spare
    inputs = torch.randn(len(lengths), width, 3, dtype=torch.float64, requires_grad=True)
    result = run_gru(rnn, inputs, np.array(lengths))
    expected = by_pytorch(rnn, inputs, torch.tensor(lengths))
    assert torch.equal(result, expected)
    assert_same_gradients(result, expected, [inputs, *rnn.parameters()])


def test_what_lies_beyond_a_length_is_not_read() -> None:
    rnn = nn.GRU(2, 3, batch_first=True, bidirectional=True)
    inputs = torch.randn(2, 4, 2)
    lengths = np.array([2, 4])
    result = run_gru(rnn, inputs, lengths)
    inputs[0, 2:] = torch.nan
    assert torch.equal(run_gru(rnn, inputs, lengths), result)
    assert not result[0, 2:].any()


def test_the_network_must_take_the_inputs() -> None:
    with pytest.raises(RuntimeError):
        run_gru(nn.GRU(5, 3, batch_first=True), torch.randn(1, 2, 4), np.array([2]))


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    spare=st.integers(0, 2),
    bidirectional=st.booleans(),
    layers=st.integers(1, 2),
    bias=st.booleans(),
)
def test_padded_states_and_gradients_are_those_of_packed_ones(
    lengths: list[int], spare: int, bidirectional: bool, layers: int, bias: bool
) -> None:
    torch.manual_seed(0)
    rnn = nn.GRU(3, 4, layers, bias, batch_first=True, bidirectional=bidirectional).double()
    width = max(lengths) + spare
    inputs = torch.randn(len(lengths), width, 3, dtype=torch.float64)
    for row, length in enumerate(lengths):
        inputs[row, length:] = torch.nan  # which is not read
    inputs.requires_grad_()
    result = run_padded(rnn.all_weights, bidirectional, inputs, torch.tensor(lengths))
    expected = run_gru(rnn, inputs, np.array(lengths))
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    assert_same_gradients(result, expected, [inputs, *rnn.parameters()])
