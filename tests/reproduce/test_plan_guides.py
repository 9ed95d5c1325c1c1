"""Teachers, a guide, a guided student and an ensemble over seeds, really run on very few scenes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from counterfoil.cli import app
from counterfoil.core.progress import Silent
from counterfoil.evaluation.evaluate import evaluate
from counterfoil.reproduce.plan import Plan, PlannedGuide
from counterfoil.reproduce.present import to_markdown
from counterfoil.training.guides.build import build_guide
from counterfoil.training.guides.manifest import MANIFEST, read_manifest
from counterfoil.training.logs import read_metrics
from counterfoil.training.run_data import read_data, shared_train_split
from counterfoil.training.run_folder import load_model
from tests.reproduce.conftest import TINY, planned, tiny
from tests.reproduce.test_reproduce import shown, train

STUDENT = {"like": "hard", "beside": {"ndgl": {"guide": "{guide:hard@+1,hard@+2}"}}}
TREE = tiny(
    runs=TINY["runs"] | {"guided": STUDENT},
    rows=[
        {"label": ["teachers"], "ensemble": ["hard@+1", "hard@+2"]},
        {"label": ["guided"], "run": "guided"},
    ],
)


def guide_of(plan: Plan) -> PlannedGuide:
    (guide,) = (job for job in plan.jobs() if isinstance(job, PlannedGuide))
    return guide


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guided")


def finished(place: Path, cache: Path) -> Plan:
    plan = planned(TREE, place)
    assert not train(plan, cache).errors
    return plan


@pytest.mark.slow
def test_a_table_stopped_while_its_guide_is_built_goes_on_from_there(
    place, cache, tmp_path
) -> None:
    plan = planned(TREE, place)
    guide = guide_of(plan)

    def some_is_built() -> bool:
        return guide.state == "unfinished" and bool(read_manifest(guide.folder).sides)

    outcome = train(plan, cache, should_stop=some_is_built)
    assert outcome.interrupted
    assert (outcome.trained, outcome.built, outcome.errors) == (2, 0, {})
    assert [job.state for job in plan.jobs()] == ["finished", "finished", "unfinished", "new"]
    page = to_markdown(shown(plan, cache, outcome))
    assert "| guided |  |  |  |  |  |  | not finished |" in page

    outcome = train(plan, cache)
    assert (outcome.trained, outcome.built, outcome.errors) == (1, 1, {})
    runs = [run.folder for run in guide.teachers]
    build_guide(tmp_path / "whole", runs, shared_train_split(runs, cache, Silent()))
    for name in ("scores.npy", MANIFEST):
        assert (guide.folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    records = read_metrics(plan.runs["guided"][0].folder / "metrics.jsonl")
    assert any("ndgl/agreement" in record for record in records)


@pytest.mark.slow
def test_a_guide_is_built_once_for_all_tables(place, cache) -> None:
    guide = guide_of(finished(place, cache))
    before = (guide.folder / MANIFEST).stat().st_mtime_ns
    runs = TINY["runs"] | {"alone": STUDENT | {"like": "all"}}
    other = planned(tiny(name="other", runs=runs, rows=[{"label": ["a"], "run": "alone"}]), place)
    assert guide_of(other) == guide
    outcome = train(other, cache)
    assert (outcome.trained, outcome.built, outcome.errors) == (1, 0, {})
    assert (guide.folder / MANIFEST).stat().st_mtime_ns == before
    assert train(other, cache).trained == 0


@pytest.mark.slow
def test_an_ensemble_over_seeds_averages_the_scores_of_these_seeds(place, cache) -> None:
    plan = finished(place, cache)
    results = shown(plan, cache)
    teachers = [load_model(run.folder, "cpu") for run in guide_of(plan).teachers]
    split = read_data(guide_of(plan).config, cache, Silent()).test
    assert results.rows[0].numbers["rsum"].mean == evaluate(teachers, split, bootstrap=0).rsum
    assert results.complete


@pytest.mark.slow
def test_a_finished_student_asks_for_no_teachers(place, cache, tmp_path) -> None:
    finished(place, cache)
    copy = tmp_path / "copy"
    shutil.copytree(place, copy)
    plan = planned(TREE | {"rows": TREE["rows"][1:]}, copy)
    guide = guide_of(plan)
    shutil.rmtree(guide.teachers[0].folder)
    shutil.rmtree(guide.folder)
    assert not plan.missing()
    shutil.rmtree(plan.runs["guided"][0].folder)
    assert plan.missing() == [guide.teachers[0], guide, plan.runs["guided"][0]]


@pytest.mark.slow
def test_a_damaged_guide_is_its_rows_failure(place, cache, tmp_path) -> None:
    finished(place, cache)
    copy = tmp_path / "copy"
    shutil.copytree(place, copy)
    plan = planned(TREE, copy)
    (guide_of(plan).folder / MANIFEST).write_text("{", encoding="utf-8")
    shutil.rmtree(plan.runs["guided"][0].folder)
    assert guide_of(plan).state == "unfinished"
    results = shown(plan, cache, train(plan, cache))
    assert "guide.json: damaged" in results.rows[1].errors[0]
    assert results.rows[0].numbers


def test_a_teacher_that_fails_fails_the_guide_and_its_row(place, cache) -> None:
    runs = TINY["runs"] | {
        "odd": {"common": {"objective": {"hardest": {"margni": 1}}}},
        "guided": {"like": "hard", "beside": {"ndgl": {"guide": "{guide:odd@+1,hard@+2}"}}},
    }
    rows = [{"label": ["guided"], "run": "guided"}, {"label": ["hard"], "run": "hard@+1"}]
    plan = planned(tiny(runs=runs, rows=rows), place)
    results = shown(plan, cache, train(plan, cache))
    (error,) = results.rows[0].errors
    assert error.startswith(
        "guided, seed 0: needs guide of odd, seed 1 and hard, seed 2, which failed: "
        "needs odd, seed 1, which failed: "
    )
    assert "margni" in error
    assert results.rows[1].numbers
    assert guide_of(plan).state == "new"


def test_a_dry_run_shows_guides_and_how_far_they_are(place, cache, tmp_path) -> None:
    finished(place, cache)
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(TREE), encoding="utf-8")

    def invoke(*more: str) -> str:
        args = ["reproduce", str(file), "--seeds", "1", "--dry-run", *more]
        result = CliRunner().invoke(app, args)
        assert result.exit_code == 0, result.output
        return result.stdout

    assert "3 of 3 runs and 1 of 1 guides finished" in invoke("--out", str(place))
    assert "0 of 3 runs and 0 of 1 guides finished" in invoke("--out", str(tmp_path))
    jobs = json.loads(invoke("--out", str(place), "--json"))
    (guide,) = (job for job in jobs if "guide" in job)
    assert (guide["guide"], guide["state"]) == (
        "guide of hard, seed 1 and hard, seed 2", "finished",
    )  # fmt: skip
    assert guide["runs"] == [job["folder"] for job in jobs if job.get("run", "").startswith("hard")]


@pytest.mark.slow
def test_processes_wait_for_teachers_and_guide(place, cache, tmp_path) -> None:
    alone = shown(finished(place, cache), cache)
    plan = planned(TREE, tmp_path)
    outcome = train(plan, cache, jobs=2)
    assert (outcome.trained, outcome.built, outcome.errors) == (3, 1, {})
    together = shown(plan, cache, outcome)
    assert [row.numbers for row in together.rows] == [row.numbers for row in alone.rows]
