"""What Triton compiles slowly, as instructions of NVIDIA's GPUs.

- Loads of one value per thread (`_read`). For every such load, the pass of Triton that chooses how
  threads share loads takes time that is quadratic in the operations of a kernel, and it has nothing
  to choose. It does not look into instructions.
- Quadratic forms (`quadratic_of_two`): two thousand operations, and several passes over each.

Where there are no such instructions, as in Triton's interpreter, the same is computed in Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from counterfoil.kernels import spec


@triton.jit
def _nothing():
    pass


constexpr_function = getattr(triton, "constexpr_function", lambda function: function)

INSTRUCTIONS = tl.constexpr(isinstance(_nothing, triton.JITFunction) and torch.version.hip is None)
"""Whether kernels may contain NVIDIA's instructions: not in Triton's interpreter."""

LONG_INSTRUCTIONS = tl.constexpr(INSTRUCTIONS.value and hasattr(triton, "constexpr_function"))
"""Whether Triton can also call functions that write the instructions (3.4 and later)."""


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


ENTRIES_PER_LOAD = tl.constexpr(spec.ENTRIES_PER_LOAD)


@constexpr_function
def quadratic_instructions(values, R, STEP, kind):
    """eᵀ G e and fᵀ G f; operands: ``values`` of e, as many of f, the address of G's triangle."""
    load, convert, size = {
        "fp32": ("ld.global.v4.f32 {{g0, g1, g2, g3}}, [{}];", "", 4),
        "fp16": ("ld.global.v4.b16 {{h0, h1, h2, h3}}, [{}];", "cvt.f32.f16 g{0}, h{0};", 2),
        "bf16": ("ld.global.v4.b16 {{h0, h1, h2, h3}}, [{}];", "mov.b32 g{0}, {{zero, h{0}}};", 2),
    }[kind]
    lines = [".reg .f32 g0, g1, g2, g3, row_e, row_f, of_e, of_f;"]
    lines += [".reg .b16 h0, h1, h2, h3, zero;", "mov.b16 zero, 0;"]
    lines += ["mov.f32 of_e, 0f00000000;", "mov.f32 of_f, 0f00000000;"]
    entry = 0
    for r in range(R):
        for q in range(r + 1):
            part = entry % 4
            if part == 0:
                lines.append(load.format(f"${2 + 2 * values} + {entry * STEP * size}"))
            lines += [convert.format(part)] if convert else []
            for name, operand in (("row_e", 2 + q), ("row_f", 2 + values + q)):
                more = f"fma.rn.f32 {name}, ${operand}, g{part}, {name};"
                lines.append(f"mul.f32 {name}, ${operand}, g{part};" if q == 0 else more)
            entry += 1
        lines.append(f"fma.rn.f32 of_e, row_e, ${2 + r}, of_e;")
        lines.append(f"fma.rn.f32 of_f, row_f, ${2 + values + r}, of_f;")
    return "\n".join(["{", *lines, "mov.f32 $0, of_e;", "mov.f32 $1, of_f;", "}"])


@constexpr_function
def quadratic_operands(values):
    return ",".join(["=f"] * 2 + ["f"] * (2 * values) + ["l"])


@triton.jit
def quadratic_of_two(e, f, triangle, VALUES: tl.constexpr, R: tl.constexpr, STEP: tl.constexpr):
    """eᵀ G e and fᵀ G f from the lower triangle of G, row by row, ENTRIES_PER_LOAD at a time.

    e and f are the first R of VALUES values each. G is the same for all threads if STEP is 1, else
    each of STEP threads has its own.
    """
    kind: tl.constexpr = triangle.dtype.element_ty
    if LONG_INSTRUCTIONS:
        of_e, of_f = tl.inline_asm_elementwise(
            quadratic_instructions(VALUES, R, STEP, kind.name), quadratic_operands(VALUES),
            e + f + (triangle.to(tl.int64),), (tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        of_e = e[0] * 0.0
        of_f = f[0] * 0.0
        for r in tl.static_range(R):
            part_e = e[0] * 0.0
            part_f = e[0] * 0.0
            for q in tl.static_range(r + 1):
                entry: tl.constexpr = r * (r + 1) // 2 + q
                before: tl.constexpr = entry // ENTRIES_PER_LOAD * ENTRIES_PER_LOAD
                value = tl.load(triangle + (before * STEP + entry - before)).to(tl.float32)
                part_e = tl.fma(e[q], value, part_e)
                part_f = tl.fma(f[q], value, part_f)
            of_e = tl.fma(part_e, e[r], of_e)
            of_f = tl.fma(part_f, f[r], of_f)
    return of_e, of_f
