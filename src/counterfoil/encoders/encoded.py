"""`Encoded`: what every encoder returns, for images and for texts alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from counterfoil.core.distributed import gather_counts, gather_rows, world_size

Needs = Literal["pooled", "fragments", "both"]


@dataclass(frozen=True)
class Encoded:
    """Fragments [B, N, D] in the joint space, mask [B, N] (True: real), pooled [B, D] or None.

    Padded fragments are zero. A matcher of whole vectors keeps only ``pooled`` and the mask.
    ``boxes`` [B, N, 4] say where an image's fragments are, ``graph`` [B, N, N] (bool) which words
    of a text are linked; both only for matchers that read them. Where the fragments are a set that
    an encoder predicts, ``residuals`` [B, N, D] are what it adds to the global vector for each.
    """

    fragments: Tensor | None
    mask: Tensor
    pooled: Tensor | None = None
    boxes: Tensor | None = None
    graph: Tensor | None = None
    residuals: Tensor | None = None

    def __len__(self) -> int:
        return int(self.mask.shape[0])

    def keep(self, needs: Needs) -> Encoded:
        """Drop what a matcher does not read, before it is stored or sent."""
        if needs == "pooled":
            return Encoded(None, self.mask[:, :0], self.pooled)
        return self if needs == "both" else replace(self, pooled=None, residuals=None)

    def to(self, device: torch.device | str) -> Encoded:
        return self._each(lambda x: x.to(device))

    def __getitem__(self, rows: slice | Tensor) -> Encoded:
        if isinstance(rows, Tensor) and rows.dtype == torch.long and rows.ndim == 1:
            return self._each(lambda x: x.index_select(0, rows))  # a faster backward
        return self._each(lambda x: x[rows])

    def pad_to(self, length: int) -> Encoded:
        """Append empty fragments up to ``length``."""
        missing = length - self.mask.shape[1]
        if missing <= 0:
            return self
        below = (0, 0, 0, missing)
        return Encoded(
            F.pad(self.fragments, below) if self.fragments is not None else None,
            F.pad(self.mask, (0, missing)),
            self.pooled,
            F.pad(self.boxes, below) if self.boxes is not None else None,
            F.pad(self.graph, (0, missing, 0, missing)) if self.graph is not None else None,
            F.pad(self.residuals, below) if self.residuals is not None else None,
        )

    def trim_to(self, length: int) -> Encoded:
        """Cut what lies beyond ``length``, which must be padding."""
        return Encoded(
            self.fragments[:, :length] if self.fragments is not None else None,
            self.mask[:, :length],
            self.pooled,
            self.boxes[:, :length] if self.boxes is not None else None,
            self.graph[:, :length, :length] if self.graph is not None else None,
            self.residuals[:, :length] if self.residuals is not None else None,
        )

    @staticmethod
    def cat(parts: Sequence[Encoded]) -> Encoded:
        """All items in one batch; what some parts lack, the whole lacks."""
        longest = max(part.mask.shape[1] for part in parts)
        padded = [part.pad_to(longest) for part in parts]
        joined: dict[str, Tensor] = {}
        for field in fields(Encoded):
            values = [getattr(part, field.name) for part in padded]
            if all(value is not None for value in values):
                joined[field.name] = torch.cat(values)
        return Encoded(**{"fragments": None, **joined})  # type: ignore[arg-type]

    def gather(self) -> Encoded:
        """The items of all processes, with gradients to the process each came from."""
        if world_size() == 1:
            return self
        lengths = gather_counts(self.mask.shape[1], self.mask.device)
        return self.pad_to(max(lengths))._each(gather_rows)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Encoded:
        """The same change made to every tensor there is."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{k: change(x) for k, x in tensors.items() if x is not None})


HALVES = (torch.bfloat16, torch.float16)


def l2_normalize(x: Tensor, eps: float = 1e-8) -> Tensor:
    """x / (‖x‖ + eps) over the last axis, as the public implementations do it.

    Of halves it is computed in single precision, and in mixed precision it stays so: what is
    compared by cosines, hardest negatives above all, is told apart by the third digit.
    """
    if x.dtype in HALVES:
        single = l2_normalize(x.float(), eps)
        return single if torch.is_autocast_enabled(x.device.type) else single.to(x.dtype)
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad):
        return _divided(x, eps)[0]
    normalized: Tensor = _Normalized.apply(x, eps)
    return normalized


def _divided(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """What x becomes, its length, and what it was divided by."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    divisor = length + eps
    return x / divisor, length, divisor


class _Normalized(torch.autograd.Function):
    """`l2_normalize` with a backward pass of half the operations that autograd makes of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        y, length, divisor = _divided(x, eps)
        ctx.save_for_backward(x, y, length, divisor)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x, y, length, divisor = ctx.saved_tensors
        (grad,) = grads
        if torch.is_grad_enabled():  # the gradient of the gradient is wanted: autograd knows it
            again = torch.autograd.grad(_divided(x, ctx.eps)[0], x, grad, create_graph=True)
            return again[0], None
        # of a vector of zeros y is zero, too: what that is divided by does not matter
        along = (grad * y).sum(-1, keepdim=True) / length.clamp(min=torch.finfo(y.dtype).tiny)
        return torch.addcmul(grad / divisor, y, along, value=-1), None
