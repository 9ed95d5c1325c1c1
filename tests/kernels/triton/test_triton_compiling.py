"""What the interpreter runs, the compiler takes as well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.parametrize(
    ("names", "fewest"),
    [
        (["naaf", "chan-lse"], 8),
        (["maxsim"], 30),
        (["attention"], 7),
        pytest.param([], 50, marks=pytest.mark.slow),
    ],
    ids=["some", "maxsim", "attention", "all"],
)
def test_kernels_compile_for_a_gpu_that_is_not_there(names, fewest) -> None:
    root = Path(__file__).parents[3]
    paths = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiling", *names],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > fewest
