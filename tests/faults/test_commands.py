"""Commands that are killed, or whose disk fails, finish with the same bytes when repeated."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.commands import WORKLOADS, Workplace, draw_moments
from tests.faults.disks import DiskTries, can_mount

KINDS = ("full disk", "read-only folder", "quota", "late drive", "file vanishes")
MOUNTED = ("full disk", "read-only folder")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("faults").resolve())


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
