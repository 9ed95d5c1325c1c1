"""Compiles every launch of the kernels to Triton's own code, which needs no GPU; run as a program.

Arguments: names of matchers, maxsim, or attention; without any, all.

The interpreter runs kernels as Python and overlooks what the compiler refuses: names that change
their type or shape, and the like. Nothing is launched, and no score looked at. Prints as JSON, for
each name, how many launches it compiled that no name before it had.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction

from counterfoil.encoders.encoded import Encoded
from counterfoil.kernels import dispatch, maxsim, packed_attention
from counterfoil.kernels.spec import THREAD_PER_CAPTION_CELLS, ScoringJob
from tests.kernels.test_dispatch import MATCHERS, TRAINED, made, sides

POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
TARGET = GPUTarget("cuda", 80, 32)
compiled: set[str] = set()


def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
    """In the place of a launch: the kernel with arguments of these types, to Triton's code."""
    for option in ("num_warps", "num_stages", "maxnreg"):
        given.pop(option, None)
    values = dict(zip(kernel.arg_names, args, strict=False)) | given
    fixed = {p.name: values[p.name] for p in kernel.params if p.is_constexpr}
    kinds = {name: "constexpr" if name in fixed else kind(values[name]) for name in values}
    signature = {name: kinds[name] for name in kernel.arg_names}
    key = f"{kernel.fn.__name__} {signature} {fixed}"
    if key in compiled:
        return
    compiled.add(key)
    backend = make_backend(TARGET)
    options = backend.parse_options({"num_warps": 8})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(kernel, signature, fixed, {})
    tools = backend.get_codegen_implementation(options), backend.get_module_map()
    source.make_ir(TARGET, options, *tools, context)


def kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def compile_maxsim() -> None:
    """Vectors that stay on the chip and wider ones, few tokens and many; with gradients, too."""
    maxsim.usable = lambda device, dtype: True
    for tokens, width, dtype in (
        (20, 32, torch.float16),
        (200, 128, torch.float16),
        (200, 256, torch.bfloat16),
        (20, 200, torch.float32),
    ):
        queries, documents = torch.zeros(1, tokens, width), torch.zeros(3, 5, width)
        queries, documents = queries.to(dtype), documents.to(dtype)
        maxsim.maxsim(queries, documents)
        real = torch.ones(3, 5, dtype=torch.bool)
        leaves = queries.requires_grad_(), documents.requires_grad_()
        maxsim.maxsim(*leaves).sum().backward()
        present = torch.ones(1, tokens, dtype=torch.bool)
        maxsim.maxsim(*leaves, present, real).sum().backward()
        with pytest.MonkeyPatch.context() as patch:  # large jobs have a kernel of their own
            patch.setattr("counterfoil.kernels.triton.maxsim_training.MAX_CELLS", 0)
            maxsim.maxsim(*leaves, document_mask=real)


def compile_attention() -> None:
    """Both kinds of queries, with and without dropout, in blocks of two sizes, with gradients."""
    packed_attention.usable = lambda device, dtype: True
    for longest, width, dropout in ((50, 32, 0.1), (100, 64, 0.0)):
        for first in (False, True):
            joined = torch.zeros(120, (2 if first else 3) * 2 * width, dtype=torch.bfloat16)
            queries = torch.zeros(2, 2 * width, dtype=torch.bfloat16) if first else None
            leaf = joined.requires_grad_()
            starts = torch.tensor([0, 20])
            found = packed_attention.packed_attention(leaf, starts, longest, 2, dropout, queries)
            assert found is not None
            found.sum().backward()


def compile_matcher(name: str) -> None:
    """Jobs of two sizes in two precisions; with gradients, too, where there are kernels of them."""
    for dtype, holes in ((torch.float32, True), (torch.float16, False)):
        images, texts = (
            Encoded(side.fragments.to(dtype), side.mask) for side in sides(1, holes=holes)
        )
        for large in (False, True):
            job = ScoringJob(THREAD_PER_CAPTION_CELLS if large else 0)
            with torch.no_grad():
                specs = made(name).eval().kernel_specs()
                pair = (images.fragments, images.mask), (texts.fragments, texts.mask)
                assert dispatch.try_fused_scores(specs, *pair, job) is not None
        if name in TRAINED:
            leaf = images.fragments.detach().requires_grad_()
            made(name).train()(Encoded(leaf, images.mask), texts).sum().backward()


def main() -> None:
    JITFunction.run = compile_only
    dispatch.usable = lambda device, dtype: True
    counts = {}
    for name in sys.argv[1:] or ["maxsim", "attention", *MATCHERS]:
        before = len(compiled)
        if name == "maxsim":
            compile_maxsim()
        elif name == "attention":
            compile_attention()
        else:
            compile_matcher(name)
        counts[name] = len(compiled) - before
    json.dump(counts, sys.stdout)


if __name__ == "__main__":
    main()
