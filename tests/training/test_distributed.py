"""Two processes with a global batch do what one process does with the same batch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.test_parallel import descendants, is_alive

SCRIPT = """
import os, sys, torch
from pathlib import Path
from counterfoil.config import build_config
from counterfoil.data.batches import Augmentation, CaptionItems, Collate
from counterfoil.data.pairs import Pairs
from counterfoil.data.sampling import BatchPlan, RankBatches
from counterfoil.collectives import rank, world_size
from counterfoil.models import create_model
from counterfoil.objectives import create_objective
from counterfoil.training.distributed import processes
from counterfoil.training.step import TrainingStep
from torch.nn.parallel import DistributedDataParallel
from tests.conftest import make_split

torch.set_num_threads(1)
folder, model_name, objective = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
with processes(dict(os.environ)) as first:
    data = folder / f"data-{rank()}-{world_size()}"
    data.mkdir(parents=True)
    pairs = Pairs("c", {"train": make_split(data, "train", 24, 0)})
    config = build_config({"model": {"name": model_name, "embed_size": 16},
                           "data": {"min_count": 1}})
    torch.manual_seed(0)
    model = create_model(config.model, pairs.train, config.data).double()
    step = TrainingStep(model, create_objective(objective), None)
    run = DistributedDataParallel(step, broadcast_buffers=False, find_unused_parameters=True) \\
        if world_size() > 1 else step
    plan = BatchPlan(pairs.train, 15, seed=3)  # an odd batch: unequal shares
    items = CaptionItems(pairs.train, model.text, Augmentation(0.3, 0.2), 3)
    batches = RankBatches(plan, epoch=0, rank=rank(), world=world_size())
    losses = []
    for indices in list(batches)[:2]:
        batch = Collate(model.text.pad)([items[index] for index in indices])
        from dataclasses import replace
        images = replace(batch.images, fragments=batch.images.fragments.double())
        loss, _ = run(replace(batch, images=images), 0, 0)
        loss.backward()
        losses.append(float(loss.detach()))
    if first:
        torch.save({"losses": losses,
                    "grads": {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
                    "buffers": dict(model.named_buffers())}, folder / f"{world_size()}.pt")
"""


@pytest.mark.parametrize("objective", ["hardest", "triplet"])
@pytest.mark.parametrize("model", ["rvse-mlp", "vse++", "naaf"])
def test_two_processes_give_the_loss_and_gradients_of_one(tmp_path, model, objective) -> None:
    root = Path(__file__).parents[2]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for launcher in ([sys.executable], torchrun):
        done = subprocess.run(
            [*launcher, str(script), str(tmp_path), model, objective],
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


WAITING = """
import os, time
from counterfoil.training.distributed import processes

with processes(dict(os.environ)):
    print("started", flush=True)
    time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs /proc")
def test_processes_of_a_torchrun_that_was_killed_end(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WAITING)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with subprocess.Popen([*torchrun, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        lines = [parent.stdout.readline() for _ in range(2)]
        started = descendants(parent.pid)
        parent.kill()
        parent.stdout.close()
    assert lines == ["started\n"] * 2
    end = time.monotonic() + 60
    while any(map(is_alive, started)) and time.monotonic() < end:
        time.sleep(0.1)
    left = [pid for pid in started if is_alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []
