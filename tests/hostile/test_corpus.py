"""Every hostile file ends in the error that it should, soon and within its memory."""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import thinned
from tests.data.hostile import BOMBS
from tests.hostile import child
from tests.hostile.corpus import all_cases

LEAST_CASES = 200
SECONDS = 2.0
"""Most seconds of CPU: a wall clock would measure how busy the machine is. A case that waits is
ended by an alarm, and fails by its error."""

MEMORY_MIB = 500.0
PATIENCE = 900.0
CASES = {case.name: case for case in all_cases()}
LONG = {f"checkpoint: {bomb}" for bomb in BOMBS} - {"checkpoint: keys with one hash"}
"""Bombs that `tests/data/test_pickles.py` sends through the same reader of pickles."""


def send(folder: Path, names: list[str], lines: Path) -> None:
    with lines.open("w") as sys.stdout:
        child.main(folder, *names)


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory) -> dict[str, dict]:
    """What each selected case ended in: one child for all, with what is imported here."""
    folder = tmp_path_factory.mktemp("hostile")
    items = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in items if hasattr(item, "callspec")]
    lines = folder / "outcomes.jsonl"
    process = multiprocessing.get_context("fork").Process(target=send, args=(folder, names, lines))
    process.start()
    process.join(PATIENCE)
    process.kill()
    found = {one["name"]: one for one in map(json.loads, lines.read_text().splitlines())}
    missing = [name for name in names if name not in found]
    assert not missing, f"the child ended with {process.exitcode} at {missing[0]}"
    doors = Counter(CASES[name].door for name in names)
    print(f"{len(found)} hostile files:", ", ".join(f"{n} {door}" for door, n in doors.items()))
    return found


def test_the_corpus_is_large_and_its_names_are_unique() -> None:
    assert len(CASES) == len(all_cases()) >= LEAST_CASES
    assert all(case.error and case.phrase for case in CASES.values())


@pytest.mark.parametrize("name", thinned(CASES, *(CASES.keys() - LONG)))
def test_a_hostile_file_ends_in_its_error(outcomes, name) -> None:
    case, outcome = CASES[name], outcomes[name]
    assert (outcome["error"], case.phrase in outcome["message"]) == (case.error, True), outcome
    assert outcome["seconds"] < SECONDS, outcome
    assert outcome["mib"] < MEMORY_MIB, outcome
