"""Two processes with a global batch do what one process does with the same batch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from counterfoil.core.config import build_config
from counterfoil.core.distributed import rank, world_size
from counterfoil.data.batches.collate import Collate
from counterfoil.data.batches.dataset import Augmentation, CaptionItems
from counterfoil.data.batches.sampling import BatchPlan, RankBatches
from counterfoil.matchers import fragment_matcher
from counterfoil.models import create_model
from counterfoil.objectives import create_objective
from counterfoil.training.step import TrainingStep
from tests.conftest import make_split, thinned
from tests.core.test_parallel import descendants, is_alive


def losses_and_gradients(
    folder: Path, name: str, objective: str, chunk: int = 0, **parts: Any
) -> dict[str, Any]:
    """Of two global batches, as this process, one of however many, finds them."""
    data = folder / f"data-{rank()}-{world_size()}"
    data.mkdir(parents=True)
    split = make_split(data, "train", 24, 0)
    config = build_config(
        {"model": {"name": name, "embed_size": 16, **parts}, "data": {"min_count": 1}}
    )
    torch.manual_seed(0)
    model = create_model(config.model, split, config.data).double()
    for module in model.modules():  # each process draws its own
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    step = TrainingStep(model, create_objective(objective), None, chunk)
    run = joined(step)
    plan = BatchPlan(split, 15, seed=3)  # an odd batch: unequal shares
    items = CaptionItems(split, model.text, Augmentation(0.3, 0.2), 3)
    losses = []
    for indices in list(RankBatches(plan, epoch=0, rank=rank(), world=world_size()))[:2]:
        batch = Collate(model.text.pad)([items[index] for index in indices])
        images = replace(batch.images, fragments=batch.images.fragments.double())
        loss, _ = run(replace(batch, images=images), 0, 0)
        loss.backward()
        losses.append(float(loss.detach()))
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"losses": losses, "grads": grads, "buffers": dict(model.named_buffers())}


def joined(step: torch.nn.Module) -> torch.nn.Module:
    """The step as one of several processes runs it."""
    if world_size() == 1:
        return step
    return DistributedDataParallel(step, broadcast_buffers=False, find_unused_parameters=True)


def check_alike(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-9)
    assert one["grads"].keys() == two["grads"].keys()
    for name, grad in one["grads"].items():
        assert torch.allclose(two["grads"][name], grad, rtol=1e-7, atol=1e-9), name
    for name, buffer in one["buffers"].items():
        assert torch.allclose(two["buffers"][name].double(), buffer.double(), rtol=1e-9), name


@pytest.mark.parametrize("objective", ["hardest", "triplet"])
@pytest.mark.parametrize("model", ["rvse-mlp", "vse++", "naaf"])
def test_two_processes_give_the_loss_and_gradients_of_one(
    tmp_path, in_two_processes, model, objective
) -> None:
    one = losses_and_gradients(tmp_path, model, objective)
    check_alike(one, in_two_processes(losses_and_gradients, tmp_path, model, objective)[0])


NORMS: dict[str, dict[str, Any]] = {
    "saf": {"matcher": {"sim_dim": 8}},
    "sgr": {"matcher": {"sim_dim": 8}},
    "vsrn": {"image": {"final_norm": True}},
    "vse-infty": {"image": {"form": "reference"}},  # padding counts
}


def with_norms(folder: Path, name: str) -> dict[str, Any]:
    with mock.patch.object(fragment_matcher, "SMALLEST_GROUP", 2):  # several groups of texts
        return losses_and_gradients(folder, name, "hardest", **NORMS[name])


@pytest.mark.parametrize("model", thinned(NORMS, "saf", "vse-infty"))
def test_batch_statistics_are_those_of_all_processes(tmp_path, in_two_processes, model) -> None:
    one = with_norms(tmp_path, model)
    assert any("running_mean" in name for name in one["buffers"])
    check_alike(one, in_two_processes(with_norms, tmp_path, model)[0])


WAITING = """
import os, time
from counterfoil.core.distributed import processes

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
