"""Two processes that encode in chunks do what one process does with the whole batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.training.test_distributed import SCRIPT

STEP = "TrainingStep(model, create_objective(objective), None)"
CHUNKED = "TrainingStep(model, create_objective(objective), None, 3 if world_size() > 1 else 0)"


@pytest.mark.parametrize("model", ["rvse-mlp", "naaf"])
def test_two_processes_in_chunks_give_the_gradients_of_one_whole(tmp_path, model) -> None:
    assert SCRIPT.count(STEP) == 1
    root = Path(__file__).parents[2]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace(STEP, CHUNKED))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for launcher in ([sys.executable], torchrun):
        done = subprocess.run(
            [*launcher, str(script), str(tmp_path), model, "hardest"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = (torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in (1, 2))
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-9)
    assert one["grads"].keys() == two["grads"].keys()
    for name, grad in one["grads"].items():
        assert torch.allclose(two["grads"][name], grad, rtol=1e-7, atol=1e-9), name
    for name, buffer in one["buffers"].items():
        assert torch.allclose(two["buffers"][name].double(), buffer.double(), rtol=1e-9), name
