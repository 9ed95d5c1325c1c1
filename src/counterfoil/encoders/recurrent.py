"""GRUs over sequences of different lengths: packed, padded, or captured as CUDA graphs.

A GRU launches several kernels per word, forward and backward, and launching them takes longer than
running them. A CUDA graph captures them once per shape and launches them together. Captions are
padded to a few widths for it; results differ from packed ones by rounding.

A graph has one set of buffers, so only one forward pass can wait for its backward pass. Any other
forward pass meanwhile runs without the graph.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import PackedSequence

Weights = Sequence[Sequence[Tensor]]
"""Layout of `nn.GRU.all_weights`: one list per layer and direction."""

MAX_SCALED_GRADIENT = 2.0**-6
"""The largest gradient is scaled to this or just below.

The backward pass sums gradients over time and over all words of a batch, and float16 ends at
65,504. Its smallest number is 6e-8, so gradients down to a 250,000th of the largest survive.
"""

WIDTHS = 8
"""Captured widths are multiples of this: few graphs, little padding."""

MAX_CAPTURED_SHAPES = 16
"""Graphs per network; further shapes run without one."""

T = TypeVar("T")
_cuda_graphs: ContextVar[bool] = ContextVar("cuda_graphs", default=False)
Indices = NDArray[np.int64]


def run_padded(weights: Weights, both_ways: bool, inputs: Tensor, lengths: Tensor) -> Tensor:
    """States [B, W, directions·H] of a GRU over inputs [B, W, D]; zero beyond ``lengths`` [B].

    The kernels depend on shapes only, as a graph needs. For the backward direction each sequence
    is mirrored within its length, so that padding comes last; its states there are masked.
    """
    position = torch.arange(inputs.shape[1], device=inputs.device)
    inside = position < lengths[:, None]
    mirror = torch.where(inside, lengths[:, None] - 1 - position, position)[..., None]
    outside = ~inside[..., None]
    states = inputs.masked_fill(outside, 0.0)
    directions = 2 if both_ways else 1
    for layer in range(0, len(weights), directions):
        outputs = [_run_direction(weights[layer], states)]
        if both_ways:
            reverse = _run_direction(weights[layer + 1], _mirrored(states, mirror))
            outputs.append(_mirrored(reverse, mirror))
        states = torch.cat(outputs, -1)
    return states.masked_fill(outside, 0.0)


def _mirrored(states: Tensor, mirror: Tensor) -> Tensor:
    return states.gather(1, mirror.expand(-1, -1, states.shape[2]))


def _run_direction(weights: Sequence[Tensor], inputs: Tensor) -> Tensor:
    start = inputs.new_zeros(1, inputs.shape[0], weights[1].shape[1])
    biases = len(weights) > 2
    output = torch._VF.gru(inputs, start, list(weights), biases, 1, 0.0, True, False, True)
    states: Tensor = output[0]
    return states


class HalfRange:
    """A float16 section: inputs and weights `enter` it, results `leave` it.

    A backward pass is linear in the gradient that it starts from. So that gradient is scaled into
    the range of float16, and the results are scaled back. The scale is a power of two, computed in
    every pass from the largest gradient: it causes no rounding, no host sync and no tuning.

    >>> section, x = HalfRange(), torch.tensor([1.0], requires_grad=True)
    >>> (2.0**20 * section.leave(3 * section.enter(x))).backward()
    >>> x.grad.item() / 2.0**20
    3.0
    """

    def __init__(self) -> None:
        self.scale: Tensor | None = None

    def enter(self, x: Tensor) -> Tensor:
        """``x`` in float16; its gradient is unscaled and has the dtype of ``x``."""
        half: Tensor = _Enter.apply(self, x)
        return half

    def leave(self, x: Tensor) -> Tensor:
        """``x`` in float32; its gradient is scaled to float16."""
        single: Tensor = _Leave.apply(self, x)
        return single


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, section: HalfRange, x: Tensor) -> Tensor:
        ctx.section, ctx.dtype = section, x.dtype
        return x.half()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, (gradient.float() / ctx.section.scale).to(ctx.dtype)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, section: HalfRange, x: Tensor) -> Tensor:
        ctx.section = section
        return x.float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.section.scale = scale = power_of_two(gradient)
        return None, (gradient * scale).half()


def power_of_two(gradient: Tensor) -> Tensor:
    """The scale that brings the largest gradient to `MAX_SCALED_GRADIENT` or just below.

    1 if the largest is zero or not finite, so that a non-finite gradient stays visible.
    """
    largest = gradient.abs().amax()
    exponent = torch.floor(torch.log2(MAX_SCALED_GRADIENT / largest)).clamp(-120, 120)
    usable = torch.isfinite(largest) & (largest > 0)
    return torch.where(usable, torch.exp2(exponent), torch.ones_like(largest))


@contextmanager
def cuda_graphs(enabled: bool = True) -> Iterator[None]:
    """Inside, GRUs that train on a GPU run as CUDA graphs."""
    before = _cuda_graphs.set(enabled)
    try:
        yield
    finally:
        _cuda_graphs.reset(before)


def cuda_graphs_enabled() -> bool:
    return _cuda_graphs.get()


def captured_width(width: int) -> int:
    """The width that inputs are padded to for a graph."""
    return -(-width // WIDTHS) * WIDTHS


def run_captured(
    rnn: nn.GRU, inputs: Tensor, lengths: NDArray[np.int64], half: bool = False
) -> Tensor | None:
    """States [B, W, directions·H] for lengths above 0; None if no graph can run them.

    ``half``: compute in float16, which is faster in cuDNN, with gradients scaled into its range.
    """
    if not (_cuda_graphs.get() and inputs.is_cuda and torch.is_grad_enabled() and rnn.training):
        return None
    if not rnn.batch_first or (rnn.dropout and rnn.num_layers > 1) or rnn.proj_size:
        return None
    trained = [weight for weight in rnn.parameters() if weight.requires_grad]
    if not trained:
        return None
    graph = _graphs_of.setdefault(rnn, GraphsByShape()).find(rnn, inputs, half)
    if graph is None or not graph.is_free:
        return None
    states: Tensor = _Replay.apply(graph, lengths, inputs, *trained)
    return states


@dataclass(eq=False)
class PendingBackward:
    """A forward pass whose backward pass is pending, unless ``done``."""

    done: bool = False


class GraphsByShape:
    """The captured graphs of one network, by the shape of the inputs."""

    def __init__(self) -> None:
        self.pointers: tuple[int, ...] = ()
        self.by_shape: dict[tuple[Any, ...], CapturedGRU | None] = {}

    def find(self, rnn: nn.GRU, inputs: Tensor, half: bool) -> CapturedGRU | None:
        """The graph for such inputs, captured at the first batch, so that a resumed run is equal.

        None if there are too many graphs, or if capturing failed.
        """
        pointers = tuple(weight.data_ptr() for weight in rnn.parameters())
        if pointers != self.pointers:  # weights were moved; the graphs read the old memory
            self.pointers, self.by_shape = pointers, {}
        cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        frozen = tuple(weight.requires_grad for weight in rnn.parameters())
        shape = (len(inputs), captured_width(inputs.shape[1]), inputs.shape[2])
        key = (shape, inputs.dtype, inputs.device, inputs.requires_grad, cast, half, frozen)
        if key not in self.by_shape:
            if len(self.by_shape) >= MAX_CAPTURED_SHAPES:
                return None
            try:
                self.by_shape[key] = CapturedGRU(rnn, shape, inputs, half)
            except RuntimeError as error:  # for example, out of memory
                warnings.warn(f"not captured as a CUDA graph: {error}", stacklevel=2)
                self.by_shape[key] = None
        return self.by_shape[key]


_graphs_of: weakref.WeakKeyDictionary[nn.GRU, GraphsByShape] = weakref.WeakKeyDictionary()


class CapturedGRU:
    """A GRU over inputs of one shape: its forward and its backward pass, each as a CUDA graph."""

    def __init__(self, rnn: nn.GRU, shape: tuple[int, ...], like: Tensor, half: bool) -> None:
        # detached views of the weights: the model's own belong to other graphs and streams
        self.weights = [
            [weight.detach().requires_grad_(weight.requires_grad) for weight in direction]
            for direction in rnn.all_weights
        ]
        self.both_ways, self.half = rnn.bidirectional, half
        self.inputs = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.inputs.requires_grad_(like.requires_grad)
        self.lengths = torch.ones(shape[0], dtype=torch.long, device=like.device)
        self.pending: weakref.ref[PendingBackward] | None = None
        trained = [weight for part in self.weights for weight in part if weight.requires_grad]
        self.leaves = [*([self.inputs] if like.requires_grad else []), *trained]
        self.shapes = [weight.shape for weight in trained]
        self._capture()

    def _capture(self) -> None:
        device = self.inputs.device
        stream = _side_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(stream), torch.enable_grad(), _no_gc():
            for _ in range(2):  # warm-up, as capturing requires
                states = self._run()
                self.gradient = torch.zeros_like(states)
                torch.autograd.grad(states, self.leaves, self.gradient)
            torch.cuda.synchronize(device)
            self.forward_graph, self.states = _capture_graph(self._run, pool)
            self.backward_graph, gradients = _capture_graph(self._run_backward, pool)
            self.input_gradient, self.weight_gradients = gradients
            self.states = self.states.detach()
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)

    def _run(self) -> Tensor:
        if self.half:
            section = HalfRange()
            weights = [[section.enter(weight) for weight in part] for part in self.weights]
            inputs = section.enter(self.inputs)
            return section.leave(run_padded(weights, self.both_ways, inputs, self.lengths))
        # no cache of cast weights: every replay has to cast the current ones
        mixed = torch.is_autocast_enabled("cuda")
        with torch.autocast(
            "cuda", torch.get_autocast_dtype("cuda"), enabled=mixed, cache_enabled=False
        ):
            return run_padded(self.weights, self.both_ways, self.inputs, self.lengths)

    def _run_backward(self) -> tuple[Tensor | None, Tensor]:
        gradients = list(torch.autograd.grad(self.states, self.leaves, self.gradient))
        input_gradient = gradients.pop(0) if self.inputs.requires_grad else None
        return input_gradient, torch.cat([gradient.flatten() for gradient in gradients])

    @property
    def is_free(self) -> bool:
        """Whether no forward pass is waiting for its backward pass."""
        pending = self.pending() if self.pending is not None else None
        return pending is None or pending.done

    def forward(self, inputs: Tensor, lengths: NDArray[np.int64]) -> tuple[Tensor, PendingBackward]:
        pending = PendingBackward()
        self.pending = weakref.ref(pending)
        width = inputs.shape[1]
        self.inputs[:, :width].copy_(inputs)
        self.lengths.copy_(torch.from_numpy(lengths), non_blocking=True)
        self.forward_graph.replay()
        return self.states[:, :width].clone(), pending

    def backward(self, gradient: Tensor, pending: PendingBackward) -> list[Tensor | None]:
        if pending.done or self.pending is None or self.pending() is not pending:
            raise RuntimeError(
                "a CUDA graph runs backward once per forward pass, and only after the latest one "
                "(train.cuda_graphs=false uses no graphs)"
            )
        width = gradient.shape[1]
        self.gradient[:, :width].copy_(gradient)
        self.backward_graph.replay()
        pending.done = True
        of_inputs = self.input_gradient
        of_inputs = of_inputs[:, :width].clone() if of_inputs is not None else None
        parts = self.weight_gradients.clone().split([shape.numel() for shape in self.shapes])
        of_weights = [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
        return [of_inputs, *of_weights]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, graph: CapturedGRU, lengths: NDArray[np.int64], inputs: Tensor, *_: Tensor
    ) -> Tensor:
        states, ctx.pending = graph.forward(inputs, lengths)
        ctx.graph = graph
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.graph.backward(gradient, ctx.pending)


@contextmanager
def _no_gc() -> Iterator[None]:
    """No garbage collection while capturing, and no warning about non-contiguous weights."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the graph itself copies them to contiguous memory
            yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which graphs are captured; one per device, so that workspaces are shared."""
    return torch.cuda.Stream(device)


def _capture_graph(run: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """The kernels that a function launches, as a graph; other threads may use the GPU meanwhile."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        result = run()
    finally:
        graph.capture_end()
    return graph, result


def run_gru(rnn: nn.GRU, inputs: Tensor, lengths: Indices) -> Tensor:
    """States [B, W, directions·H] over the first ``lengths`` [B] of inputs [B, W, D]; zero beyond.

    A length of 0 counts as 1. Lengths are on the host. PyTorch's own packing copies step by step,
    some hundred launches per batch; here one index packs the rows and one unpacks them. Training
    on a GPU uses `run_captured`.

    With autocast to bfloat16 this runs in float32: cuDNN has no recurrent networks in bfloat16, and
    PyTorch's autocast would use float16, in which the gradients of summed losses can overflow.
    CUDA graphs do use float16, with gradients scaled into its range (`HalfRange`).
    """
    mixed = inputs.is_cuda and torch.is_autocast_enabled("cuda")
    if mixed and torch.get_autocast_dtype("cuda") == torch.bfloat16:
        with torch.autocast("cuda", enabled=False):
            return _run_gru(rnn, inputs.float(), lengths, half=True)
    return _run_gru(rnn, inputs, lengths, half=False)


def _run_gru(rnn: nn.GRU, inputs: Tensor, lengths: Indices, half: bool) -> Tensor:
    lengths = np.maximum(lengths, 1)
    captured = run_captured(rnn, inputs, lengths, half)
    if captured is not None:
        return captured
    rows, counts = _packed_rows(lengths, inputs.shape[1])
    index = torch.from_numpy(rows).to(inputs.device, non_blocking=True)
    flat = inputs.flatten(0, 1)
    packed = PackedSequence(flat.index_select(0, index), torch.from_numpy(counts))
    states: Tensor = rnn(packed)[0].data
    out = states.new_zeros(len(flat), states.shape[1]).index_copy(0, index, states)
    return out.view(*inputs.shape[:2], -1)


def _packed_rows(sizes: Indices, width: int) -> tuple[Indices, Indices]:
    """Row indices into [B·W, D] in packed order, and the batch size of each time step.

    >>> rows, counts = _packed_rows(np.array([1, 3]), 3)
    >>> rows.tolist(), counts.tolist()
    ([3, 0, 4, 5], [2, 1, 1])
    """
    order = np.argsort(-sizes, kind="stable")
    steps = np.arange(sizes.max(initial=0))[:, None]
    active = steps < sizes[order]
    return (order * width + steps)[active], active.sum(1)
