"""Commands that are killed, or whose disk fails, finish with the same bytes when repeated."""

from __future__ import annotations

import multiprocessing
import random
from pathlib import Path

import pytest

from counterfoil.core.config import build_config
from counterfoil.core.errors import TrainingError
from counterfoil.core.progress import Silent
from tests.faults.commands import WORKLOADS, Workplace, draw_moments
from tests.faults.disks import DiskTries, can_mount
from tests.training.test_trainer import BASE, trainer

KINDS = ("full disk", "read-only folder", "quota", "late drive", "file vanishes")
MOUNTED = ("full disk", "read-only folder")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("faults").resolve())


def test_a_loader_process_that_is_killed_ends_training_with_a_message(concepts, tmp_path) -> None:
    others = set(multiprocessing.active_children())

    class Killer(Silent):
        def track(self, items, *args, **kwargs):
            for item in items:
                for loader in set(multiprocessing.active_children()) - others:
                    loader.kill()
                yield item

    settings = build_config({**BASE, "data": {**BASE["data"], "workers": 1}})
    with pytest.raises(TrainingError, match=r"a loader process was lost.*--resume"):
        trainer(concepts, tmp_path, settings, progress=Killer()).run()


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_command_that_was_killed_finishes_with_the_same_bytes(place, name) -> None:
    list(place.prepare([name]))
    workload, kills = WORKLOADS[name], 0
    whole = place.reference(workload).ended
    for number in range(6):
        rng = random.Random(number)
        outcome = place.try_kills(workload, draw_moments(workload, whole, number, 7, rng), "try")
        assert outcome.problems == []
        assert outcome.remains == []
        kills += len(outcome.kills)
    assert kills


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["train RVSE", "features", "guide", "index add"])
def test_a_command_whose_disk_fails_says_so_and_can_be_repeated(place, name, kind) -> None:
    if kind in MOUNTED and not can_mount(Path(place.root) / "mount"):
        pytest.skip("file systems cannot be mounted here")
    list(place.prepare([name]))
    for number in range(2):
        outcome = DiskTries(place, WORKLOADS[name], random.Random(number)).try_one(kind)
        assert outcome.problems == []
