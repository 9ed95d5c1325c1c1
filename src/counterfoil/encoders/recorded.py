"""Recurrent networks in training as recorded CUDA graphs: two launches instead of many hundred.

A GRU launches some kernels for every word, forward and backward, and a host needs longer to launch
them than a GPU to run them. A graph records them once for a shape and launches all together. For
that, captions are padded to a few widths (`padded`); results differ from packed ones by rounding.

A recording has one set of buffers, so one forward pass at a time may wait for its backward pass;
another meanwhile is not recorded but run as ever.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
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

from counterfoil.encoders.half_range import HalfRange
from counterfoil.encoders.padded import run_padded

WIDTHS = 8
"""Widths are multiples of it: few enough to record, near enough to what is needed."""

MOST = 16
"""Recordings of one network; shapes beyond that are run as they come."""

T = TypeVar("T")

_replaying: ContextVar[bool] = ContextVar("replaying", default=False)


@contextmanager
def replaying(wanted: bool = True) -> Iterator[None]:
    """Within it, networks that train on a GPU are recorded and replayed."""
    before = _replaying.set(wanted)
    try:
        yield
    finally:
        _replaying.reset(before)


def is_replaying() -> bool:
    return _replaying.get()


def replay_width(width: int) -> int:
    """The width that inputs are padded to."""
    return -(-width // WIDTHS) * WIDTHS


def replayed(
    rnn: nn.GRU, inputs: Tensor, lengths: NDArray[np.int64], half: bool = False
) -> Tensor | None:
    """States [B, W, directions·H] for lengths above 0; None where it is not for a recording.

    ``half``: computed in float16, which cuDNN does faster, with gradients scaled into its range.
    """
    if not (_replaying.get() and inputs.is_cuda and torch.is_grad_enabled() and rnn.training):
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
class Lease:
    """A forward pass whose backward pass is still to come, unless ``done``."""

    done: bool = False


class Recordings:
    """What was recorded of one network, by shape."""

    def __init__(self) -> None:
        self.pointers: tuple[int, ...] = ()
        self.by_shape: dict[tuple[Any, ...], Recording | None] = {}

    def of(self, rnn: nn.GRU, inputs: Tensor, half: bool) -> Recording | None:
        """The recording for such inputs, made at first sight: a run resumed does as it did."""
        pointers = tuple(weight.data_ptr() for weight in rnn.parameters())
        if pointers != self.pointers:  # weights lie elsewhere: what was recorded reads the old ones
            self.pointers, self.by_shape = pointers, {}
        cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        frozen = tuple(weight.requires_grad for weight in rnn.parameters())
        shape = (len(inputs), replay_width(inputs.shape[1]), inputs.shape[2])
        key = (shape, inputs.dtype, inputs.device, inputs.requires_grad, cast, half, frozen)
        if key not in self.by_shape:
            if len(self.by_shape) >= MOST:
                return None
            try:
                self.by_shape[key] = Recording(rnn, shape, inputs, half)
            except RuntimeError as error:  # too little memory, say
                warnings.warn(f"not recorded as a CUDA graph: {error}", stacklevel=2)
                self.by_shape[key] = None
        return self.by_shape[key]


_of_network: weakref.WeakKeyDictionary[nn.GRU, Recordings] = weakref.WeakKeyDictionary()


def _recordings(rnn: nn.GRU) -> Recordings:
    return _of_network.setdefault(rnn, Recordings())


class Recording:
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
        self.lease: weakref.ref[Lease] | None = None
        trained = [weight for way in self.weights for weight in way if weight.requires_grad]
        self.leaves = [*([self.inputs] if like.requires_grad else []), *trained]
        self.shapes = [weight.shape for weight in trained]
        self._record()

    def _record(self) -> None:
        device = self.inputs.device
        stream = _side_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(stream), torch.enable_grad(), _in_peace():
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
        lease = self.lease() if self.lease is not None else None
        return lease is None or lease.done

    def forward(self, inputs: Tensor, lengths: NDArray[np.int64]) -> tuple[Tensor, Lease]:
        lease = Lease()
        self.lease = weakref.ref(lease)
        width = inputs.shape[1]
        self.inputs[:, :width].copy_(inputs)
        self.lengths.copy_(torch.from_numpy(lengths), non_blocking=True)
        self.onward.replay()
        return self.states[:, :width].clone(), lease

    def backward(self, gradient: Tensor, lease: Lease) -> list[Tensor | None]:
        if lease.done or self.lease is None or self.lease() is not lease:
            raise RuntimeError(
                "a recorded pass goes backward once, and not after another went forward "
                "(train.graphs=false records none)"
            )
        width = gradient.shape[1]
        self.gradient[:, :width].copy_(gradient)
        self.back.replay()
        lease.done = True
        of_inputs = self.of_inputs[:, :width].clone() if self.of_inputs is not None else None
        parts = self.of_weights.clone().split([shape.numel() for shape in self.shapes])
        of_weights = [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
        return [of_inputs, *of_weights]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, recording: Recording, lengths: NDArray[np.int64], inputs: Tensor, *_: Tensor
    ) -> Tensor:
        states, ctx.lease = recording.forward(inputs, lengths)
        ctx.recording = recording
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.recording.backward(gradient, ctx.lease)


@contextmanager
def _in_peace() -> Iterator[None]:
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
