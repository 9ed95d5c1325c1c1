"""Several kernels at once, compiled without a GPU; in a process of its own.

Other tests set Triton's interpreter, in which nothing is compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

PROGRAM = """
import threading
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class NoGpu:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 80, 32)
    def get_active_torch_device(self): return torch.device("cpu")
    def map_python_to_cpp_type(self, kind): return kind

driver.set_active(NoGpu())
from counterfoil.kernels.triton.compilation import compile_together
from counterfoil.kernels.triton.thread_per_caption_kernels import image_queries

compiled = []
def noted(**_): compiled.append(threading.current_thread() is threading.main_thread())
triton.knobs.compilation.listener = noted

def floats(dtype=torch.float32): return torch.zeros(64, dtype=dtype)

def launches(*sizes, first=1):
    arguments = (
        floats(torch.float16), floats(torch.float16), floats(), floats(torch.int32),
        floats(torch.int64), floats(torch.int64), floats(torch.int64), floats(torch.int32),
        floats(), first, 999, 33, 20.0, 1.0,
    )
    constants = dict(
        METHOD="scan", HOW="mean", ACTIVATION="leaky", PROB=False, MASKED=False, R=4, BC=32,
        STRIDE=256, num_warps=1,
    )
    return [(image_queries, (3, 5), arguments, {"N": size, **constants}) for size in sizes]

compile_together(launches(2, 3, 2))
print(*compiled)
compile_together(launches(2, 3, first=16))
print(len(compiled))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's assembler is for Linux")
def test_kernels_are_compiled_once_each_in_threads(tmp_path) -> None:
    triton = pytest.importorskip("triton")
    if not hasattr(triton, "AsyncCompileMode"):
        pytest.skip("this Triton compiles one kernel at a time")
    given = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240,
        env=given | {"TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["False False", "2"]
