"""Two processes whose pairs bring different numbers of extras do what one process does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from counterfoil.core.distributed import rank, world_size
from counterfoil.data.batches.collate import Collate, PairBatch
from counterfoil.data.batches.dataset import Augmentation, CaptionItems
from counterfoil.data.batches.sampling import BatchPlan, RankBatches
from counterfoil.data.pairs import Split
from counterfoil.models.store import save_pretrained
from counterfoil.objectives import create_objective, foils  # noqa: F401 - registered
from counterfoil.training.step import TrainingStep
from tests.conftest import make_split, thinned
from tests.objectives.live import prepare, small_model

SIZE = 11  # shares of six and five
CASES = {
    "foils of both": {"foils": {"source": "some.jsonl", "count": 2}},
    "foils of one": {"hardest": 1, "foils": {"source": "first.jsonl"}},
    "foils of the other": {"hardest": 1, "foils": {"source": "last.jsonl", "hardest": False}},
    "negclip": {"negclip": {"source": "some.jsonl", "count": 2}},
    "negclip, foils of one": {"negclip": {"source": "first.jsonl"}},
    "siglip": {"siglip-foils": {"source": "last.jsonl"}},
    "ce-clip": {"ce-clip": {"source": "last.jsonl", "count": 2}},
    "triplet-clip": {"triplet-clip": {"source": "some.jsonl", "images": "first", "count": 2}},
    "triplet-clip, foils of one": {"triplet-clip": {"source": "first.jsonl", "images": "first"}},
    "fsc-clip": {"fsc-clip": {"source": "some.jsonl", "count": 2}},
    "quintuplets": {"aoq": {"first": "first", "candidates": 10}},
}


def one_batch(split: Split, text, objective) -> PairBatch:
    """This process's share of the first batch, in double precision."""
    items = CaptionItems(split, text, Augmentation(), 3, objective.extra_sources_by_term())
    batches = RankBatches(BatchPlan(split, SIZE, seed=3), 0, rank=rank(), world=world_size())
    batch = Collate(text.pad)([items[index] for index in next(iter(batches))])
    extras = {
        name: replace(extra, images=extra.images and doubled(extra.images))
        for name, extra in batch.extras.items()
    }
    return replace(batch, images=doubled(batch.images), extras=extras)


def doubled(images):
    return replace(images, fragments=images.fragments.double())


def losses_and_gradients(folder: Path, name: str, training: bool) -> dict[str, dict]:
    """Of a model in every case, as this process, one of however many, finds them."""
    split = make_split(folder / f"data-{world_size()}-{rank()}", "train", 20, 0)
    results = {}
    for case, spec in CASES.items():
        model = small_model(split, name).double().train(training)
        objective = create_objective(spec)
        prepare(objective, split, model)
        step = TrainingStep(model, objective, None)
        run = (
            DistributedDataParallel(step, find_unused_parameters=True) if world_size() > 1 else step
        )
        loss, diagnostics = run(one_batch(split, model.text, objective), 0, 0)
        loss.backward()
        results[case] = {
            "loss": loss.detach(),
            "gap": diagnostics.get("foils/gap", diagnostics.get("offline/gap")),
            "gradients": {
                key: value.grad for key, value in model.named_parameters() if value.grad is not None
            },
        }
    return results


def write_sources(folder: Path) -> None:
    """Foils of some captions of the batch, of the first only, of the last only; a first model."""
    split = make_split(folder / "data-1-0", "train", 20, 0)
    plan = BatchPlan(split, SIZE, seed=3)
    batch = plan.batch(plan.order(0), 0).tolist()
    sources = {"some": batch[::2], "first": batch[:2], "last": batch[-2:]}
    for name, captions in sources.items():
        lines = [
            json.dumps(
                {
                    "image": split.ids[split.image_of[c]],
                    "caption": split.texts[c],
                    "foil": f"{word} {split.texts[c]}",
                }
            )
            for c in captions
            for word in ("kite", "boat")[: 1 + c % 2]
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    save_pretrained(small_model(split, "vse-fc"), folder / "first")


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Path:
    """The folder of the files that the cases name, in which this process works."""
    monkeypatch.chdir(tmp_path)
    for name in ("1-0", "2-0", "2-1"):
        (tmp_path / f"data-{name}").mkdir()
    write_sources(tmp_path)
    return tmp_path


@pytest.mark.parametrize("model", thinned(["vse-fc", "scan-t2i"], "vse-fc"))
def test_two_processes_give_the_loss_and_gradients_of_one(model, sources, in_two_processes) -> None:
    one = losses_and_gradients(sources, model, training=False)
    two = in_two_processes(losses_and_gradients, sources, model, False)[0]
    assert one.keys() == two.keys()
    for case, mine in one.items():
        theirs = two[case]
        assert float(theirs["loss"]) == pytest.approx(float(mine["loss"]), rel=1e-9), case
        assert float(theirs["loss"]) > 0
        assert float(theirs["gap"]) == pytest.approx(float(mine["gap"]), rel=1e-9), case
        for name, gradient in mine["gradients"].items():
            assert torch.allclose(theirs["gradients"][name], gradient, rtol=1e-7, atol=1e-10), case


@pytest.mark.slow
def test_processes_with_statistics_over_all_meet_whatever_each_has_to_score(
    sources, in_two_processes
) -> None:
    for results in in_two_processes(losses_and_gradients, sources, "saf", True):
        assert results.keys() == CASES.keys()
        assert all(result["loss"].isfinite() for result in results.values())
