"""The queue that trains the runs of several tables: what it plans, and one whole call."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.reproduce.conftest import tiny

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "reproduction" / "flickr8k" / "train_queue.py"
STORED = [
    f"flickr8k.{name}@lite2-36.json" for name in ("tuning", "tuning-guided", "warmup", "decay")
]
RATES = {
    "kind": "sweep",
    "key": "train.optimizer.lr",
    "values": [0.001, 0.002, 0.004, 0.008],
    "judged_on": "dev",
    "beyond": 1,
    "x_label": "learning rate",
    "lines": [{"label": "all", "run": "all"}, {"label": "hard", "run": "hard"}],
    "rows": None,
    "columns": None,
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_queue", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


MEASURED = {
    "measures": [
        {"title": "true > rule", "foils": "rules", "number": "accuracy"},
        {"title": "best epoch", "number": "best_epoch", "decimals": 0},
    ],
    "foils": {"captions": 8, "per_caption": 1},
}


def write_queue(folder: Path, *entries: dict) -> Path:
    """A queue of a tiny table and a tiny sweep, as the entries name them."""
    (folder / "table.yaml").write_text(yaml.safe_dump(tiny(**MEASURED)))
    (folder / "rates.yaml").write_text(yaml.safe_dump(tiny(name="rates", **RATES)))
    queue = folder / "queue.yaml"
    common = {"seeds": 1, "store": str(folder / "results")}
    given = [{**common, **entry, "name": str(folder / entry["name"])} for entry in entries]
    queue.write_text(yaml.safe_dump(given))
    return queue


def test_jobs_are_ranked_by_their_first_entry_and_listed_once(script, tmp_path) -> None:
    path = write_queue(
        tmp_path,
        {"name": "table.yaml", "rows": ["hard"]},
        {"name": "table.yaml", "seeds": 2},
    )
    queue = script.Queue(path, tmp_path / "runs")
    ranks = {job.title: queue.ranks[digest] for digest, job in queue.jobs.items()}
    assert ranks == {
        "hard, seed 0": 0,
        "all, seed 0": 1,
        "all, seed 1": 1,
        "hard, seed 1": 1,
    }


def test_a_sweep_trains_the_values_that_are_named(script, tmp_path) -> None:
    path = write_queue(tmp_path, {"name": "rates.yaml", "values": [0.002, 0.004]})
    titles = sorted(job.title for job in script.Queue(path, tmp_path / "runs").jobs.values())
    assert titles == [
        f"{run}, lr={value}, seed 0" for run in ("all", "hard") for value in (0.002, 0.004)
    ]
    path = write_queue(tmp_path, {"name": "rates.yaml", "values": [0.003]})
    with pytest.raises(SystemExit, match=r"no such value of the sweep: \[0\.003\]"):
        script.Queue(path, tmp_path / "runs")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"row": ["hard"]}, r"queue\.yaml: 0\.row: Extra inputs are not permitted"),
        ({"rows": "hard"}, r"0\.rows: Input should be a valid list"),
        ({"seeds": 0}, r"0\.seeds: Input should be greater than or equal to 1"),
        ({"climb": True}, "values and climb are for sweeps, and this is none"),
        ({"rows": ["soft"]}, r"table\.yaml: --rows soft: no row of .* matches"),
        ({"store": None}, r"0\.store: Input is not a valid path"),
    ],
    ids=str,
)
def test_entries_that_cannot_mean_what_they_say_are_refused(
    entry, message, script, tmp_path
) -> None:
    path = write_queue(tmp_path, {"name": "table.yaml", **entry})
    with pytest.raises(SystemExit, match=message):
        script.Queue(path, tmp_path / "runs")
    with pytest.raises(SystemExit, match="No such file"):
        script.Queue(tmp_path / "missing.yaml", tmp_path / "runs")


QUEUES = sorted((SCRIPT.parent / "queues").glob("*.yaml"))
assert QUEUES


@pytest.mark.parametrize("path", QUEUES, ids=lambda path: path.stem)
def test_the_queues_of_flickr8k_name_tables_rows_and_values_that_exist(
    path, script, tmp_path
) -> None:
    queue = tmp_path / path.name
    entries = yaml.safe_load(path.read_text())
    for entry in entries:  # planned for the drawn scenes, which need no files
        assert set(entry.pop("tuned")) <= {f"../docs/results/{name}" for name in STORED}
        entry |= {"data": "scenes", "scale": "smoke", "store": str(tmp_path)}
        queue.write_text(yaml.safe_dump([entry]))
        assert script.Queue(queue, tmp_path / "runs").jobs


def run(queue: Path, *options: str) -> subprocess.CompletedProcess[str]:
    folder = queue.parent
    return subprocess.run(
        [
            sys.executable, SCRIPT, queue, "--jobs", "2", "--out", folder / "runs",
            "--cache", folder / "cache", "--log", folder / "log.jsonl", *options,
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_a_queue_climbs_until_the_best_value_is_inside_and_trains_nothing_twice(
    script, tmp_path
) -> None:
    queue = write_queue(
        tmp_path,
        {"name": "table.yaml"},
        {"name": "rates.yaml", "values": [0.001, 0.002], "climb": True},
    )
    stopped = run(queue, "--seconds", "0")
    assert stopped.returncode == 0, stopped.stderr[-2000:]
    assert "time is up: 6 jobs not begun, 0 stopped" in stopped.stdout

    done = run(queue)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert all(line["finished"] for line in lines)
    assert len(lines) == len({line["job"] for line in lines}) >= 6
    stored = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("results/*.json")}
    table, rates = (stored[f"{name}@scenes.json"] for name in ("tiny", "rates"))
    assert [row["label"] for row in table["rows"]] == [["all"], ["hard"]]
    assert all(row["missing"] == 0 for row in table["rows"])
    shown = [measure["title"] for measure in table["measures"]]
    assert shown == ["true > rule", "best epoch"]
    assert all({"true > rule", "best epoch"} <= row["numbers"].keys() for row in table["rows"])
    for run_name in ("all", "hard"):
        tried = {
            row["value"]: row["numbers"]["rsum"]["mean"]
            for row in rates["rows"]
            if row["varied_run"] == run_name and row["numbers"]
        }
        best = max(tried, key=tried.get)
        limits = 0.0005, 0.016  # one value beyond the grid at each end
        assert min(tried) < best < max(tried) or best in limits, tried

    again = run(queue)
    assert again.returncode == 0
    assert "0 jobs missing" in again.stdout
    assert not script.Queue(queue, tmp_path / "elsewhere").jobs
    write_queue(tmp_path, {"name": "table.yaml", "retrain": True})
    assert len(script.Queue(queue, tmp_path / "elsewhere").jobs) == 2
    assert not script.Queue(queue, tmp_path / "runs").jobs  # they are finished there


@pytest.mark.slow
def test_a_run_that_fails_is_named_and_stops_no_other(tmp_path) -> None:
    queue = write_queue(tmp_path, {"name": "table.yaml"})
    tree = tiny(**MEASURED)
    tree["runs"]["hard"]["common"]["model"] = {"init_from": str(tmp_path / "missing")}
    (tmp_path / "table.yaml").write_text(yaml.safe_dump(tree))
    done = run(queue)
    assert done.returncode == 1
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    errors = {line["job"]: line["error"] for line in lines}
    assert errors["all, seed 0"] is None
    assert "missing" in errors["hard, seed 0"]
