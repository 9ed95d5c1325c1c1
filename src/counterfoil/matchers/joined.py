"""Tiles of a matcher compiled: its many small operations on a GPU joined into few.

Compiling takes about a minute for each kind of matcher, once a process, so it is for large jobs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from counterfoil.encoders.encoded import Encoded
from counterfoil.kernels.fused import usable

if TYPE_CHECKING:
    from counterfoil.matchers.local import LocalMatcher

BACKEND = "inductor"

_ready: dict[tuple[type, str], Callable[..., Tensor]] = {}
_refused: set[type] = set()
"""Kinds of matchers that could not be compiled here: PyTorch runs them as they are."""


def compiles_here(device: torch.device) -> bool:
    """Whether what PyTorch compiles for a device, which on a GPU are Triton's programs, can run."""
    return usable(device, torch.float32)


def joined_tile(matcher: LocalMatcher, images: Encoded, texts: Encoded) -> Tensor:
    """`LocalMatcher.tile`, compiled for tiles of any size; as it is where that fails."""
    kind = type(matcher)
    if kind not in _refused:
        try:
            return _compiled(kind, BACKEND)(matcher, images, texts)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError:  # of which the errors of PyTorch's compiler are kinds
            _refused.add(kind)
    return matcher.tile(images, texts)


def _compiled(kind: type, backend: str) -> Callable[..., Tensor]:
    if (kind, backend) not in _ready:
        tile = kind.tile  # type: ignore[attr-defined]
        _ready[kind, backend] = torch.compile(tile, dynamic=True, backend=backend)
    return _ready[kind, backend]
