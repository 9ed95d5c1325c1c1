"""Triton's interpreter, without what it computes in vain: the same results in half the time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="package", autouse=True)
def quicker_interpreter() -> Iterator[None]:
    """Leaves out work of Triton's interpreter that no result depends on.

    - It tests whether integers overflow, in 64 bits, and drops the answer unless it debugs.
    - At each call of a function by a kernel, it searches all of Triton's language for what to
      replace. All is replaced once the kernel runs.
    - At each operation, it makes its table of types anew.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        yield
        return
    interpreter = import_module("triton.runtime.interpreter")
    options = getattr(interpreter.interpreter_builder, "options", None)
    needed = ("_patch_lang", "_get_np_dtype", "_LangPatchScope")
    if not all(hasattr(interpreter, name) for name in needed) or not hasattr(
        options, "sanitize_overflow"
    ):
        yield  # another version of Triton
        return
    replace_members, numpy_type = interpreter._patch_lang, interpreter._get_np_dtype
    languages = {interpreter.tl, interpreter.tl.core}
    replaced: set[ModuleType] = set()
    types: dict[str, Any] = {}

    def replace_once(function: Any) -> Any:
        visible = function.__globals__.values()
        used = {language for language in languages if any(one is language for one in visible)}
        if used and used <= replaced:
            return interpreter._LangPatchScope()
        scope = replace_members(function)
        replaced.update(used)
        restore = scope.restore

        def end_of_launch() -> None:  # what functions replace is never restored
            replaced.clear()
            restore()

        scope.restore = end_of_launch
        return scope

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
        patch.setattr(interpreter, "_patch_lang", replace_once)
        patch.setattr(interpreter, "_get_np_dtype", known_type)
        yield
