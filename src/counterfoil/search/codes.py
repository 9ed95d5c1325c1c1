"""Vectors as an index stores them: in half or single precision, in 8 bits, or in 1 bit.

``int8``: a number is a code of -127 to 127 times the scale of its vector. ``binary``: the same, and
beside it one bit per number, the sign after a fixed rotation. The bits are compared first; the best
candidates are then scored again with the 8-bit codes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from counterfoil.core.errors import DataError
from counterfoil.encoders.stored import dequantize, quantize
from counterfoil.search.vectors import CACHE_FLOATS, Floats

DTYPES = ("float16", "float32", "int8", "binary")
WORD = 64
PLANES = 4
"""Bits per number of a query that is compared with signs."""

LARGEST_BLOCK = 512
"""Width of the Hadamard matrices in the rotation, at most."""

ROWS, SCALES, BITS, FACTORS = "rows.bin", "scales.bin", "bits.bin", "factors.bin"


@dataclass(frozen=True)
class Coded:
    """R stored vectors: ``rows`` [R, D], with int8 their ``scales`` [R].

    With binary also ``bits`` [W, R], 64 signs in each, and ``factors`` [R]. Words are the first
    axis because a scan reads the same word of many vectors at a time.
    """

    rows: NDArray[Any]
    scales: Floats | None = None
    bits: NDArray[np.uint64] | None = None
    factors: Floats | None = None

    @classmethod
    def encode(cls, vectors: Floats, dtype: str) -> Coded:
        """Codes of float32 vectors."""
        if dtype in ("float16", "float32"):
            return cls(np.ascontiguousarray(vectors, dtype=dtype))
        codes, scales = quantize(vectors)
        if dtype == "int8":
            return cls(codes, scales)
        return cls(codes, scales, *encode_signs(vectors))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice | NDArray[Any]) -> Coded:
        return Coded(
            self.rows[part],
            None if self.scales is None else self.scales[part],
            None if self.bits is None else self.bits[:, part],
            None if self.factors is None else self.factors[part],
        )

    def decode(self) -> Floats:
        """The vectors in float32, from the codes with the most bits."""
        if self.scales is None:
            return self.rows.astype(np.float32)
        return dequantize(self.rows, self.scales)

    def products(self, queries: Floats) -> Tensor:
        """Inner products [Q, R] of float32 queries; with binary an estimate, from the bits."""
        if self.bits is not None and self.factors is not None:
            return torch.from_numpy(sign_products(queries, self.bits, self.factors))
        sims = _float_products(queries, torch.from_numpy(self.rows))
        return sims if self.scales is None else sims.mul_(torch.from_numpy(self.scales))


def _float_products(queries: Floats, rows: Tensor) -> Tensor:
    """Inner products of queries [Q, D] with rows [R, D] of any type; the sums are in float32."""
    left = torch.from_numpy(np.ascontiguousarray(queries))
    out = torch.empty(len(left), len(rows))
    step = max(1, CACHE_FLOATS // rows.shape[1])
    buffer = torch.empty(min(step, len(rows)), rows.shape[1])
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        if part.dtype != torch.float32:
            part = buffer[: len(part)].copy_(part)
        torch.mm(left, part.T, out=out[:, start : start + step])
    return out


# Signs. A vector x is rotated to z, and stored as s = sign(z) with f = ‖x‖² / ‖z‖₁. Then f ⟨s, Rq⟩
# estimates ⟨x, q⟩, exactly for q = x, and without bias for a random rotation R.
#
# A rotated query is rounded to numbers (u - (2^P - 1) / 2) spacing, u in 0 … 2^P - 1. With the bits
# u_j of u as signs t_j that is spacing / 2 Σ_j 2^j t_j; ⟨t_j, s⟩ = width - 2 popcount(u_j xor s).
def encode_signs(vectors: Floats) -> tuple[NDArray[np.uint64], Floats]:
    """Words [W, R] of signs, and factors [R]."""
    largest = np.abs(vectors).max(axis=1, initial=0.0)
    divisor = np.where(largest > 0, largest, 1).astype(np.float32)
    unit: Floats = np.divide(vectors, divisor[:, None], dtype=np.float32)  # nothing overflows
    rotated = rotate(unit)
    lengths = np.abs(rotated).sum(1, dtype=np.float64)
    squares = np.square(unit, dtype=np.float64).sum(1)
    factors = largest * np.divide(squares, lengths, out=np.zeros(len(unit)), where=lengths > 0)
    return _packed(rotated > 0).T, factors.astype(np.float32)


def sign_products(queries: Floats, words: NDArray[np.uint64], factors: Floats) -> Floats:
    """Estimates [Q, R] of the inner products of queries with vectors stored as signs."""
    width, count = WORD * len(words), words.shape[1]
    levels = 2**PLANES - 1
    out = np.empty((len(queries), count), dtype=np.float32)
    step = max(1, CACHE_FLOATS // 16)
    for row, query in enumerate(rotate(np.asarray(queries, dtype=np.float32))):
        spacing = 2 * float(np.abs(query).max()) / levels or 1.0
        numbers = np.rint(query / spacing + levels / 2).astype(np.uint8)
        planes = _packed(np.stack([(numbers >> bit) & 1 for bit in reversed(range(PLANES))]) > 0)
        for start in range(0, count, step):
            part = words[:, start : start + step]
            narrow = levels * width < 2**16
            total: NDArray[Any] = np.zeros(part.shape[1], dtype=np.uint16 if narrow else np.int32)
            for plane in planes:
                total <<= 1
                for word, signs in zip(plane, part, strict=True):
                    total += popcount(signs ^ word)
            values = out[row, start : start + step]
            np.subtract(levels * width / 2, total, out=values)
            values *= spacing
            values *= factors[start : start + step]
    return out


def _packed(signs: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """Rows of signs as words of 64; the number of signs is a multiple of 64."""
    return np.packbits(signs, axis=1).view(np.uint64)


def popcount(words: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Number of ones in each word."""
    if hasattr(np, "bitwise_count"):  # NumPy 2
        counts: NDArray[np.uint8] = np.bitwise_count(words)
        return counts
    quarters = np.ascontiguousarray(words).view(np.uint16).reshape(*words.shape, 4)
    return _ones_of_16_bits()[quarters].sum(-1, dtype=np.uint8)


@lru_cache(maxsize=1)
def _ones_of_16_bits() -> NDArray[np.uint8]:
    numbers = np.arange(2**16, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
    return np.unpackbits(numbers, axis=1).sum(1, dtype=np.uint8)


def rotate(rows: Floats) -> Floats:
    """Rows [R, D] padded to a multiple of 64 numbers and rotated; the same on every machine.

    Two rounds of random sign flips and Hadamard matrices spread each number over all others, so
    that no sign is worth more than another.
    """
    width = -(-rows.shape[1] // WORD) * WORD
    flips, matrix = _rotation(width)
    size = len(matrix)
    padded = np.zeros((len(rows), width), dtype=np.float32)
    padded[:, : rows.shape[1]] = rows
    for flip in flips:
        mixed = (padded * flip).reshape(-1, size) @ matrix
        # numbers of different blocks come together in the next round
        blocks = mixed.reshape(len(rows), width // size, size)
        padded = np.ascontiguousarray(blocks.transpose(0, 2, 1)).reshape(len(rows), width)
    return padded


@lru_cache(maxsize=8)
def _rotation(width: int) -> tuple[Floats, Floats]:
    """Signs of both rounds [2, width], and an orthogonal Hadamard matrix."""
    size = min(width & -width, LARGEST_BLOCK)
    matrix = np.ones((1, 1), dtype=np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    # raw output of a bit generator does not change between versions of NumPy
    raw = np.random.PCG64(0).random_raw(2 * width) >> np.uint64(63)
    flips = 1 - 2 * raw.astype(np.float32).reshape(2, width)
    return flips, matrix / np.float32(size**0.5)


def write_coded(folder: Path, blocks: Iterable[Coded], total: int) -> None:
    """Write ``total`` vectors, block by block, as the files that `map_coded` reads."""
    done = 0
    with (folder / ROWS).open("wb") as rows, (folder / SCALES).open("wb") as scales:
        for block in blocks:
            rows.write(np.ascontiguousarray(block.rows).data)
            if block.scales is not None:
                scales.write(np.ascontiguousarray(block.scales, dtype="<f4").data)
            if block.bits is not None and block.factors is not None and len(block):
                mode: Literal["r+", "w+"] = "r+" if done else "w+"
                shape = (len(block.bits), total)
                words = np.memmap(folder / BITS, dtype=np.uint64, mode=mode, shape=shape)
                words[:, done : done + len(block)] = block.bits
                words.flush()
                with (folder / FACTORS).open("ab") as factors:
                    factors.write(np.ascontiguousarray(block.factors, dtype="<f4").data)
            done += len(block)
        if not scales.tell():
            (folder / SCALES).unlink()


def map_coded(folder: Path, dim: int, dtype: str) -> Coded:
    """The vectors of a folder, mapped into memory."""

    # copy on write: torch needs a writable array, although nothing is written
    def mapped(name: str, kind: Any) -> NDArray[Any]:
        return np.asarray(np.memmap(folder / name, dtype=kind, mode="c"))

    quantized = dtype in ("int8", "binary")
    try:
        rows = mapped(ROWS, np.int8 if quantized else dtype).reshape(-1, dim)
        if not quantized:
            return Coded(rows)
        scales = mapped(SCALES, "<f4").reshape(len(rows))
        if dtype == "int8":
            return Coded(rows, scales)
        bits = mapped(BITS, np.uint64).reshape(-(-dim // WORD), len(rows))
        return Coded(rows, scales, bits, mapped(FACTORS, "<f4").reshape(len(rows)))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: damaged, build the index again ({error})") from None
