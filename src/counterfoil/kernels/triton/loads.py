"""Loads of one value per thread that Triton compiles fast.

For every such load, the pass of Triton that chooses how threads share loads takes time that is
quadratic in the operations of a kernel, and it has nothing to choose. So the load is an instruction
that the pass does not look into: kernels of several thousand operations compile two to ten times as
fast.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _nothing():
    pass


INSTRUCTIONS = tl.constexpr(isinstance(_nothing, triton.JITFunction) and torch.version.hip is None)
"""Whether kernels may contain NVIDIA's instructions: not in Triton's interpreter."""


@triton.jit
def _read(at):
    """The value at each thread's address, in single precision."""
    kind: tl.constexpr = at.dtype.element_ty
    if not INSTRUCTIONS:
        value = tl.load(at).to(tl.float32)
    elif kind == tl.float32:
        value = tl.inline_asm_elementwise(
            "ld.global.f32 $0, [$1];", "=f,l", [at], tl.float32, is_pure=True, pack=1
        )
    else:
        half = tl.inline_asm_elementwise(
            "ld.global.b16 $0, [$1];", "=h,l", [at], tl.int16, is_pure=True, pack=1
        )
        value = half.to(kind, bitcast=True).to(tl.float32)
    return value
