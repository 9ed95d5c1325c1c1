"""Recurrent networks over sequences of unlike lengths: packed, padded, or as CUDA graphs.

A GRU launches some kernels for every word, forward and backward, and a host needs longer to launch
them than a GPU to run them. A graph records them once for a shape and launches all together. For
that, captions are padded to a few widths; results differ from packed ones by rounding.

A recording has one set of buffers, so one forward pass at a time may wait for its backward pass;
another meanwhile is not recorded but run as ever.
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
"""As `nn.GRU.all_weights` has them: of each layer, and in it of each direction."""

MAX_SCALED_GRADIENT = 2.0**-6
"""What the largest gradient is scaled below.

Within, gradients are summed over time and over all words of a batch: float16 ends at 65,504. Its
smallest numbers are 6e-8, so gradients down to a 250,000th of the largest one still count.
"""

WIDTHS = 8
"""Widths are multiples of it: few enough to record, near enough to what is needed."""

MAX_CAPTURED_SHAPES = 16
"""Recordings of one network; shapes beyond that are run as they come."""

T = TypeVar("T")
_cuda_graphs: ContextVar[bool] = ContextVar("cuda_graphs", default=False)
Indices = NDArray[np.int64]


# Over padded sequences, what is launched depends on shapes alone.
def run_padded(weights: Weights, both_ways: bool, inputs: Tensor, lengths: Tensor) -> Tensor:
    """States [B, W, directions·H] of a GRU over inputs [B, W, D]; zero beyond ``lengths`` [B].

    The way back begins at the last word of each sequence, which is mirrored for it, and goes on
    into the padding, where nobody looks.
    """
    place = torch.arange(inputs.shape[1], device=inputs.device)
    inside = place < lengths[:, None]
    mirror = torch.where(inside, lengths[:, None] - 1 - place, place)[..., None]
    outside = ~inside[..., None]
    states = inputs.masked_fill(outside, 0.0)
    directions = 2 if both_ways else 1
    for layer in range(0, len(weights), directions):
        ways = [_one_way(weights[layer], states)]
        if both_ways:
            ways.append(_turned(_one_way(weights[layer + 1], _turned(states, mirror)), mirror))
        states = torch.cat(ways, -1)
    return states.masked_fill(outside, 0.0)


def _turned(states: Tensor, mirror: Tensor) -> Tensor:
    return states.gather(1, mirror.expand(-1, -1, states.shape[2]))


def _one_way(weights: Sequence[Tensor], inputs: Tensor) -> Tensor:
    start = inputs.new_zeros(1, inputs.shape[0], weights[1].shape[1])
    biases = len(weights) > 2
    found: Tensor = torch._VF.gru(inputs, start, list(weights), biases, 1, 0.0, True, False, True)[
        0
    ]
    return found


# Half precision, with gradients that neither overflow nor vanish. A backward pass is linear in
# the gradient that it starts from, so that gradient may be scaled into the range of float16 and
# the results scaled back. The scale is a power of two, found anew in every pass from the largest
# gradient: nothing is rounded by it, no host has to wait, and no loss scale has to be tuned.
class HalfRange:
    """One stretch of half precision: its inputs and weights `enter` it, its results `leave` it.

    >>> stretch, x = HalfRange(), torch.tensor([1.0], requires_grad=True)
    >>> (2.0**20 * stretch.leave(3 * stretch.enter(x))).backward()
    >>> x.grad.item() / 2.0**20
    3.0
    """

    def __init__(self) -> None:
        self.scale: Tensor | None = None

    def enter(self, x: Tensor) -> Tensor:
        """In float16; its gradient comes back in the precision of ``x``, unscaled."""
        entered: Tensor = _Enter.apply(self, x)
        return entered

    def leave(self, x: Tensor) -> Tensor:
        """In single precision; the gradient that comes back is scaled."""
        left: Tensor = _Leave.apply(self, x)
        return left


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stretch: HalfRange, x: Tensor) -> Tensor:
        ctx.stretch, ctx.dtype = stretch, x.dtype
        return x.half()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, (gradient.float() / ctx.stretch.scale).to(ctx.dtype)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stretch: HalfRange, x: Tensor) -> Tensor:
        ctx.stretch = stretch
        return x.float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.stretch.scale = scale = power_of_two(gradient)
        return None, (gradient * scale).half()


def power_of_two(gradient: Tensor) -> Tensor:
    """The scale that brings the largest gradient to `MAX_SCALED_GRADIENT` or just below.

    One where there is none: a gradient that is not finite stays so, and is seen.
    """
    largest = gradient.abs().amax()
    exponent = torch.floor(torch.log2(MAX_SCALED_GRADIENT / largest)).clamp(-120, 120)
    usable = torch.isfinite(largest) & (largest > 0)
    return torch.where(usable, torch.exp2(exponent), torch.ones_like(largest))


@contextmanager
def cuda_graphs(wanted: bool = True) -> Iterator[None]:
    """Within it, networks that train on a GPU are recorded and replayed."""
    before = _cuda_graphs.set(wanted)
    try:
        yield
    finally:
        _cuda_graphs.reset(before)


def cuda_graphs_enabled() -> bool:
    return _cuda_graphs.get()


def captured_width(width: int) -> int:
    """The width that inputs are padded to."""
    return -(-width // WIDTHS) * WIDTHS


def run_captured(
    rnn: nn.GRU, inputs: Tensor, lengths: NDArray[np.int64], half: bool = False
) -> Tensor | None:
    """States [B, W, directions·H] for lengths above 0; None where it is not for a recording.

    ``half``: computed in float16, which cuDNN does faster, with gradients scaled into its range.
    """
    if not (_cuda_graphs.get() and inputs.is_cuda and torch.is_grad_enabled() and rnn.training):
        return None
    if not rnn.batch_first or (rnn.dropout and rnn.num_layers > 1) or rnn.proj_size:
        return None
    trained = [weight for weight in rnn.parameters() if weight.requires_grad]
    if not trained:
        return None
    recording = _recordings(rnn).of(rnn, inputs, half)
    if recording is None or not recording.free:
        return None
    states: Tensor = _Replay.apply(recording, lengths, inputs, *trained)
    return states


@dataclass(eq=False)
class PendingBackward:
    """A forward pass whose backward pass is still to come, unless ``done``."""

    done: bool = False


class Recordings:
    """What was recorded of one network, by shape."""

    def __init__(self) -> None:
        self.pointers: tuple[int, ...] = ()
        self.by_shape: dict[tuple[Any, ...], CapturedGRU | None] = {}

    def of(self, rnn: nn.GRU, inputs: Tensor, half: bool) -> CapturedGRU | None:
        """The recording for such inputs, made at first sight: a run resumed does as it did."""
        pointers = tuple(weight.data_ptr() for weight in rnn.parameters())
        if pointers != self.pointers:  # weights lie elsewhere: what was recorded reads the old ones
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
            except RuntimeError as error:  # too little memory, say
                warnings.warn(f"not recorded as a CUDA graph: {error}", stacklevel=2)
                self.by_shape[key] = None
        return self.by_shape[key]


_of_network: weakref.WeakKeyDictionary[nn.GRU, Recordings] = weakref.WeakKeyDictionary()


def _recordings(rnn: nn.GRU) -> Recordings:
    return _of_network.setdefault(rnn, Recordings())


class CapturedGRU:
    """A network over inputs of one shape: its forward and its backward pass, each a graph."""

    def __init__(self, rnn: nn.GRU, shape: tuple[int, ...], like: Tensor, half: bool) -> None:
        # other tensors over the same weights: those of the model belong to other graphs and streams
        self.weights = [
            [weight.detach().requires_grad_(weight.requires_grad) for weight in way]
            for way in rnn.all_weights
        ]
        self.both_ways, self.half = rnn.bidirectional, half
        self.inputs = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.inputs.requires_grad_(like.requires_grad)
        self.lengths = torch.ones(shape[0], dtype=torch.long, device=like.device)
        self.pending: weakref.ref[PendingBackward] | None = None
        trained = [weight for way in self.weights for weight in way if weight.requires_grad]
        self.leaves = [*([self.inputs] if like.requires_grad else []), *trained]
        self.shapes = [weight.shape for weight in trained]
        self._record()

    def _record(self) -> None:
        device = self.inputs.device
        stream = _side_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(stream), torch.enable_grad(), _no_gc():
            for _ in range(2):
                states = self._run()
                self.gradient = torch.zeros_like(states)
                torch.autograd.grad(states, self.leaves, self.gradient)
            torch.cuda.synchronize(device)
            self.onward, self.states = _captured(self._run, pool)
            self.back, (self.of_inputs, self.of_weights) = _captured(self._run_back, pool)
            self.states = self.states.detach()
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)

    def _run(self) -> Tensor:
        if self.half:
            stretch = HalfRange()
            weights = [[stretch.enter(weight) for weight in way] for way in self.weights]
            inputs = stretch.enter(self.inputs)
            return stretch.leave(run_padded(weights, self.both_ways, inputs, self.lengths))
        # without a cache of weights that were cast for an earlier pass: they have to be cast anew
        mixed = torch.is_autocast_enabled("cuda")
        with torch.autocast(
            "cuda", torch.get_autocast_dtype("cuda"), enabled=mixed, cache_enabled=False
        ):
            return run_padded(self.weights, self.both_ways, self.inputs, self.lengths)

    def _run_back(self) -> tuple[Tensor | None, Tensor]:
        found = torch.autograd.grad(self.states, self.leaves, self.gradient)
        of_inputs = found[0] if self.inputs.requires_grad else None
        of_weights = found[1:] if self.inputs.requires_grad else found
        return of_inputs, torch.cat([gradient.flatten() for gradient in of_weights])

    @property
    def free(self) -> bool:
        pending = self.pending() if self.pending is not None else None
        return pending is None or pending.done

    def forward(self, inputs: Tensor, lengths: NDArray[np.int64]) -> tuple[Tensor, PendingBackward]:
        pending = PendingBackward()
        self.pending = weakref.ref(pending)
        width = inputs.shape[1]
        self.inputs[:, :width].copy_(inputs)
        self.lengths.copy_(torch.from_numpy(lengths), non_blocking=True)
        self.onward.replay()
        return self.states[:, :width].clone(), pending

    def backward(self, gradient: Tensor, pending: PendingBackward) -> list[Tensor | None]:
        if pending.done or self.pending is None or self.pending() is not pending:
            raise RuntimeError(
                "a recorded pass goes backward once, and not after another went forward "
                "(train.cuda_graphs=false records none)"
            )
        width = gradient.shape[1]
        self.gradient[:, :width].copy_(gradient)
        self.back.replay()
        pending.done = True
        of_inputs = self.of_inputs[:, :width].clone() if self.of_inputs is not None else None
        parts = self.of_weights.clone().split([shape.numel() for shape in self.shapes])
        of_weights = [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
        return [of_inputs, *of_weights]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, recording: CapturedGRU, lengths: NDArray[np.int64], inputs: Tensor, *_: Tensor
    ) -> Tensor:
        states, ctx.pending = recording.forward(inputs, lengths)
        ctx.recording = recording
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.recording.backward(gradient, ctx.pending)


@contextmanager
def _no_gc() -> Iterator[None]:
    """No cycle is collected while a graph is recorded, and no word said of weights in pieces."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are put together as a part of the graph
            yield
    finally:
        if collects:
            gc.enable()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Where graphs are recorded; one, so that what it needs on the way is needed once."""
    return torch.cuda.Stream(device)


def _captured(run: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """What a function launches, as a graph; other threads may use the GPU meanwhile."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        result = run()
    finally:
        graph.capture_end()
    return graph, result


def run_gru(rnn: nn.GRU, inputs: Tensor, lengths: Indices) -> Tensor:
    """States [B, W, directions·H] over the first ``lengths`` [B] of inputs [B, W, D]; zero beyond.

    A length of 0 counts as 1. Lengths are the host's, which has to know them. PyTorch's own packing
    copies step by step, both ways, which on a GPU is some hundred launches a batch; here rows are
    picked and put back by one index. In training on a GPU the whole of it is `run_captured`.

    With autocast to bfloat16 on a GPU, this is in single precision: cuDNN has no recurrent networks
    in bfloat16, and PyTorch's autocast takes float16 for them, in which a gradient of more than
    65,504 is infinite. Losses that are summed over pairs come to such gradients. What is replayed
    is in float16 all the same, with gradients that are scaled into its range (`HalfRange`).
    """
    mixed = inputs.is_cuda and torch.is_autocast_enabled("cuda")
    if mixed and torch.get_autocast_dtype("cuda") == torch.bfloat16:
        with torch.autocast("cuda", enabled=False):
            return _run_gru(rnn, inputs.float(), lengths, half=True)
    return _run_gru(rnn, inputs, lengths, half=False)


def _run_gru(rnn: nn.GRU, inputs: Tensor, lengths: Indices, half: bool) -> Tensor:
    lengths = np.maximum(lengths, 1)
    found = run_captured(rnn, inputs, lengths, half)
    if found is not None:
        return found
    rows, counts = _packed_rows(lengths, inputs.shape[1])
    at = torch.from_numpy(rows).to(inputs.device, non_blocking=True)
    flat = inputs.flatten(0, 1)
    packed = PackedSequence(flat.index_select(0, at), torch.from_numpy(counts))
    states: Tensor = rnn(packed)[0].data
    out = states.new_zeros(len(flat), states.shape[1]).index_copy(0, at, states)
    return out.view(*inputs.shape[:2], -1)


def _packed_rows(sizes: Indices, width: int) -> tuple[Indices, Indices]:
    """Rows of [B·W, D] step by step, the longest sequence first, and how many go on at each step.

    >>> rows, counts = _packed_rows(np.array([1, 3]), 3)
    >>> rows.tolist(), counts.tolist()
    ([3, 0, 4, 5], [2, 1, 1])
    """
    order = np.argsort(-sizes, kind="stable")
    steps = np.arange(sizes.max(initial=0))[:, None]
    going = steps < sizes[order]
    return (order * width + steps)[going], going.sum(1)
