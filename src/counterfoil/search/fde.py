"""Fixed-dimensional encodings: one vector per item whose inner products estimate MaxSim.

The construction is that of MUVERA (Dhulipala et al., 2024). Random hyperplanes sort the fragments
of an item into buckets. A query stores the sum of its fragments in each bucket, an indexed item
their mean, so that in every bucket a query's fragment meets an average of fragments near it. This
is repeated with other hyperplanes, and random projections make the result shorter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from counterfoil.core.errors import ConfigError, DataError

Role = Literal["query", "item"]
MAX_DIM = 65536


class FdeOptions(BaseModel):
    """``bits`` hyperplanes, fragments projected to ``width`` numbers, at most ``dim`` in all.

    The defaults give 2,560 numbers, without a last projection.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    bits: int = Field(default=2, ge=0, le=8)
    repetitions: int = Field(default=20, ge=1, le=256)
    width: int = Field(default=32, ge=1, le=1024)
    dim: int = Field(default=4096, ge=1, le=MAX_DIM)

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> FdeOptions:
        try:
            return cls.model_validate(dict(options))
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            raise ConfigError(
                f"first_stage_options.{name}: {first['msg']}, got {first['input']!r} "
                f"(options of fde: {', '.join(cls.model_fields)})"
            ) from None

    @property
    def length(self) -> int:
        """Numbers before the last projection."""
        return self.repetitions * 2**self.bits * self.width


@dataclass(frozen=True)
class FixedEncoding:
    """The random part: hyperplanes [R, bits, D], projections [R, D, width], and a count sketch.

    The sketch adds each of the R · 2^bits · width numbers, times its sign, to one column of the
    result; ``columns`` and ``signs`` have one entry per number.
    """

    planes: Tensor
    projections: Tensor
    columns: Tensor
    signs: Tensor

    @classmethod
    def draw(cls, dim: int, options: FdeOptions, seed: int = 0) -> FixedEncoding:
        """Random hyperplanes and projections for fragments of ``dim`` numbers."""
        generator = torch.Generator().manual_seed(seed)
        repetitions, width, length = options.repetitions, options.width, options.length
        planes = torch.randn(repetitions, options.bits, dim, generator=generator)
        if width < dim:
            coins = torch.randint(0, 2, (repetitions, dim, width), generator=generator)
            projections = (2.0 * coins - 1) / width**0.5
        else:
            projections = torch.eye(dim).repeat(repetitions, 1, 1)
            length = length // width * dim
        if length <= options.dim:
            columns, signs = torch.arange(length), torch.ones(length)
        else:
            columns = torch.randperm(length, generator=generator) % options.dim
            signs = 2.0 * torch.randint(0, 2, (length,), generator=generator) - 1
        return cls(planes, projections, columns, signs)

    @property
    def dim(self) -> int:
        return int(self.columns.max()) + 1

    def encode(self, fragments: Tensor, mask: Tensor, role: Role) -> Tensor:
        """Encodings [n, dim] of fragments [n, N, D]; ``mask`` [n, N] is True for real ones."""
        device = fragments.device
        parts = []
        for planes, projection in zip(self.planes, self.projections, strict=True):
            codes = self._buckets(fragments, planes.to(device))
            parts.append(_by_bucket(codes, fragments @ projection.to(device), mask, role, planes))
        values = torch.cat([part.flatten(1) for part in parts], dim=1)
        if role == "query":
            values = values / len(self.planes)  # the repetitions' mean
        out = values.new_zeros(len(values), self.dim)
        return out.index_add_(1, self.columns.to(device), values * self.signs.to(device))

    @staticmethod
    def _buckets(fragments: Tensor, planes: Tensor) -> Tensor:
        """Bucket [n, N] of each fragment: its sides of the hyperplanes as a binary number."""
        powers = 2 ** torch.arange(len(planes), device=fragments.device)
        return ((fragments @ planes.T > 0) * powers).sum(-1)

    def save(self, path: Path) -> None:
        save_file({name: x.contiguous() for name, x in vars(self).items()}, path)

    @classmethod
    def load(cls, path: Path, dim: int) -> FixedEncoding:
        """A saved encoding of fragments of ``dim`` numbers."""
        try:
            encoding = cls(**load_file(path))
            repetitions, bits, width = encoding.planes.shape
            length = repetitions * 2**bits * encoding.projections.shape[2]
            expected = (repetitions, dim, encoding.projections.shape[2])
            if width != dim or tuple(encoding.projections.shape) != expected:
                raise ValueError("for fragments of another width")
            if not len(encoding.columns) == len(encoding.signs) == length:
                raise ValueError("its parts do not belong together")
            lowest, highest = (int(x) for x in encoding.columns.aminmax())
            if encoding.columns.dtype != torch.int64 or lowest < 0 or highest >= MAX_DIM:
                raise ValueError("its columns are no indices")
            return encoding
        except (SafetensorError, OSError, TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"{path}: cannot be read, build the index again ({error})") from None


def _by_bucket(codes: Tensor, values: Tensor, mask: Tensor, role: Role, planes: Tensor) -> Tensor:
    """Sum or mean [n, buckets, width] of the fragments' values in each bucket.

    An empty bucket of an item takes the fragment whose bucket differs in the fewest bits. Otherwise
    a query's fragment there would count nothing, although MaxSim gives it the nearest fragment.
    """
    buckets = 2 ** len(planes)
    member = F.one_hot(codes, buckets) * mask[..., None]
    sums = member.to(values.dtype).transpose(1, 2) @ values
    if role == "query":
        return sums
    counts = member.sum(1)
    differing = _differing_bits(buckets).to(codes.device)[codes]
    nearest = differing.masked_fill(~mask[..., None], 127).argmin(1)
    fill = values.gather(1, nearest[..., None].expand(-1, -1, values.shape[-1]))
    means = torch.where(counts[..., None] > 0, sums / counts.clamp(min=1)[..., None], fill)
    return means * mask.any(1)[:, None, None]


def _differing_bits(buckets: int) -> Tensor:
    """In how many bits two numbers below ``buckets`` differ [buckets, buckets]."""
    numbers = torch.arange(buckets)
    other = numbers[:, None] ^ numbers[None]
    return sum(((other >> bit) & 1 for bit in range(8)), torch.zeros_like(other))
