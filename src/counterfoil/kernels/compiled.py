"""`host.c`, compiled for this machine's CPU by the compiler that it has, once.

The library is kept in ``~/.cache/counterfoil/compiled`` under a name that says of which source,
compiler and CPU it is. Without a compiler there is none, and PyTorch does the same with more passes
over memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import threading
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from counterfoil.files import put_in_place, sync_file
from counterfoil.scratch import scratch_folder

COMPILERS = ("cc", "gcc", "clang")
SOURCE = Path(__file__).with_name("host.c")

FLAGS = (
    *("-O3", "-std=c99", "-fopenmp-simd"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
)
NATIVE = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ("-mcpu=native",), ())
"""For the CPU at hand: the first that a compiler takes."""

LANES = 16
"""Of `host.c`."""

PATIENCE = 120.0
"""Seconds for a compiler that hangs."""

_one_at_a_time = threading.Lock()


def library() -> ctypes.CDLL | None:
    """The compiled functions; None where they cannot be had. The first call may take a second."""
    with _one_at_a_time:
        return _library()


@cache
def _library() -> ctypes.CDLL | None:
    compiler = _compiler()
    if compiler is None:
        return None
    try:
        found = _loaded(compiler)
    except (OSError, subprocess.SubprocessError):
        return None
    four, number = 4 * (ctypes.c_int64,), ctypes.c_float
    found.naaf_effects.argtypes = (*8 * (ctypes.c_void_p,), *four, *5 * (number,))
    asking = (*four, *4 * (number,), ctypes.c_int)
    found.word_cosines.argtypes = (*7 * (ctypes.c_void_p,), *asking)
    found.region_cosines.argtypes = (*8 * (ctypes.c_void_p,), *asking)
    for function in (found.naaf_effects, found.word_cosines, found.region_cosines):
        function.restype = None
    return found


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, COMPILERS)), None) if os.name == "posix" else None


def _loaded(compiler: str) -> ctypes.CDLL:
    name = f"host-{_mark(compiler)}.so"
    try:
        kept = _folder() / name
        if not kept.exists():
            _compile(compiler, kept)
        return ctypes.CDLL(str(kept))
    except (OSError, RuntimeError):  # nowhere to keep it: for this process alone
        with scratch_folder("counterfoil-compiled-") as folder:
            _compile(compiler, folder / name)
            return ctypes.CDLL(str(folder / name))


def _folder() -> Path:
    """Where libraries are kept: loaded code must be nobody else's to write."""
    folder = Path.home() / ".cache" / "counterfoil" / "compiled"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    told = folder.stat()
    if told.st_uid != os.getuid() or told.st_mode & 0o022 or not os.access(folder, os.W_OK):
        raise PermissionError(folder)
    return folder


def _compile(compiler: str, target: Path) -> None:
    """Compile, and put the whole file in its place at once."""
    with scratch_folder("compiling-", target.parent) as folder:
        made = folder / target.name
        for native in NATIVE:
            flags = *FLAGS, *native, "-shared", "-fPIC"
            done = subprocess.run(  # noqa: S603 - the compiler that this machine has, on our own file
                [compiler, *flags, str(SOURCE), "-o", str(made), "-lm"],
                capture_output=True,
                timeout=PATIENCE,
                check=False,
            )
            if done.returncode == 0:
                sync_file(made)
                put_in_place(made, target)
                return
    raise OSError(f"{compiler} does not compile {SOURCE.name}")


def _mark(compiler: str) -> str:
    """Of everything that the library depends on."""
    told = os.stat(compiler)
    by = compiler, told.st_size, told.st_mtime_ns
    parts = SOURCE.read_text("utf-8"), FLAGS, NATIVE, by, platform.machine(), _cpu()
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _cpu() -> str:
    """What instructions the CPU has, as Linux says it; elsewhere which CPU it is."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    told = (line for line in lines if line.lower().startswith(("flags", "features", "model name")))
    return "\n".join(sorted({line.split(":", 1)[-1].strip() for line in told}))


def pointers(*tensors: Tensor | None) -> list[int | None]:
    """Where numbers lie, for a function of the library; these are float32 and contiguous."""
    for one in tensors:
        if one is not None and (one.dtype != torch.float32 or not one.is_contiguous()):
            raise TypeError(
                f"{one.dtype} of strides {one.stride()} for a function of {SOURCE.name}"
            )
    return [None if one is None else one.data_ptr() for one in tensors]
