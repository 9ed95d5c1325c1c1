"""Temporarily switch a module to eval mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Trained(Protocol):
    """A module that trains and evaluates, such as any `nn.Module`."""

    training: bool

    def train(self, mode: bool = True) -> Any: ...


@contextmanager
def asked(model: Trained) -> Iterator[None]:
    """Inside, the model is in its mode of evaluation; afterwards in the one it was in."""
    was_training = model.training
    model.train(False)
    try:
        yield
    finally:
        model.train(was_training)
