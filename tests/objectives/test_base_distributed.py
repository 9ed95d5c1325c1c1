"""Objectives that read encoded batches: two processes do what one does with the same batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterfoil.core.config import build_config
from counterfoil.core.distributed import rank, world_size
from counterfoil.data.batches.collate import Collate
from counterfoil.data.batches.dataset import Augmentation, CaptionItems
from counterfoil.data.batches.sampling import BatchPlan, RankBatches
from counterfoil.models import create_model
from counterfoil.objectives import create_objective
from counterfoil.training.step import TrainingStep
from tests.conftest import make_split
from tests.training.test_trainer_distributed import joined

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dive": (
        "grouped",
        {"hardest": {"reduction": "mean"}, "mmd": 0.5, "uniformity": 0.5},
        {"image": {"head_dim": 8}, "text": {"head_dim": 8}},
    ),
    "hrem": (
        "all",
        {"hardest": {}, "hrem-graph": {"loss": "vse", "warmup": 0, "dropout": 0.0}},
        {},
    ),
    "uniter-small": ("all", {"alignment": {}}, {"matcher": {"layers": 1, "heads": 2}}),
}


def losses_and_gradients(folder: Path, name: str) -> dict[str, Tensor]:
    """Of a global batch, as this process, one of however many, finds them."""
    captions, objective, parts = CASES[name]
    data = folder / f"data-{rank()}-{world_size()}"
    data.mkdir(parents=True)
    split = make_split(data, "train", 24, 0)
    config = build_config(
        {"model": {"name": name, "embed_size": 16, **parts}, "data": {"min_count": 1}}
    )
    torch.manual_seed(0)
    model = create_model(config.model, split, config.data).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    loss_of = create_objective(objective)
    loss_of.prepare(SimpleNamespace(embed_size=16))
    step = TrainingStep(model, loss_of.double(), None)
    plan = BatchPlan(split, 9, seed=3, captions=captions)  # unequal shares
    items = CaptionItems(split, model.text, Augmentation(0.3, 0.2), 3)
    indices = next(iter(RankBatches(plan, epoch=0, rank=rank(), world=world_size())))
    batch = Collate(model.text.pad)([items[index] for index in indices])
    images = replace(batch.images, fragments=batch.images.fragments.double())
    run = joined(step)
    loss, _ = run(replace(batch, images=images), 0, 0)
    loss.backward()
    gradients = {n: p.grad for n, p in step.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


@pytest.mark.parametrize("name", CASES)
def test_two_processes_give_the_losses_and_gradients_of_one(
    tmp_path, in_two_processes, name
) -> None:
    one = losses_and_gradients(tmp_path, name)
    two = in_two_processes(losses_and_gradients, tmp_path, name)[0]
    assert one.keys() == two.keys()
    assert name != "hrem" or any("graph.layer" in key for key in one)
    for key, value in one.items():
        assert torch.allclose(two[key], value, rtol=1e-7, atol=1e-9), key
