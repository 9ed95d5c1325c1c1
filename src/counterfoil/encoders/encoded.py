"""`Encoded`: a batch of encoded images or texts, as every encoder returns it."""

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

    Padded fragments are zero. Two fields are set only for matchers that read them: ``boxes``
    [B, N, 4] of an image's fragments, and ``graph`` [B, N, N] (bool), the links between words.
    If the fragments are a predicted set, ``residuals`` [B, N, D] is each one's difference from the
    global vector.
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
        """Drop the tensors that a matcher does not read, before storing or sending."""
        if needs == "pooled":
            return Encoded(None, self.mask[:, :0], self.pooled)
        return self if needs == "both" else replace(self, pooled=None, residuals=None)

    def to(self, device: torch.device | str) -> Encoded:
        return self.map(lambda x: x.to(device))

    def __getitem__(self, rows: slice | Tensor) -> Encoded:
        if isinstance(rows, Tensor) and rows.dtype == torch.long and rows.ndim == 1:
            return self.map(lambda x: x.index_select(0, rows))  # a faster backward
        return self.map(lambda x: x[rows])

    def pad_to(self, length: int) -> Encoded:
        """Append empty fragments up to ``length``."""
        missing = length - self.mask.shape[1]
        if missing <= 0:
            return self
        pads = {"mask": (0, missing), "graph": (0, missing, 0, missing)}
        tensors = self._tensors()
        tensors.pop("pooled", None)
        padded = {name: F.pad(x, pads.get(name, (0, 0, 0, missing))) for name, x in tensors.items()}
        return replace(self, **padded)

    def extents(self) -> Tensor:
        """Index after the last real fragment of each item [B]; padding may also precede it."""
        ends = torch.arange(1, self.mask.shape[1] + 1, device=self.mask.device)
        if not len(ends):  # pooled vectors have no fragments
            return self.mask.new_zeros(len(self), dtype=torch.long)
        return (self.mask * ends).amax(1)

    def trim_to(self, length: int) -> Encoded:
        """Cut what lies beyond ``length``, which must be padding."""
        tensors = self._tensors()
        tensors.pop("pooled", None)
        trimmed = {name: x[:, :length] for name, x in tensors.items()}
        if self.graph is not None:
            trimmed["graph"] = self.graph[:, :length, :length]
        return replace(self, **trimmed)

    @staticmethod
    def cat(parts: Sequence[Encoded]) -> Encoded:
        """All items in one batch, with the fields that every part has."""
        longest = max(part.mask.shape[1] for part in parts)
        padded = [part.pad_to(longest)._tensors() for part in parts]
        shared = [name for name in padded[0] if all(name in tensors for tensors in padded)]
        joined = {name: torch.cat([tensors[name] for tensors in padded]) for name in shared}
        return Encoded(**{"fragments": None, **joined})  # type: ignore[arg-type]

    def gather(self) -> Encoded:
        """The items of all processes, with gradients to the process each came from."""
        if world_size() == 1:
            return self
        lengths = gather_counts(self.mask.shape[1], self.mask.device)
        return self.pad_to(max(lengths)).map(gather_rows)

    def map(self, function: Callable[[Tensor], Tensor]) -> Encoded:
        """Apply a function to every tensor."""
        return replace(self, **{name: function(x) for name, x in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        """The fields that are not None."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


HALVES = (torch.bfloat16, torch.float16)


def l2_normalize(x: Tensor, eps: float = 1e-8) -> Tensor:
    """x / (‖x‖ + eps) over the last axis, as the public implementations do it.

    Half precision is computed in float32, and with autocast the result stays float32: cosines of
    hard negatives often differ only in the third digit.
    """
    if x.dtype in HALVES:
        single = l2_normalize(x.float(), eps)
        return single if torch.is_autocast_enabled(x.device.type) else single.to(x.dtype)
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad):
        return _divide(x, eps)[0]
    normalized: Tensor = _L2Normalize.apply(x, eps)
    return normalized


def _divide(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x / (‖x‖ + eps), the length ‖x‖, and the divisor."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    divisor = length + eps
    return x / divisor, length, divisor


class _L2Normalize(torch.autograd.Function):
    """`l2_normalize` with a backward pass that needs half the operations of autograd's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        y, length, divisor = _divide(x, eps)
        ctx.save_for_backward(x, y, length, divisor)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x, y, length, divisor = ctx.saved_tensors
        (grad,) = grads
        if torch.is_grad_enabled():  # double backward: autograd derives it
            (grad_x,) = torch.autograd.grad(_divide(x, ctx.eps)[0], x, grad, create_graph=True)
            return grad_x, None
        # for a zero vector y is zero, too, so any finite divisor will do
        along = (grad * y).sum(-1, keepdim=True) / length.clamp(min=torch.finfo(y.dtype).tiny)
        return torch.addcmul(grad / divisor, y, along, value=-1), None
