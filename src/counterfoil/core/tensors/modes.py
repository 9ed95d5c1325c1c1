"""Temporarily switch to eval mode, to operations that can be exported, or to other kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

_exporting: ContextVar[bool] = ContextVar("exporting", default=False)


class Trained(Protocol):
    """A module that trains and evaluates, such as any `nn.Module`."""

    training: bool

    def train(self, mode: bool = True) -> Any: ...


@contextmanager
def eval_mode(model: Trained) -> Iterator[None]:
    """Inside, the model is in eval mode; afterwards its mode is restored."""
    was_training = model.training
    model.train(False)
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def exporting() -> Iterator[None]:
    """Inside, models use padded tensors only, as an exported graph cannot read host values."""
    before = _exporting.set(True)
    try:
        yield
    finally:
        _exporting.reset(before)


def is_exporting() -> bool:
    return _exporting.get()


def attention_without_cudnn() -> AbstractContextManager[None]:
    """Inside, `scaled_dot_product_attention` does not use cuDNN.

    cuDNN builds a plan for every new shape, and its gradients can be wrong where a mask is given.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(backends)
