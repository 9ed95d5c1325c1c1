"""Fused scores with gradients: the backward pass recomputes intermediate values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from counterfoil.kernels.first_order import first_order_only
from counterfoil.kernels.spec import WORDS, KernelSpec, shared_memory
from counterfoil.kernels.triton.launch import (
    Regions,
    Words,
    block_of,
    fused_scores,
    in_order,
    launch,
    precision,
    run_fitting,
)
from counterfoil.kernels.triton.packing import Packing

SAVED_BYTES = 1 << 27
"""Most bytes of similarities stored for the backward pass, or recomputed at a time."""

TILES_PER_PROGRAM = 4
WARPS = 8


def trainable(spec: KernelSpec) -> bool:
    """Whether there is a backward kernel: not for NAAF's eq. 9 or smooth-Chamfer."""
    return (
        spec.method in ("scan", "bfan", "chan", "naaf")
        and spec.propagation == "none"
        and spec.pooling != "softmax"
    )


def on_chip(spec: KernelSpec, dtype: torch.dtype, regions: int) -> int:
    """Bytes of shared memory that the backward kernel takes, with one tile per program.

    As reported by Triton's compiler: a few tiles of words and regions in single precision.
    """
    if spec.method == "chan":
        return 0
    tiles = 4 if dtype == torch.float32 else 2
    return tiles * 4 * WORDS * block_of(regions) + (1 << 14)


def fits(spec: KernelSpec, dtype: torch.dtype, regions: int, device: torch.device) -> bool:
    """Whether a device can run the backward kernel; checked before the forward pass."""
    return on_chip(spec, dtype, regions) <= shared_memory(device)


def fused_scores_with_gradient(
    spec: KernelSpec, packing: Packing, words: Tensor, regions: Tensor, mask: Tensor | None
) -> Tensor:
    """Scores [I, captions] of words in tiles with regions, with gradients to both.

    Every caption must have words.
    """
    scores: Tensor = _FusedScores.apply(spec, packing, mask, words, regions)
    return scores


class _FusedScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, spec: KernelSpec, packing: Packing, mask: Tensor | None, u: Tensor, v: Tensor
    ) -> Tensor:
        words, regions, sims = Words(packing, u), Regions(v, mask), None
        if u.element_size() * len(u) * v.shape[0] * v.shape[1] <= SAVED_BYTES and packing.tiles:
            sims = v.flatten(0, 1) @ u.T
            slots = packing.tiles * packing.slots
            out = u.new_empty(len(v), slots, dtype=torch.float32)  # every caption has a slot
            launch(spec, sims, words, regions, slice(0, len(v)), out, len(v))
            scores = in_order(out, packing, spec)
        else:
            scores = fused_scores(spec, words, regions)
        ctx.spec, ctx.packing = spec, packing
        by_gram = spec.method != "chan"
        norms, gram = (words.norms, regions.gram) if by_gram else (None, None)
        ctx.save_for_backward(mask, u, norms, v, gram, sims)
        return scores

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        mask, u, norms, v, gram, sims = ctx.saved_tensors
        spec, packing = ctx.spec, ctx.packing
        grad = grad.float() if spec.factor == 1.0 else grad.float() * spec.factor
        if sims is not None:
            part = v.flatten(0, 1)
            grads = _launch(spec, packing, sims, norms, gram, mask, slice(0, len(v)), grad)
            d_u, d_v = grads.sims.T @ part, (grads.sims @ u).view_as(v)
            d_norms, d_gram = grads.norms, grads.gram
        else:
            d_u, d_v, d_norms, d_gram = _in_parts(spec, packing, mask, u, norms, v, gram, grad)
        # the gradient of ‖u‖ lies along u; that of the Gram matrix v · v is symmetric
        if d_norms is not None:
            d_u = torch.addcmul(d_u, u, d_norms[:, None].to(d_u.dtype))
        if d_gram is not None:
            d_v = torch.baddbmm(d_v, d_gram.to(v.dtype), v, alpha=2)
        return None, None, None, d_u.to(u.dtype), d_v


@dataclass(frozen=True)
class Backward:
    """Gradients of similarities, of words' norms [words] over these, of Gram matrices [I, R, R]."""

    sims: Tensor
    norms: Tensor | None
    gram: Tensor | None


def _in_parts(
    spec: KernelSpec,
    packing: Packing,
    mask: Tensor | None,
    u: Tensor,
    norms: Tensor | None,
    v: Tensor,
    gram: Tensor | None,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of words, regions, norms and Gram matrices, a few images at a time.

    Similarities are computed again.
    """
    d_u, d_v = torch.zeros_like(u, dtype=torch.float32), torch.zeros_like(v)
    d_norms = torch.zeros_like(norms) if norms is not None and not spec.unit_words else None
    d_gram = torch.zeros_like(gram, dtype=torch.float32) if gram is not None else None
    per_image = max(1, v.shape[1] * len(u) * u.element_size())
    rows = max(1, min(len(v), SAVED_BYTES // per_image))
    for top in range(0, len(v) if packing.tiles else 0, rows):
        block = slice(top, min(top + rows, len(v)))
        part = v[block].flatten(0, 1)
        own = None if gram is None else gram[block]
        grads = _launch(spec, packing, part @ u.T, norms, own, mask, block, grad)
        d_u += grads.sims.T @ part
        d_v[block] = (grads.sims @ u).view_as(v[block])
        if d_norms is not None and grads.norms is not None:
            d_norms += grads.norms
        if d_gram is not None and grads.gram is not None:
            d_gram[block] = grads.gram
    return d_u, d_v, d_norms, d_gram


def _launch(
    spec: KernelSpec,
    packing: Packing,
    sims: Tensor,
    norms: Tensor | None,
    gram: Tensor | None,
    mask: Tensor | None,
    block: slice,
    grad: Tensor,
) -> Backward:
    """Run the kernel for a block of images; CHAN has no Gram matrix and no norms."""
    from counterfoil.kernels.triton.tile_backward import words_backward

    images = block.stop - block.start
    regions = len(sims) // images
    real = mask[block].contiguous().view(torch.uint8) if mask is not None else sims
    d_sims = torch.empty_like(sims)
    d_norms = d_gram = None
    if norms is not None and not spec.unit_words:
        d_norms = norms.new_empty(images, sims.shape[1])

    def run(per_program: int) -> None:
        nonlocal d_gram
        groups = -(-packing.tiles // per_program)
        if gram is not None:
            d_gram = grad.new_empty(groups, images, regions, regions)
        words_backward[(images, groups)](
            sims, _or(gram, sims), _or(norms, sims), real,
            packing.segments, packing.counts, packing.owners, grad[block], d_sims,
            _or(d_norms, sims), _or(d_gram, sims),
            images, regions, sims.stride(0), grad.stride(0), grad.stride(1), packing.tiles,
            spec.boundary, spec.scale, spec.lse_scale,
            METHOD=spec.method, HOW=spec.pooling, ACTIVATION=spec.activation, PROB=spec.prob,
            NEGATIVE=spec.negative, UNIT=spec.unit_words, MASKED=mask is not None,
            PRECISION=precision(sims.dtype),
            BW=packing.words, BC=packing.slots, BR=block_of(regions), PER=per_program,
            num_warps=WARPS,
        )  # fmt: skip

    run_fitting(run, min(TILES_PER_PROGRAM, packing.tiles))
    return Backward(
        d_sims,
        None if d_norms is None else d_norms.sum(0),
        None if d_gram is None else d_gram.sum(0),
    )


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A placeholder for a kernel argument that is not read."""
    return other if tensor is None else tensor
