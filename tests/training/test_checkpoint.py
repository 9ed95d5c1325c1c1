"""Checkpoints of a run: whole, of one save, and what they say they are."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from counterfoil.core.errors import CheckpointError, TrainingError
from counterfoil.core.storage.checksums import (
    STATE,
    STATE_SUM,
    check_sum,
    check_sums,
    write_sums,
)
from counterfoil.models.store import WEIGHTS
from counterfoil.training import checkpoint
from counterfoil.training.checkpoint import Checkpoints, Position
from tests.data.hostile import BOMBS, forged_pointer
from tests.models.importers.test_hostile_checkpoints import torch_file
from tests.training.test_trainer import config, trainer


@pytest.fixture(scope="module")
def trained(concepts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    trainer(concepts, folder, config(epochs=1)).run()
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run, to be damaged."""
    return shutil.copytree(trained, tmp_path / "run", symlinks=True)


@pytest.mark.parametrize("name", [STATE, WEIGHTS])
def test_a_flipped_byte_of_a_checkpoint_is_found_before_a_run_goes_on(concepts, run, name) -> None:
    path = run / "last" / name
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=rf"{name}: damaged or changed"):
        trainer(concepts, run).run(resume=True)


def test_weights_of_a_run_that_are_not_finite_are_refused_by_name(concepts, run) -> None:
    weights = load_file(run / "last" / WEIGHTS)
    weights["image_encoder.fc.bias"][0] = float("nan")
    save_file(weights, run / "last" / WEIGHTS)
    write_sums(run / "last")
    with pytest.raises(CheckpointError, match=r"'image_encoder\.fc\.bias' holds .* not finite"):
        trainer(concepts, run).run(resume=True)


def saved(run, content):
    torch.save(content, run / "last" / STATE)
    write_sums(run / "last", [STATE], STATE_SUM)


@pytest.mark.parametrize("what", ["list", "no position", "forged position", "no state", "others"])
def test_a_training_state_of_something_else_is_a_checkpoint_error(concepts, run, what) -> None:
    state = torch.load(run / "last" / STATE, weights_only=True)
    position = state["position"]
    forged = {
        "list": [1],
        "no position": {**state, "position": None},
        "forged position": {**state, "position": {**position, "epoch": "1"}},
        "no state": {"position": position},
        "others": {**state, "updates": {"optimizer": {"param_groups": [], "state": [1]}}},
    }
    saved(run, forged[what])
    with pytest.raises(CheckpointError, match=rf"{STATE}: (damaged|not the state)"):
        trainer(concepts, run).run(resume=True)


@pytest.mark.parametrize("bomb", ["shared tuples", "a byte array of a trillion bytes", "pointer"])
def test_a_hostile_training_state_is_refused(concepts, run, bomb) -> None:
    data = forged_pointer() if bomb == "pointer" else b"\x80\x02" + BOMBS[bomb]
    torch_file(run / "last" / STATE, data)
    write_sums(run / "last", [STATE], STATE_SUM)
    with pytest.raises(CheckpointError, match=rf"{STATE}: refused"):
        trainer(concepts, run).run(resume=True)


@pytest.mark.parametrize("step", ["write_model", "write_sums"])
def test_a_save_that_is_cut_short_leaves_files_and_sums_of_the_save_before(
    concepts, run, monkeypatch, step
) -> None:
    def fails(*_) -> None:
        raise OSError("no space left")

    before = (run / "last").resolve()
    monkeypatch.setattr(checkpoint, step, fails)
    with pytest.raises(TrainingError, match="the one before is intact"):
        Checkpoints(run).save(trainer(concepts, run).model, {}, Position(step=99))
    assert (run / "last").resolve() == before
    check_sums(run / "last")
    check_sum(run / "last", STATE, STATE_SUM)


def test_an_older_checkpoint_that_a_kill_left_beside_the_last_is_deleted_by_a_resume(
    concepts, run
) -> None:
    last = (run / "last").resolve()
    older = shutil.copytree(last, last.with_name("step-00000001-epoch-0000-batch-000001"))
    trainer(concepts, run, config(epochs=1)).run(resume=True)  # nothing is left to train
    assert not older.exists()
    linked = {(run / link).resolve() for link in ("last", "best")}
    assert set((run / "checkpoints").iterdir()) == linked
