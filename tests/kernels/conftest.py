"""Triton's interpreter, without what it computes in vain: the same results in half the time."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest


@pytest.fixture(scope="package", autouse=True)
def quicker_interpreter() -> Iterator[None]:
    """Leaves out work of Triton's interpreter that no result depends on.

    - It tests whether integers overflow, in 64 bits, and drops the answer unless it debugs.
    - At each call of a function of a kernel, it searches all of Triton's language for what to
      replace. Here, this is searched once.
    - At each operation, it makes its table of types anew.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    options = interpreter.interpreter_builder.options
    is_builtin, replace_member = interpreter.tl.core.is_builtin, interpreter._patch_attr
    numpy_type = interpreter._get_np_dtype
    types = {}

    @functools.cache
    def builtins(package: Any) -> list[tuple[str, Any]]:
        members = interpreter.inspect.getmembers(package)
        return [(name, member) for name, member in members if is_builtin(member)]

    def replace_builtins(package: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins(package):
            if getattr(package, name) is member:
                replace_member(package, name, member, builder, scope)

    def known_type(kind: Any) -> Any:
        if type(kind) is not interpreter.tl.dtype:  # a pointer or a block
            return numpy_type(kind)
        if kind.name not in types:
            types[kind.name] = numpy_type(kind)
        return types[kind.name]

    with pytest.MonkeyPatch.context() as patch:
        if not options.debug:
            quiet = replace(options, sanitize_overflow=False)
            patch.setattr(interpreter.interpreter_builder, "options", quiet)
        patch.setattr(interpreter, "_patch_builtin", replace_builtins)
        patch.setattr(interpreter, "_get_np_dtype", known_type)
        yield
