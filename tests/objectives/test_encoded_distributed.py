"""Objectives that read encoded batches: two processes do what one does with the same batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = """
import os, sys, torch
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
import counterfoil.objectives.diversity, counterfoil.objectives.relations
from counterfoil.collectives import rank, world_size
from counterfoil.config import build_config
from counterfoil.data.batches import Augmentation, CaptionItems, Collate
from counterfoil.data.pairs import Pairs
from counterfoil.data.sampling import BatchPlan, RankBatches
from counterfoil.models import create_model
from counterfoil.objectives import create_objective
from counterfoil.training.distributed import processes
from counterfoil.training.step import TrainingStep
from torch.nn.parallel import DistributedDataParallel
from tests.conftest import make_split

torch.set_num_threads(1)
CASES = {
    "dive": ("grouped", {"hardest": {"reduction": "mean"}, "mmd": 0.5, "uniformity": 0.5},
             {"image": {"head_dim": 8}, "text": {"head_dim": 8}}),
    "hrem": ("all", {"hardest": {},
                     "hrem-graph": {"loss": "vse", "warmup": 0, "dropout": 0.0}}, {}),
    "uniter-small": ("all", {"alignment": {}}, {"matcher": {"layers": 1, "heads": 2}}),
}
folder = Path(sys.argv[1])
with processes(dict(os.environ)) as first:
    data = folder / f"data-{rank()}-{world_size()}"
    data.mkdir(parents=True)
    pairs = Pairs("c", {"train": make_split(data, "train", 24, 0)})
    found = {}
    for name, (captions, objective, parts) in CASES.items():
        config = build_config({"model": {"name": name, "embed_size": 16, **parts},
                               "data": {"min_count": 1}})
        torch.manual_seed(0)
        model = create_model(config.model, pairs.train, config.data).double()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            if isinstance(module, torch.nn.MultiheadAttention):
                module.dropout = 0.0
        loss_of = create_objective(objective)
        loss_of.prepare(SimpleNamespace(embed_size=16))
        step = TrainingStep(model, loss_of.double(), None)
        run = DistributedDataParallel(step, broadcast_buffers=False, find_unused_parameters=True) \\
            if world_size() > 1 else step
        plan = BatchPlan(pairs.train, 9, seed=3, captions=captions)  # unequal shares
        items = CaptionItems(pairs.train, model.text, Augmentation(0.3, 0.2), 3)
        indices = next(iter(RankBatches(plan, epoch=0, rank=rank(), world=world_size())))
        batch = Collate(model.text.pad)([items[index] for index in indices])
        images = replace(batch.images, fragments=batch.images.fragments.double())
        loss, _ = run(replace(batch, images=images), 0, 0)
        loss.backward()
        found[f"{name}/loss"] = loss.detach()
        found |= {f"{name}/{n}": p.grad for n, p in step.named_parameters() if p.grad is not None}
    if first:
        torch.save(found, folder / f"{world_size()}.pt")
"""


@pytest.mark.slow
def test_two_processes_give_the_losses_and_gradients_of_one(tmp_path) -> None:
    root = Path(__file__).parents[2]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for launcher in ([sys.executable], torchrun):
        done = subprocess.run(
            [*launcher, str(script), str(tmp_path)],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = (torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in (1, 2))
    assert one.keys() == two.keys()
    assert any("graph.layer" in name for name in one)
    for name, value in one.items():
        assert torch.allclose(two[name], value, rtol=1e-7, atol=1e-9), name
