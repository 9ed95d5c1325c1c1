"""A model that is asked, and not trained, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def asked(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in its mode of evaluation; afterwards in the one it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
