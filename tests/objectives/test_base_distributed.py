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
from counterfoil.core.errors import ConfigError
from counterfoil.core.progress import Silent
from counterfoil.data.batches.collate import Collate
from counterfoil.data.batches.dataset import Augmentation, CaptionItems
from counterfoil.data.batches.sampling import BatchPlan, RankBatches
from counterfoil.encoders.images import TransformerEncoder
from counterfoil.models import create_model
from counterfoil.objectives import create_objective
from counterfoil.objectives.foils import anchor_rows, anchor_shares
from counterfoil.training.services import TrainingRunSetup
from counterfoil.training.step import TrainingStep
from tests.conftest import make_split
from tests.training.test_trainer_distributed import joined

UNITER = {"name": "uniter-small", "matcher": {"layers": 1, "heads": 2, "extras": ["mlm"]}}
TAGS = {"masks": 2, "samples": 3, "kept": 2, "mlm": 1.0, "rank": 1.0, "anchors": 5}
DIVE = {"name": "dive", "image": {"head_dim": 8}, "text": {"head_dim": 8}}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dive": ("grouped", {"hardest": {"reduction": "mean"}, "mmd": 0.5, "uniformity": 0.5}, DIVE),
    "hrem": (
        "all",
        {"hardest": {}, "hrem-graph": {"loss": "vse", "warmup": 0, "dropout": 0.0}},
        {"name": "hrem"},
    ),
    "attention to padding": (
        "all",
        {"hardest": {}},
        {"name": "chan", "image": {"name": "self-attention", "form": "reference"}},
    ),
    "alignment": ("all", {"alignment": {}}, UNITER),
    "sampled negatives": ("all", {"alignment": {"kept": 2}}, UNITER),
    "sampled negatives of groups": ("grouped", {"alignment": {"kept": 2}}, UNITER),
    "hardest candidates": ("all", {"hard-candidates": {"kept": 2, "anchors": 4}}, UNITER),
    "hardest candidates of groups": ("grouped", {"hard-candidates": {"kept": 2}}, UNITER),
    "masked words": ("all", {"mlm": {"masks": 2}}, UNITER),
    "generated foils": ("all", {"tags": TAGS}, UNITER),
    "counterfactuals": ("all", {"cfm": {"adjust": 1.0, "explore": 1.0}}, {"name": "scan-t2i"}),
    "counterfactuals of groups": (
        "grouped", {"cfm": {"adjust": 1.0, "explore": 1.0}}, {"name": "vse-fc"}
    ),
}  # fmt: skip


def losses_and_gradients(folder: Path, name: str) -> dict[str, Tensor]:
    """Of a global batch, as this process, one of however many, finds them."""
    captions, objective, model_spec = CASES[name]
    data = folder / f"data-{rank()}-{world_size()}"
    data.mkdir(parents=True)
    split = make_split(data, "train", 24, 0)
    config = build_config({"model": {"embed_size": 16, **model_spec}, "data": {"min_count": 1}})
    torch.manual_seed(0)
    model = create_model(config.model, split, config.data).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    loss_of = create_objective(objective)
    loss_of.prepare(TrainingRunSetup(split, model, config, torch.device("cpu"), Silent()))
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


def anchors_of_seven(anchors: int) -> list[int] | str:
    """Anchors among this process's share of seven pairs: four of the first, three of the second."""
    pairs = torch.arange(7) if world_size() == 1 else torch.arange(7).tensor_split(2)[rank()]
    batch = SimpleNamespace(owners=pairs)
    try:
        return pairs[anchor_rows(batch, anchors)].tolist()
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("anchors", [0, 2, 3, 5, 9])
def test_processes_divide_the_anchors_of_one(in_two_processes, anchors) -> None:
    alone = anchors_of_seven(anchors)
    assert len(alone) == (anchors if 0 < anchors < 7 else 7)
    first, second = in_two_processes(anchors_of_seven, anchors)
    assert first + second == alone


def test_a_process_without_an_anchor_is_an_error_in_all(in_two_processes) -> None:
    for message in in_two_processes(anchors_of_seven, 1):
        assert "anchors=1: a process of 2 has no anchor" in message
        assert "set at least 4 anchors" in message
        assert "train.drop_last=true" in message


def test_twice_as_many_anchors_as_processes_leave_none_without() -> None:
    def least(processes: int, pairs: int, anchors: int) -> int:
        counts = [len(share) for share in torch.arange(pairs).tensor_split(processes)]
        return min(map(len, anchor_shares(counts, anchors)))

    for processes in (2, 3, 4, 8):
        for anchors in range(2 * processes, 4 * processes):
            assert all(least(processes, pairs, anchors) for pairs in range(anchors + 1, 60))
    assert least(4, 6, 4) == 0  # as many as processes are not enough


def train_across_images() -> str:
    encoder = TransformerEncoder(4, 8, form="reference")
    with pytest.raises(ConfigError) as refused:
        encoder.project(torch.zeros(2, 3, 4), torch.ones(2, 3).bool())
    encoder.eval().project(torch.zeros(2, 3, 4), torch.ones(2, 3).bool())
    return str(refused.value)


def test_an_encoder_that_mixes_the_images_of_a_batch_trains_in_one_process(
    in_two_processes,
) -> None:
    for message in in_two_processes(train_across_images):
        assert "model.image.form=reference" in message
        assert "trains in one process" in message


@pytest.mark.parametrize("name", CASES)
def test_two_processes_give_the_losses_and_gradients_of_one(
    tmp_path, in_two_processes, name
) -> None:
    one = losses_and_gradients(tmp_path, name)
    two = in_two_processes(losses_and_gradients, tmp_path, name)[0]
    assert one.keys() == two.keys()
    assert float(one["loss"]) != 0
    assert any(bool(value.any()) for key, value in one.items() if key != "loss")
    assert name != "hrem" or any("graph.layer" in key for key in one)
    for key, value in one.items():
        assert torch.allclose(two[key], value, rtol=1e-7, atol=1e-9), key
