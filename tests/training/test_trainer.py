"""The training loop: learns, resumes to the same bits, survives a kill, refuses bad numbers."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from counterfoil.core.config import build_config
from counterfoil.core.errors import CheckpointError, DataError, TrainingError
from counterfoil.core.parallel import usable_cores
from counterfoil.core.progress import Silent
from counterfoil.models import create_model, from_pretrained
from counterfoil.training.trainer import Trainer
from tests.conftest import thinned

BASE = {
    "model": {"name": "rvse-mlp", "embed_size": 32, "text": {"word_dim": 16, "dropout": 0.1}},
    "data": {"min_count": 1, "drop_regions": 0.2, "word_noise": 0.1},
    "train": {"epochs": 2, "batch_size": 32, "log_every": 1},
}


def config(**train):
    return build_config({**BASE, "train": {**BASE["train"], **train}})


def trainer(pairs, folder, settings=None, **kwargs) -> Trainer:
    settings = settings or config()
    torch.manual_seed(settings.seed)
    model = create_model(settings.model, pairs.train, settings.data)
    return Trainer(model, pairs, settings, folder, **kwargs)


def metrics(folder: Path) -> bytes:
    return (folder / "metrics.jsonl").read_bytes()


def weights(folder: Path) -> bytes:
    return (folder / "last" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(concepts, tmp_path_factory) -> Path:
    """A run of the base settings that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    trainer(concepts, folder).run()
    return folder


def test_training_learns_and_leaves_best_last_config_and_metrics(concepts, tmp_path) -> None:
    settings = config(epochs=4, optimizer={"lr": 6e-3})
    result = trainer(concepts, tmp_path, settings).run()
    epochs = [json.loads(line) for line in metrics(tmp_path).splitlines()]
    rsums = [record["dev"]["rsum"] for record in epochs if record["kind"] == "epoch"]
    assert rsums[-1] > rsums[0] + 50
    assert result.best_rsum == max(rsums)
    assert from_pretrained(tmp_path / "best").spec.name == "rvse-mlp"
    assert (tmp_path / "last").exists()
    assert (tmp_path / "config.yaml").exists()


def test_a_diagnostic_with_a_gradient_is_logged_without_a_warning(concepts, tmp_path) -> None:
    training = trainer(concepts, tmp_path, config(epochs=1))
    (term,) = training.objective.terms.values()  # as an objective of a user might do
    term.diagnostics = lambda directions: {"mine": directions[0].positive.mean()}
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Converting a tensor with requires_grad")
            training.run()
    finally:
        torch.set_warn_always(before)
    assert any("mine" in json.loads(line) for line in metrics(tmp_path).splitlines())


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(
    concepts, tmp_path, whole
) -> None:
    for name, seed in {"same": 0, "other": 1}.items():
        settings = build_config({**BASE, "seed": seed})
        trainer(concepts, tmp_path / name, settings).run()
    assert metrics(tmp_path / "same") == metrics(whole)
    assert metrics(tmp_path / "other") != metrics(whole)


def test_the_number_of_workers_changes_nothing(concepts, tmp_path, whole) -> None:
    settings = build_config({**BASE, "data": {**BASE["data"], "workers": 2}})
    trainer(concepts, tmp_path, settings).run()
    assert metrics(tmp_path) == metrics(whole)


def test_a_run_starts_no_more_loader_processes_than_it_has_cores(concepts, tmp_path) -> None:
    class Counts(Silent):
        most, said = 0, ""

        def track(self, items, *args, **kwargs):
            for item in items:
                self.most = max(self.most, len(multiprocessing.active_children()))
                yield item

        def say(self, text: str) -> None:
            self.said += text

    before, counts = len(multiprocessing.active_children()), Counts()
    data = {**BASE["data"], "workers": usable_cores() + 3}
    settings = build_config({**BASE, "data": data, "train": {**BASE["train"], "epochs": 1}})
    trainer(concepts, tmp_path, settings, progress=counts).run()
    assert counts.most - before == usable_cores()
    assert "data.workers" in counts.said


@pytest.mark.parametrize("stop_after", thinned([1, 4, 7, 11], 7))
def test_an_interrupted_run_resumes_to_the_same_bytes(
    concepts, tmp_path, whole, stop_after
) -> None:
    asked = iter(range(1000))
    first = trainer(
        concepts, tmp_path / "cut", should_stop=lambda: next(asked) + 1 >= stop_after
    ).run()
    assert first.interrupted
    trainer(concepts, tmp_path / "cut").run(resume=True)
    assert metrics(tmp_path / "cut") == metrics(whole)
    assert weights(tmp_path / "cut") == weights(whole)


@pytest.mark.parametrize(
    "train",
    [
        {"accumulate": 2, "save_every": 2, "schedule": {"name": "cosine", "warmup_steps": 3}},
        pytest.param(
            {"optimizer": {"name": "sgd", "lr": 0.05}, "save_every": 4}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"schedule": {"name": "cosine", "warmup_steps": 3}, "save_every": 5},
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.slow
def test_accumulation_and_schedules_resume_exactly_too(concepts, tmp_path, train) -> None:
    trainer(concepts, tmp_path / "whole", config(**train)).run()
    asked = iter(range(1000))
    cut = trainer(concepts, tmp_path / "cut", config(**train), should_stop=lambda: next(asked) >= 3)
    assert cut.run().interrupted
    trainer(concepts, tmp_path / "cut", config(**train)).run(resume=True)
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")


KILLED = """
import sys, time
from pathlib import Path
from counterfoil.data.pairs import Pairs
from tests.conftest import make_split
from tests.training.test_trainer import config, trainer

folder = Path(sys.argv[1])
data = folder / "data"
data.mkdir(exist_ok=True)
sizes = {"train": 96, "dev": 32}
pairs = Pairs("c", {n: make_split(data, n, k, s) for s, (n, k) in enumerate(sizes.items())})
resume = (folder / "run" / "last").exists()
trainer(pairs, folder / "run", config(epochs=12, save_every=2)).run(resume=resume)
print("done", flush=True)
"""


@pytest.mark.slow
def test_a_run_killed_with_sigkill_again_and_again_ends_where_the_uninterrupted_one_does(
    tmp_path,
) -> None:
    root = Path(__file__).parents[2]

    def start(folder: Path) -> subprocess.Popen[str]:
        folder.mkdir(exist_ok=True)
        return subprocess.Popen(
            [sys.executable, "-c", KILLED, str(folder)],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    whole = start(tmp_path / "whole")
    out, err = whole.communicate(timeout=120)
    assert "done" in out, err
    kills = 0
    for _ in range(12):
        process = start(tmp_path / "cut")
        size = 0
        while process.poll() is None:
            path = tmp_path / "cut" / "run" / "metrics.jsonl"
            now = path.stat().st_size if path.exists() else 0
            if kills < 2 and now > size + 1500 and size:
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            size = size or now
            time.sleep(0.01)
        out, err = process.communicate(timeout=120)
        if "done" in out:
            break
    assert "done" in out, err
    assert kills >= 1
    assert metrics(tmp_path / "cut" / "run") == metrics(tmp_path / "whole" / "run")
    assert weights(tmp_path / "cut" / "run") == weights(tmp_path / "whole" / "run")


def test_a_loss_without_a_gradient_is_named(concepts, tmp_path, monkeypatch) -> None:
    run = trainer(concepts, tmp_path)
    compute = run.objective.compute
    monkeypatch.setattr(
        run.objective,
        "compute",
        lambda *given: (report := compute(*given)) and replace(report, loss=report.loss.detach()),
    )
    with pytest.raises(TrainingError, match="the loss does not depend on the model"):
        run.run()


@pytest.mark.slow
def test_a_run_with_compiled_encoders_validates_and_resumes(concepts, tmp_path) -> None:
    first = trainer(concepts, tmp_path, config(epochs=2, compile=True))
    result = first.run()
    assert math.isfinite(result.best_rsum)
    assert result.steps == trainer(concepts, tmp_path / "plain", config(epochs=2)).run().steps
    again = trainer(concepts, tmp_path, config(epochs=2, compile=True))
    assert again.run(resume=True).steps == result.steps


def test_resuming_where_there_is_nothing_is_a_clear_error(concepts, tmp_path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        trainer(concepts, tmp_path).run(resume=True)


def test_a_run_is_not_resumed_on_other_data(concepts, tmp_path) -> None:
    trainer(concepts, tmp_path, config(epochs=1)).run()
    train = concepts.train
    captions = [train.captions[1], train.captions[0], *train.captions[2:]]
    splits = {**concepts.splits, "train": replace(train, captions=captions)}
    other = replace(concepts, splits=splits)
    with pytest.raises(DataError, match="no longer those that the run began with"):
        trainer(other, tmp_path).run(resume=True)
    state = torch.load(tmp_path / "last" / "training_state.pt", weights_only=False)
    assert state["position"]["data_digest"] == train.digest


def test_a_damaged_training_state_is_named(concepts, tmp_path) -> None:
    trainer(concepts, tmp_path, config(epochs=1)).run()
    (tmp_path / "last" / "training_state.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"training_state\.pt: damaged or changed"):
        trainer(concepts, tmp_path).run(resume=True)


def test_a_loss_that_is_not_finite_stops_before_the_update_and_names_the_batch(
    concepts, tmp_path
) -> None:
    run = trainer(concepts, tmp_path)
    with torch.no_grad():
        run.model.image_encoder.fc.weight[0, 0] = float("nan")
    before = run.model.text_encoder.embed.weight.clone()
    with pytest.raises(TrainingError, match=r"epoch 1, batch 1: the loss is nan.*train-"):
        run.run()
    assert torch.equal(run.model.text_encoder.embed.weight, before)


def test_a_batch_is_named_by_what_is_left_where_images_are_set_aside(concepts, tmp_path) -> None:
    settings = build_config({**BASE, "objective": {"meta-spn": {"meta_share": 0.3}}})
    run = trainer(concepts, tmp_path, settings)
    batch = run.batches.items[0, 5, 0]
    expected = run.batches.items.split.ids[batch.image]
    assert expected != concepts.train.ids[batch.image]
    collated = next(iter(run.batches.loader(0, 0)))
    ids = run.batches.items.split.ids
    named = ", ".join(ids[image] for image in collated.image_ids[:8].tolist())
    with pytest.raises(TrainingError, match=f"First images of the batch: {named}"):
        run._check(float("nan"), collated)


def test_processes_that_read_end_with_a_run_that_fails(concepts, tmp_path) -> None:
    others = multiprocessing.active_children()
    settings = build_config({**BASE, "data": {**BASE["data"], "workers": 1}})
    run = trainer(concepts, tmp_path, settings)
    with torch.no_grad():
        run.model.image_encoder.fc.weight[0, 0] = float("nan")
    with pytest.raises(TrainingError, match="the loss is nan"):
        run.run()
    assert multiprocessing.active_children() == others


def test_an_image_with_a_bad_feature_is_skipped_and_counted(tmp_path) -> None:
    from counterfoil.data.pairs import Pairs
    from tests.conftest import make_split

    pairs = Pairs("c", {n: make_split(tmp_path, n, 40, 1) for n in ("train", "dev")})
    features = np.load(tmp_path / "train_ims.npy", mmap_mode="r+")
    features[3, 0, 0] = np.nan
    features.flush()
    result = trainer(
        pairs, tmp_path / "run", config(epochs=2, batch_size=16, drop_last=False)
    ).run()
    assert result.skipped == 1  # however many captions and epochs met it


@pytest.mark.slow
def test_a_full_disk_leaves_the_checkpoint_before_it(tmp_path) -> None:
    """A real limit on file sizes, in a process of its own."""
    code = KILLED.replace(
        "resume = (",
        "import resource\nlimit = int(sys.argv[2])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)) if limit else None\nresume = (",
    ).replace("epochs=12", "epochs=2")
    root = Path(__file__).parents[2]

    def start(limit: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                sys.executable,
                "-c",
                code,
                str(tmp_path),
                str(limit),
            ],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "PYTHONFAULTHANDLER": "0"},
        )

    full = start(30_000)
    assert "could not be written" in full.stderr, full.stderr
    leftovers = list((tmp_path / "run" / "checkpoints").iterdir())
    assert leftovers == []
    assert "done" in start(0).stdout


@pytest.mark.slow
def test_early_stopping_ends_a_run_that_no_longer_improves(concepts, tmp_path) -> None:
    settings = config(epochs=50, early_stop=2, optimizer={"lr": 1e-9})
    result = trainer(concepts, tmp_path, settings).run()
    assert result.steps < 50 * 6


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains_on_the_cpu(concepts, tmp_path, precision) -> None:
    result = trainer(concepts, tmp_path, config(epochs=1, precision=precision)).run()
    assert result.best_rsum > 0


def test_tensorboard_files_are_written_on_request(concepts, tmp_path) -> None:
    pytest.importorskip("tensorboard")
    trainer(concepts, tmp_path, config(epochs=1, tensorboard=True)).run()
    assert list((tmp_path / "tensorboard").glob("events.*"))


@pytest.mark.parametrize("name", thinned(["naaf", "scan-t2i", "chan", "vse-infty", "saf"], "naaf"))
@pytest.mark.slow
def test_mixed_precision_trains_whatever_the_sides_are_made_of(concepts, tmp_path, name) -> None:
    """On a CPU a recurrent network stays in single precision beside linear layers that do not."""
    settings = build_config(
        {
            "model": {"name": name, "embed_size": 32, "text": {"word_dim": 16}},
            "data": {"min_count": 1},
            "train": {"epochs": 1, "batch_size": 32, "precision": "bf16", "device": "cpu"},
        }
    )
    result = trainer(concepts, tmp_path, settings).run()
    assert result.steps > 0
    assert np.isfinite(result.best_rsum)


def test_a_part_of_dev_can_choose_the_epoch(concepts, tmp_path, monkeypatch) -> None:
    from counterfoil.data.splits import evenly_spaced
    from counterfoil.training import trainer as loop

    seen = []

    def noted(model, split, **options):
        seen.append(split.ids)
        return evaluate(model, split, **options)

    evaluate = loop.evaluate
    monkeypatch.setattr(loop, "evaluate", noted)
    settings = build_config({**BASE, "evaluation": {"max_images": 8}})
    trainer(concepts, tmp_path, settings).run()
    assert seen == [[concepts.dev.ids[4 * place] for place in range(8)]] * 2
    assert len(evenly_spaced(concepts.dev, 32)) == 32
    assert len(evenly_spaced(concepts.dev, 31)) == len(set(range(31)))
    assert evenly_spaced(concepts.dev, 33) is concepts.dev
