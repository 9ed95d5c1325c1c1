"""What the program that attacks the service counts as a failure, and that it runs."""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def process(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("_service_process")


@pytest.fixture
def parts(process):
    return importlib.import_module("_service_parts")


def test_only_a_503_with_retry_after_is_deliberate(process) -> None:
    tally = process.Tally()
    tally.count("a", process.Answer(503, {"retry-after": "1"}, b""), 0.1)
    tally.count("b", process.Answer(422, {}, b""), 0.1)
    assert not tally.failures
    tally.count("c", process.Answer(503, {}, b"no"), 0.1)
    tally.count("d", process.Answer(500, {}, b"no"), 0.3)
    assert [failure[:6] for failure in tally.failures] == ["c: 503", "d: 500"]
    assert tally.summary()["p99_to_p50"] == pytest.approx(3.0)


def test_growth_is_from_the_first_third_to_the_last(process) -> None:
    health = process.Health([5.0, 120.0], [1.0, 2.0])
    for value in [100.0] * 10 + [130.0] * 10 + [110.0] * 10:
        health.add("memory", value)
    health.add("refused", 0.0)  # the next values are of another process
    for value in [2.0, 150.0] * 10 + [190.0] * 11:
        health.add("memory", value)
    found = health.summary()
    assert found["memory_growth_mib"] == 40.0
    assert (found["health_late"], found["control_late"], found["health_refused"]) == (1, 0, 1)


def test_mutated_files_differ_from_each_other_and_repeat_with_the_seed(parts) -> None:
    files = parts.seeds()
    made = [parts.mutated(files, random.Random(seed)) for seed in range(50)]
    assert len(set(made)) > 45
    assert len(set(made) & set(files)) < 5  # a cut beyond the end changes nothing
    assert made[7] == parts.mutated(files, random.Random(7))


@pytest.mark.slow
def test_a_small_attack_runs_and_finds_no_failure(tmp_path) -> None:
    few = ["--parts", "uploads", "gone", "--uploads", "40", "--gone", "20"]
    target = tmp_path / "faults.json"
    command = [sys.executable, str(FOLDER / "service_faults.py"), *few, "--json", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(target.read_text())["rows"]
    assert [row["part"] for row in rows] == ["uploads", "gone"]
    assert rows[0]["answers"] == 40
    assert all(row["health_checks"] for row in rows)
