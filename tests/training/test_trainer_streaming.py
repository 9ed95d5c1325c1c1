"""Training from remote shards: resumed to the same bytes, after a stop and after an outage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from counterfoil.cli.train import _check_inputs
from counterfoil.core.config import build_config
from counterfoil.core.distributed import rank, world_size
from counterfoil.core.errors import CheckpointError, ConfigError, TrainingError
from counterfoil.core.storage import remote
from counterfoil.core.storage.checksums import STATE, STATE_SUM, write_sums
from counterfoil.data import convert, load_pairs
from counterfoil.models import create_model
from counterfoil.training.run import execute
from counterfoil.training.trainer import Trainer
from tests.conftest import thinned
from tests.range_server import range_server
from tests.training.test_trainer import BASE, metrics, trainer, weights

DATA = {**BASE["data"], "shuffle_buffer": 30}
NAMES = "{train-{00000..00006},dev-{00000..00002},test-{00000..00002}}.tar"


def settings(data: dict | None = None, **train):
    tree = {**BASE, "data": {**DATA, **(data or {})}}
    return build_config({**tree, "train": {**BASE["train"], "epochs": 2, **train}})


@pytest.fixture(scope="module")
def folder(concepts, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("streamed") / "shards"
    convert(concepts, folder, "shards", shard_size=15)
    return folder


@pytest.fixture
def server(folder, monkeypatch):
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.001)
    with range_server() as running:
        running.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        yield running


@pytest.fixture
def pairs(server, tmp_path):
    return load_pairs(f"{server.url}/{NAMES}", cache_dir=tmp_path / "cache")


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory) -> Path:
    """A run of local shards, streamed, that nothing interrupted."""
    run = tmp_path_factory.mktemp("whole")
    trainer(load_pairs(folder), run, settings({"stream": True})).run()
    return run


@pytest.mark.parametrize("workers", thinned([0, 2], 2))
def test_a_remote_run_is_the_streamed_run_of_local_shards(pairs, tmp_path, whole, workers) -> None:
    run = trainer(pairs, tmp_path / "run", settings({"workers": workers}))
    assert run.batches.is_stream
    run.run()
    assert weights(tmp_path / "run") == weights(whole)
    assert metrics(tmp_path / "run") == metrics(whole)


@pytest.mark.slow
def test_a_stream_trains_on_other_batches_than_a_full_shuffle(folder, tmp_path, whole) -> None:
    run = trainer(load_pairs(folder), tmp_path / "run", settings())
    assert not run.batches.is_stream  # local shards are shuffled as a whole, unless asked
    run.run()
    assert metrics(tmp_path / "run") != metrics(whole)


@pytest.mark.parametrize("stop_after", thinned([2, 4, 7], 4))
def test_an_interrupted_stream_resumes_to_the_same_bytes(
    pairs, tmp_path, whole, stop_after
) -> None:
    calls = iter(range(1000))
    first = trainer(
        pairs, tmp_path / "cut", settings(), should_stop=lambda: next(calls) + 1 >= stop_after
    ).run()
    assert first.interrupted
    trainer(pairs, tmp_path / "cut", settings()).run(resume=True)
    assert metrics(tmp_path / "cut") == metrics(whole)
    assert weights(tmp_path / "cut") == weights(whole)


@pytest.mark.slow
def test_an_outage_saves_the_run_which_then_resumes_to_the_same_bytes(
    server, pairs, tmp_path, whole
) -> None:
    server.requests.clear()
    server.down_after = 5
    with pytest.raises(TrainingError, match=r"epoch 1, batch \d.*503.*--resume"):
        trainer(pairs, tmp_path / "cut", settings()).run()
    assert (tmp_path / "cut" / "last").exists()
    server.down_after = None
    trainer(pairs, tmp_path / "cut", settings()).run(resume=True)
    assert metrics(tmp_path / "cut") == metrics(whole)
    assert weights(tmp_path / "cut") == weights(whole)


@pytest.mark.slow
def test_an_outage_during_validation_loses_nothing_either(server, pairs, tmp_path, whole) -> None:
    server.down = "dev"
    remote._windows.windows.clear()  # such small shards are still in memory
    with pytest.raises(TrainingError, match=r"epoch 1, validation: .*dev-0.*503.*--resume"):
        trainer(pairs, tmp_path / "cut", settings()).run()
    server.down, steps = "", []
    again = trainer(pairs, tmp_path / "cut", settings(), should_stop=lambda: steps.append(1))
    again.run(resume=True)
    assert len(steps) < 12  # the first epoch was not trained again
    assert metrics(tmp_path / "cut") == metrics(whole)
    assert weights(tmp_path / "cut") == weights(whole)


def test_a_run_does_not_resume_with_changed_shards_or_other_processes(
    server, pairs, tmp_path
) -> None:
    calls = iter(range(1000))
    trainer(pairs, tmp_path / "cut", settings(), should_stop=lambda: next(calls) >= 1).run()
    fewer = replace(pairs, splits={**pairs.splits, "train": pairs.train.select(range(90))})
    with pytest.raises(CheckpointError, match="the shards are not those"):
        trainer(fewer, tmp_path / "cut", settings()).run(resume=True)
    state = tmp_path / "cut" / "last" / STATE
    values = torch.load(state, weights_only=False)
    assert values["position"]["batch"]
    values["stream"]["processes"] = 2
    torch.save(values, state)
    write_sums(state.parent, [STATE], STATE_SUM)
    with pytest.raises(CheckpointError, match="began with 2 processes"):
        trainer(pairs, tmp_path / "cut", settings()).run(resume=True)


def test_what_cannot_be_streamed_is_refused(concepts, pairs, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"data\.stream: .* not in shards"):
        trainer(concepts, tmp_path / "a", settings({"stream": True}))
    with pytest.raises(ConfigError, match=r"data\.features_on_gpu"):
        trainer(pairs, tmp_path / "b", settings({"features_on_gpu": True}))
    with pytest.raises(ConfigError, match="a password in the address"):
        _check_inputs(settings({"source": "https://me:secret@host/a.tar"}), resume=False)


def streamed(url: str, run: Path, cache: Path, resume: bool = False) -> list[str] | str:
    """Train as one of two processes: the shards of its first epoch in order, or an error."""
    torch.manual_seed(0)
    remote.PAUSE_SECONDS = 0.001
    config = settings({"shuffle_buffer": 4})
    pairs = load_pairs(url, cache_dir=cache / str(rank()))
    model = create_model(config.model, pairs.train, config.data)
    one = Trainer(model, pairs, config, run)
    plan, images = one.batches.plan, set()
    assert world_size() == 2
    for batch in one.batches.shares:
        images |= {int(plan.split.image_of[caption]) for _, caption, _ in batch}
    try:
        one.run(resume=resume)
    except TrainingError as error:
        return str(error)
    order = [i for i in plan.images_in_order(0) if i in images]
    shards = [plan.layout.archives[int(plan.layout.archive_of[i])].name for i in order]
    return list(dict.fromkeys(shards))


@pytest.mark.slow
def test_two_processes_split_the_shards_and_train_together(
    server, tmp_path, in_two_processes
) -> None:
    url = f"{server.url}/{NAMES}"
    first, second = in_two_processes(streamed, url, tmp_path / "run", tmp_path / "cache")
    assert len(first) + len(second) <= 8  # of seven: the cut goes through one
    assert sorted({*first, *second}) == [f"train-{number:05d}.tar" for number in range(7)]
    server.requests.clear()
    server.down = second[-1]
    own, other = in_two_processes(streamed, url, tmp_path / "cut", tmp_path / "cache")
    assert "another process could not read its data" in own
    assert "503" in other
    assert "--resume" in own
    server.down = ""
    in_two_processes(streamed, url, tmp_path / "cut", tmp_path / "cache", True)
    assert weights(tmp_path / "cut") == weights(tmp_path / "run")


@pytest.mark.slow
def test_a_run_of_a_recipe_names_its_shards_by_address(server, tmp_path) -> None:
    tree = settings({"source": f"{server.url}/{NAMES}"}, epochs=1)
    finished = execute(tree, tmp_path / "run", tmp_path / "cache")
    assert finished.report is not None
    assert len(finished.pairs.train) == 96
    assert not list((tmp_path / "cache").rglob("*.tar"))
