"""A kill, or a disk without room, inside a save leaves checkpoints that load."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from counterfoil.training.checkpoint import Checkpoints
from tests.faults.checkpoints import save_often, try_save
from tests.faults.children import run_child
from tests.faults.disks import is_clear, limit_file_size


def test_kills_inside_a_save_leave_checkpoints_that_load_and_nothing_else(tmp_path) -> None:
    kills = 0
    for seed in range(4):
        outcome = try_save(tmp_path, random.Random(seed))
        assert outcome.problems == []
        kills += len(outcome.kills)
    assert kills >= 2


@pytest.mark.slow
def test_a_hundred_kills_inside_a_save(tmp_path) -> None:
    outcomes = [try_save(tmp_path, random.Random(seed)) for seed in range(100)]
    assert [problem for outcome in outcomes for problem in outcome.problems] == []


def test_a_save_without_room_keeps_the_checkpoint_before(tmp_path) -> None:
    assert run_child(lambda: save_often(tmp_path), tmp_path / "first").code == 0
    before = (tmp_path / "run" / "last").resolve()
    size = max(path.stat().st_size for path in before.iterdir()) // 2
    ended = run_child(
        lambda: save_often(tmp_path), tmp_path / "second", prepare=limit_file_size(size)
    )
    assert ended.code == 1
    assert "could not be written" in ended.output
    assert "--resume" in ended.output
    _, _, position = Checkpoints(tmp_path / "run").load()
    assert position.step == 3
    names = sorted(path.name for path in Path(tmp_path / "run" / "checkpoints").iterdir())
    assert names == [before.name]


def test_an_error_with_a_traceback_is_not_clear(tmp_path) -> None:
    ended = run_child(lambda: 1 / 0, tmp_path)  # type: ignore[arg-type, return-value]
    assert ended.code == 1
    assert not is_clear(ended)
