"""Runs on disk: read once, and again when they change; never on the thread that answers all."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import counterfoil.app.runs
from counterfoil.app.runs import Runs, runs_below
from counterfoil.training.run_folder import locked_run
from tests.app.conftest import LIMITS, running


def copies(run: Path, folder: Path, count: int) -> list[Path]:
    for number in range(count):
        place = folder / f"run-{number:02}"
        place.mkdir(parents=True)
        for name in ("config.yaml", "results.json", "metrics.jsonl"):
            shutil.copy(run / name, place / name)
    return runs_below(folder)


def count_reads(monkeypatch) -> list[threading.Thread]:
    """The thread of every configuration that is read from now on."""
    read, threads = counterfoil.app.runs.load_config, []

    def counted(path):
        threads.append(threading.current_thread())
        return read(path)

    monkeypatch.setattr(counterfoil.app.runs, "load_config", counted)
    return threads


def test_runs_that_did_not_change_are_not_parsed_again(run, tmp_path, monkeypatch) -> None:
    threads = count_reads(monkeypatch)
    runs = Runs(copies(run, tmp_path, 3))
    assert runs.listed() == runs.listed()
    runs.read("run-01")
    assert len(threads) == 3


def test_a_run_that_changed_is_shown_as_it_is_now(run, tmp_path) -> None:
    runs = Runs(copies(run, tmp_path, 2))
    (tmp_path / "run-01" / "results.json").unlink()
    assert [one["finished"] for one in runs.listed()] == [True, False]
    (tmp_path / "run-01" / "results.json").write_text(json.dumps({"rsum": 12.5}))
    assert [one["rsum"] for one in runs.listed()][1] == 12.5
    config = tmp_path / "run-00" / "config.yaml"
    config.write_text(config.read_text().replace("name: naaf", "name: scan"))
    assert [one["model"] for one in runs.listed()] == ["scan", "naaf"]
    config.write_text("nonsense: [")
    assert [one["model"] for one in runs.listed()] == ["unknown", "naaf"]


def test_results_of_a_size_that_no_run_writes_are_not_sent(run, tmp_path) -> None:
    runs = Runs(copies(run, tmp_path, 1))
    file = tmp_path / "run-00" / "results.json"
    file.write_text(json.dumps({"rsum": 12.5, "more": "x" * 1_000_000}))
    assert runs.read("run-00")["results"]["rsum"] == 12.5
    file.write_text(json.dumps({"rsum": 12.5, "more": "x" * 1_100_000}))
    assert runs.read("run-00")["results"] == {}


def test_no_run_is_parsed_on_the_thread_that_answers_everybody(
    content, run, tmp_path, monkeypatch
) -> None:
    many = replace(content, runs=Runs(copies(run, tmp_path, 3)))
    threads = count_reads(monkeypatch)
    with running(many, LIMITS) as client:
        servers = {one for one in threading.enumerate() if one.name.endswith("(run)")}
        assert client.get("/api/about").json["runs"] == 3
        assert threads == []
        assert len(client.get("/api/runs").json["runs"]) == 3
        assert client.get("/api/run?name=run-00").status == 200
    assert servers
    assert len(threads) == 3
    assert servers.isdisjoint(threads)


def test_runs_that_appear_and_vanish_are_noticed(run, tmp_path) -> None:
    runs = Runs([run], below=tmp_path / "more")
    assert len(runs) == 1
    copies(run, tmp_path / "more", 2)
    assert [one["name"] for one in runs.listed()] == ["small-naaf", "run-00", "run-01"]
    shutil.rmtree(tmp_path / "more" / "run-00")
    assert [one["name"] for one in runs.listed()] == ["small-naaf", "run-01"]
    shutil.copytree(tmp_path / "more" / "run-01", tmp_path / "more" / "small-naaf")
    assert [one["name"] for one in runs.listed()] == ["small-naaf", "run-01", "small-naaf-2"]


def test_a_run_is_training_while_a_process_holds_it(run, tmp_path) -> None:
    copies(run, tmp_path, 1)
    runs = Runs([], below=tmp_path)
    assert not runs.read("run-00")["training"]
    with locked_run(tmp_path / "run-00"):
        assert runs.read("run-00")["training"]
    assert not runs.read("run-00")["training"]
    assert (runs.read("run-00")["epochs_done"], runs.read("run-00")["epochs"]) == (2, 2)
