"""Compilation of several kernels at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

THREADS = 8

Launch = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]
"""A kernel, its grid, its arguments and its compile-time constants."""


def compile_together(launches: Sequence[Launch]) -> None:
    """Compile the kernels of some launches in threads, those that are not compiled yet.

    With a Triton that cannot (before 3.4), and in its interpreter, nothing happens: a launch
    compiles its own kernel.
    """
    import triton

    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None or len(launches) < 2:
        return
    if not all(isinstance(kernel, triton.JITFunction) for kernel, *_ in launches):
        return
    with ThreadPoolExecutor(THREADS) as threads, mode(threads):
        for kernel, grid, arguments, constants in launches:
            kernel.warmup(*arguments, grid=grid, **constants)
