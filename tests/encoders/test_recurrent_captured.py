"""Recurrent networks as recorded graphs: the same states and gradients, whoever comes between."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from counterfoil.encoders.pooling import GPO
from counterfoil.encoders.recurrent import (
    MAX_CAPTURED_SHAPES,
    _graphs_of,
    captured_width,
    cuda_graphs,
    run_captured,
    run_gru,
)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are CUDA's")


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """Products in full precision: rounded ones differ by more than what is to be seen."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def network(layers: int = 1, both_ways: bool = True) -> nn.GRU:
    torch.manual_seed(0)
    return nn.GRU(6, 16, layers, batch_first=True, bidirectional=both_ways).to("cuda")


def sentences(lengths: list[int], spare: int = 0) -> tuple[Tensor, np.ndarray]:
    inputs = torch.randn(len(lengths), max(lengths) + spare, 6, device="cuda", requires_grad=True)
    return inputs, np.array(lengths)


def gradients(rnn: nn.GRU, inputs: Tensor, states: Tensor) -> list[Tensor]:
    weights = torch.cos(torch.arange(states.numel(), device=states.device)).view_as(states)
    return list(torch.autograd.grad((states * weights).sum(), [inputs, *rnn.parameters()]))


def same(found: list[Tensor], expected: list[Tensor], within: float = 1e-4) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=within, atol=within)


def test_widths_are_few() -> None:
    assert [captured_width(width) for width in (1, 8, 9, 36)] == [8, 8, 16, 40]


def test_elsewhere_nothing_is_recorded() -> None:
    rnn = nn.GRU(3, 4, batch_first=True)
    inputs = torch.randn(2, 5, 3)
    expected = run_gru(rnn, inputs, np.array([5, 2]))
    with cuda_graphs():
        assert run_captured(rnn, inputs, np.array([5, 2])) is None
        assert torch.equal(run_gru(rnn, inputs, np.array([5, 2])), expected)


@pytest.mark.parametrize("lengths", [[3, 1, 12], [4, 0, 2]])
def test_weights_of_gpo_are_the_same_for_all_lengths_at_once(lengths: list[int]) -> None:
    gpo = GPO(5)
    expected = gpo.weights(np.array(lengths), 13)
    with cuda_graphs():
        result = gpo.weights(np.array(lengths), 13)
    assert result.shape == (3, 13)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-7)


def test_what_evaluation_asked_for_first_can_be_trained_with() -> None:
    gpo = GPO(5)
    with torch.inference_mode():
        gpo.weights(np.array([3, 11]), 11)
    gpo.weights(np.array([3, 11]), 11).sum().backward()
    assert gpo.linear.weight.grad is not None


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("half", [None, torch.bfloat16, torch.float16])
def test_states_and_gradients_are_those_of_packed_words(layers, both_ways, half) -> None:
    rnn = network(layers, both_ways)
    with torch.autocast("cuda", half, enabled=half is not None):
        for lengths, spare in (([3, 1, 7], 0), ([8, 2, 2], 3), ([5, 6, 1], 0), ([3, 9, 8], 0)):
            inputs, sizes = sentences(lengths, spare)
            expected = run_gru(rnn, inputs, sizes)
            theirs = gradients(rnn, inputs, expected.float())
            with cuda_graphs():
                result = run_gru(rnn, inputs, sizes)
            assert type(result.grad_fn).__name__ == "_ReplayBackward"
            assert result.dtype == expected.dtype
            mine = gradients(rnn, inputs, result.float())
            same([result, *mine], [expected, *theirs], 1e-4 if half is None else 5e-2)
    assert len(_graphs_of[rnn].by_shape) == 2


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("factor", [1e7, 1e-9])
def test_gradients_beyond_what_float16_can_say_are_kept_in_bfloat16(recorded, factor) -> None:
    rnn = network()
    inputs, sizes = sentences([3, 9, 8])
    expected = gradients(rnn, inputs, run_gru(rnn, inputs, sizes))
    with torch.autocast("cuda", torch.bfloat16), cuda_graphs(recorded):
        result = gradients(rnn, inputs, factor * run_gru(rnn, inputs, sizes).float())
    same([one / factor for one in result], expected, 1e-2 if recorded else 1e-3)


@needs_gpu
@pytest.mark.gpu
def test_a_pass_that_waits_for_its_gradient_is_left_alone() -> None:
    rnn = network()
    first, sizes = sentences([3, 7])
    second, _ = sentences([3, 7])
    plain = [run_gru(rnn, x, sizes) for x in (first, second)]
    expected = [gradients(rnn, x, y) for x, y in zip((first, second), plain, strict=True)]
    with cuda_graphs():
        result = [run_gru(rnn, x, sizes) for x in (first, second)]
        name = type(result[1].grad_fn).__name__
        assert type(result[0].grad_fn).__name__ == "_ReplayBackward" != name
        for x, y, theirs in zip((first, second), result, expected, strict=True):
            same(gradients(rnn, x, y), theirs)
        dropped = run_gru(rnn, first, sizes)
        assert type(dropped.grad_fn).__name__ == "_ReplayBackward"
        del dropped  # without a backward pass
        assert type(run_gru(rnn, first, sizes).grad_fn).__name__ == "_ReplayBackward"


@needs_gpu
@pytest.mark.gpu
def test_weights_may_change_and_gradients_add_up() -> None:
    rnn = network()
    other = copy.deepcopy(rnn)
    for step in range(3):
        inputs, sizes = sentences([4, 2 + step])
        for net, recorded in ((rnn, True), (other, False)):
            with cuda_graphs(recorded):
                for _ in range(2):  # gradients of two batches in one update
                    run_gru(net, inputs, sizes).square().sum().backward()
            with torch.no_grad():
                for weight in net.parameters():
                    weight -= 0.01 * weight.grad
                    weight.grad = None
    same(list(rnn.parameters()), list(other.parameters()))


@needs_gpu
@pytest.mark.gpu
def test_weights_that_moved_are_recorded_again() -> None:
    rnn = network()
    inputs, sizes = sentences([4, 2])
    with cuda_graphs():
        run_gru(rnn, inputs, sizes)
        rnn.weight_ih_l0.data = rnn.weight_ih_l0.data * 2
        result = run_gru(rnn, inputs, sizes)
    same([result], [run_gru(rnn, inputs, sizes)])


@needs_gpu
@pytest.mark.gpu
def test_a_gradient_asked_for_too_late_is_refused() -> None:
    rnn = network()
    inputs, sizes = sentences([4, 2])
    with cuda_graphs():
        loss = run_gru(rnn, inputs, sizes).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="once per forward pass"):
            loss.backward(retain_graph=True)
        other = run_gru(rnn, inputs, sizes).sum()
        with pytest.raises(RuntimeError, match="once per forward pass"):
            loss.backward()
        other.backward()


@needs_gpu
@pytest.mark.gpu
def test_so_many_shapes_and_no_more() -> None:
    rnn = network()
    with cuda_graphs():
        for count in range(1, MAX_CAPTURED_SHAPES + 4):
            inputs, sizes = sentences([3] * count)
            same([run_gru(rnn, inputs, sizes)], [_packed(rnn, inputs, sizes)])
    assert len(_graphs_of[rnn].by_shape) == MAX_CAPTURED_SHAPES


def _packed(rnn: nn.GRU, inputs: Tensor, sizes: np.ndarray) -> Tensor:
    with cuda_graphs(False):
        return run_gru(rnn, inputs, sizes)
