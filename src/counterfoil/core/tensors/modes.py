"""Temporarily switch to eval mode, to operations that can be exported, or to other kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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


def uncompiled(*modules: Any) -> AbstractContextManager[None]:
    """Inside, modules that `nn.Module.compile` compiled run as they are written.

    What is compiled for a training step does not fit tensors of inference mode, and to compile it
    again for them takes longer than it saves. If nothing is compiled, nothing is changed: PyTorch's
    stance is one for all threads.
    """
    if all(getattr(module, "_compiled_call_impl", None) is None for module in modules):
        return nullcontext()
    import torch

    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def attention_without_cudnn() -> AbstractContextManager[None]:
    """Inside, `scaled_dot_product_attention` does not use cuDNN.

    cuDNN builds a plan for every new shape, and its gradients can be wrong where a mask is given.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(backends)
