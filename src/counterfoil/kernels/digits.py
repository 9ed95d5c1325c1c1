"""Inner products from two int8 digits a number, for CPUs whose tile units (AMX) take int8 fastest.

A fragment is taken as s · (254 h + l): digits h and l from −127 to 127, and a scale s of its own,
so that its largest entry is known to 16 bits. The inner product of two is
s s′ (254² h·h′ + 254 (h·l′ + l·h′)); l·l′ is below the rounding and left out. Sums of int8 products
are exact in int32. Between fragments of 1024 entries of like size this errs by about 2e-6 of their
lengths' product: more than float32 does, less than float16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from counterfoil.kernels.workers import in_parallel

BASE = 254
LARGEST = 127 * BASE + 126
"""Of the numbers that two digits write; one more would round to a leading digit of 128."""

WIDEST = 1 << 16
"""Entries of a fragment up to which no sum leaves int32."""

ROWS = 128
"""Fragments taken at a time: their temporaries stay in the cache."""


@dataclass(frozen=True)
class Digits:
    """Digits of fragments [n, D], the leading ones and the others, and scales [n]."""

    high: Tensor
    low: Tensor
    scales: Tensor

    def packed(self) -> Digits:
        """The same, laid out as the second factor of `multiply`."""
        pack = torch.ops.onednn.qlinear_prepack
        return Digits(pack(self.high, None), pack(self.low, None), self.scales)


def digits(x: Tensor) -> Digits:
    """Digits of float32 fragments [n, D]."""
    n, width = x.shape
    found = Digits(
        torch.empty(n, width, dtype=torch.int8),
        torch.empty(n, width, dtype=torch.int8),
        x.new_empty(n),
    )
    share = max(ROWS, -(-n // torch.get_num_threads()))
    spans = [slice(top, min(top + share, n)) for top in range(0, n, share)]
    in_parallel(lambda span: _write(x, span, found), spans)
    return found


def _write(x: Tensor, span: slice, found: Digits) -> None:
    """The digits of some fragments, a few at a time."""
    rooms = x.new_empty(2, min(span.stop - span.start, ROWS), x.shape[1])
    for top in range(span.start, span.stop, ROWS):
        here = slice(top, min(top + ROWS, span.stop))
        part = x[here]
        low, high = rooms[:, : len(part)]
        scale = torch.abs(part, out=low).amax(1).div_(LARGEST)
        scale.clamp_(min=torch.finfo(x.dtype).tiny)
        found.scales[here] = scale
        torch.div(part, scale[:, None], out=low)
        torch.mul(low, 1 / BASE, out=high).round_()
        found.high[here] = high
        found.low[here] = low.sub_(high, alpha=BASE).round_()


def multiply(a: Digits, rows: slice, b: Digits, scales: Tensor, out: Tensor) -> None:
    """Inner products [rows, M] of some rows with all of a packed factor, times ``scales`` [M].

    They are yet to be multiplied by the scales of the rows.
    """
    high, low, no_shift = a.high[rows], a.low[rows], torch.zeros_like(scales, dtype=torch.int32)
    out.zero_()
    for left, right, weight in (
        (high, b.high, BASE * BASE),
        (high, b.low, BASE),
        (low, b.high, BASE),
    ):
        torch.ops.onednn.qlinear_pointwise.binary(
            left, float(weight), 0, right, scales, no_shift, out, None, 1.0, 0, torch.float32,
            1.0, 0, "sum", 1.0, "none", [], "",
        )  # fmt: skip


@cache
def multiplied_fast() -> bool:
    """Whether this CPU has tile units, and this PyTorch multiplies digits on it rightly."""
    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", None)
    if has_tiles is None or not torch.backends.mkldnn.is_available() or not has_tiles():
        return False
    x = torch.linspace(-1, 1, 64 * 33).view(33, 64).sin()
    a, b = digits(x), digits(x[:17])
    found = torch.empty(33, 17)
    try:
        multiply(a, slice(0, 33), b.packed(), b.scales, found)
    except (AttributeError, RuntimeError):  # an operator that is missing, or takes other arguments
        return False
    found *= a.scales[:, None]
    return torch.allclose(found, x @ x[:17].T, rtol=0, atol=2e-3)
