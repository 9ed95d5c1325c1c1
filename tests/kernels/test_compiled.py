"""`host.c` is compiled once, for this machine, and whatever hinders that is no error."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from counterfoil.kernels import compiled

COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Iterator[Path]:
    """Where libraries go; what was loaded before is forgotten."""
    monkeypatch.setenv("HOME", str(tmp_path))
    compiled._library.cache_clear()
    yield tmp_path / ".cache" / "counterfoil" / "compiled"
    compiled._library.cache_clear()


def called(folder: Path, script: str) -> str:
    """A program that stands for a compiler."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@needs_compiler
def test_it_is_compiled_once(kept, monkeypatch) -> None:
    assert compiled.library() is not None
    (made,) = kept.iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    compiled._library.cache_clear()
    monkeypatch.setattr(compiled, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compiled.library() is not None
    assert list(kept.iterdir()) == [made]


@needs_compiler
def test_another_source_or_cpu_is_another_library(kept, monkeypatch, tmp_path) -> None:
    first = compiled._mark(COMPILER)
    monkeypatch.setattr(compiled, "_cpu", lambda: "another")
    second = compiled._mark(COMPILER)
    changed = tmp_path / "host.c"
    changed.write_text(compiled.SOURCE.read_text() + "/* */")
    monkeypatch.setattr(compiled, "SOURCE", changed)
    assert len({first, second, compiled._mark(COMPILER)}) == 3


@needs_compiler
def test_flags_that_a_compiler_does_not_know_are_left_out(kept, monkeypatch, tmp_path) -> None:
    picky = called(tmp_path, f'case "$*" in *native*) exit 1 ;; *) exec {COMPILER} "$@" ;; esac')
    monkeypatch.setattr(compiled, "COMPILERS", (picky,))
    assert compiled.library() is not None


@pytest.mark.parametrize("script", ["exit 1", "echo not a library > /dev/null"])
def test_a_compiler_that_makes_nothing_is_no_error(kept, monkeypatch, tmp_path, script) -> None:
    monkeypatch.setattr(compiled, "COMPILERS", (called(tmp_path, script),))
    assert compiled.library() is None


def test_without_a_compiler_there_is_none(kept, monkeypatch) -> None:
    monkeypatch.setattr(compiled, "COMPILERS", ("no-such-compiler",))
    assert compiled.library() is None
    assert not kept.exists()


@needs_compiler
def test_a_spoilt_library_is_not_trusted_forever(kept) -> None:
    assert COMPILER is not None
    kept.mkdir(mode=0o700, parents=True)
    (kept / f"host-{compiled._mark(COMPILER)}.so").write_bytes(b"not a library")
    assert compiled.library() is not None


@needs_compiler
@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX")
def test_a_folder_that_others_may_write_to_is_not_loaded_from(kept) -> None:
    kept.mkdir(mode=0o777, parents=True)
    kept.chmod(0o777)
    assert compiled.library() is not None
    assert not list(kept.iterdir())


@needs_compiler
def test_without_a_place_to_keep_it_this_process_has_it(tmp_path, kept, monkeypatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("HOME", str(file))
    assert compiled.library() is not None
