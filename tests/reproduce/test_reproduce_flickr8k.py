"""The tables on Flickr8k and the recipes beside them say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from counterfoil.core.config import RunConfig, load_config
from counterfoil.core.errors import ConfigError
from counterfoil.core.recipes import matching_names
from counterfoil.models import resolve
from counterfoil.objectives import create_objective, objectives
from counterfoil.reproduce.artifact import Sweep
from counterfoil.reproduce.catalogue import load_artifact, names
from counterfoil.reproduce.grid import with_tried
from counterfoil.reproduce.plan import Settings, find_data_set, make_plan
from counterfoil.reproduce.present import pages_to_fill
from counterfoil.reproduce.results import table_rows
from counterfoil.reproduce.spec import Table
from counterfoil.reproduce.store import best_values, read_stored, runs_at_edges
from tests.cli.test_cli import invoke

ROOT = Path(__file__).parents[2]
RECIPE_FOLDER = ROOT / "src" / "counterfoil" / "recipes" / "flickr8k"
UNPLANNED = {"corrector", "corrector-pretrain"}
"""Recipes of models that are used, not compared: no table has a run of them."""
RECIPES = sorted({name.partition("/")[2] for name in matching_names("flickr8k/*")} - UNPLANNED)
TABLES = [name for name in names() if name.startswith("flickr8k.")]


def tables() -> list[Table]:
    return [one for one in map(load_artifact, TABLES) if isinstance(one, Table)]


def configs() -> dict[str, object]:
    """Of every run of the tables, without what only this plan has; of several rates, the first."""
    result = {}
    for artifact in tables():
        plan = make_plan(artifact, Settings("lite2-36", "f30k", seeds=1), Path("out"))
        for run in plan.in_order():
            if run.config.seed == 0:
                result.setdefault(run.name.partition("=")[0].replace("+", "p"), run.config)
    return result


@pytest.fixture(scope="module")
def planned() -> dict[str, object]:
    return configs()


def chosen_rates() -> dict[str, float]:
    """By recipe, the rates that the wide sweeps chose inside their grids."""
    files = [f"flickr8k.{name}@lite2-36.json" for name in ("tuning", "tuning-guided")]
    stored = [read_stored(ROOT / "docs" / "results" / file) for file in files]
    inside = best_values(*stored).keys() - runs_at_edges(*stored)
    rates = {run: best_values(*stored)[run][0].partition("=")[2] for run in inside}
    return {run.replace("+", "p"): float(rate) for run, rate in rates.items()}


def rate_of(name: str, planned: dict[str, RunConfig]) -> float:
    """The rate that dev chose for a recipe, or for the one that it extends; else the table's."""
    text = (RECIPE_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    parent = re.search(r"^extends: flickr8k/(\S+)$", text, re.MULTILINE)[1]
    own = planned[name].train.optimizer.lr
    return chosen_rates().get(name, chosen_rates().get(parent, own))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_settings_of_the_run_of_its_name(name, planned) -> None:
    config = load_config(f"flickr8k/{name}")
    resolve(config.model)
    create_objective(config.objective)
    ours, theirs = config.model_dump(), planned[name].model_dump()
    assert ours["data"].pop("source") == "lite2-36"
    theirs["data"].pop("source")
    assert ours["train"]["optimizer"].pop("lr") == pytest.approx(rate_of(name, planned))
    theirs["train"]["optimizer"].pop("lr")
    for tree in (ours, theirs):  # where other runs lie is the harness's own affair
        tree["model"].pop("init_from", None)
        tree["objective"].get("ndgl", {}).pop("guide", None)
        tree["objective"].get("aoq", {}).pop("first", None)
    assert ours == theirs


@pytest.mark.parametrize("name", sorted(UNPLANNED))
def test_a_recipe_of_no_table_has_a_model_and_an_objective(name, planned) -> None:
    config = load_config(f"flickr8k/{name}")
    resolve(config.model)
    create_objective(config.objective)
    assert name not in planned


def test_every_model_of_the_tables_has_a_recipe(planned) -> None:
    models = {load_config(f"flickr8k/{name}").model.name for name in RECIPES}
    assert {config.model.name for config in planned.values()} <= models
    assert set(RECIPES) <= set(planned)


def sweeps(*names: str) -> list[Sweep]:
    found = [load_artifact(f"flickr8k.{name}") for name in names]
    assert all(isinstance(one, Sweep) and one.judged_on == "dev" for one in found)
    return found


def test_the_budget_is_the_same_for_every_method_and_covers_the_tables() -> None:
    first = sweeps("first-rates", "first-rates-tags")
    wide = sweeps("tuning", "tuning-guided", "tuning-uniter")
    assert {(one.key, len(one.values)) for one in first} == {("train.optimizer.lr", 3)}
    assert {(one.key, len(one.values)) for one in wide} == {("train.optimizer.lr", 6)}
    tuned = {line.run for sweep in [*first, *wide] for line in sweep.lines}
    for artifact in tables():
        for row in artifact.rows:
            for member in row.members:
                name = member.partition("@")[0]
                if not name.endswith("-given"):  # whose rates are part of what was measured
                    assert tuned & set(artifact.lineage(name)), f"{artifact.name}: {row.name}"


def test_the_wide_grid_of_rates_goes_beyond_the_former_one_and_does_not_end_at_an_edge() -> None:
    (former,) = sweeps("first-rates")
    rates = ("tuning", "tuning-guided", "tuning-words", "tuning-uniter", "tuning-tags")
    for wide in sweeps(*rates, "warmup", "decay"):
        assert wide.beyond
    assert max(sweeps("tuning")[0].values) >= 8 * max(former.values)


@pytest.mark.parametrize(
    "name",
    ["tuning@lite2-36", "tuning-guided@lite2-36", "tuning-guided@lite210-46", "warmup@lite2-36"],
)
def test_nothing_that_dev_chose_is_at_an_edge_of_what_was_tried(name) -> None:
    stored = read_stored(ROOT / "docs" / "results" / f"flickr8k.{name}.json")
    assert best_values(stored)
    assert not runs_at_edges(stored)


def test_what_is_tuned_after_the_rate_has_a_rate() -> None:
    rates = sweeps("tuning", "tuning-guided")
    of_rates = {line.run for sweep in rates for line in sweep.lines}
    for later in sweeps("warmup", "decay"):
        assert {line.run for line in later.lines} <= of_rates
        assert later.key not in {sweep.key for sweep in rates}


def test_a_sweep_and_its_table_share_the_runs_from_which_theirs_learn(tmp_path) -> None:
    (rates,) = sweeps("tuning-uniter")
    assert rates.change == {"evaluation.test_split": "dev"}
    settings = Settings("lite2-36", "f30k", seeds=1)
    plans = [
        make_plan(one, settings, tmp_path) for one in (rates, load_artifact("flickr8k.uniter"))
    ]
    (swept,), (planned,) = (
        plan.runs[name]
        for plan, name in zip(plans, ("uniter-guided, lr=0.001", "uniter-chosen"), strict=True)
    )
    assert (swept.config.evaluation.test_split, planned.config.evaluation.test_split) == (
        "dev",
        "test",
    )
    assert [one.digest for one in swept.needs] == [one.digest for one in planned.needs] != []


def test_the_sweep_of_tags_rates_contains_the_runs_of_its_table(tmp_path) -> None:
    settings = Settings("lite2-36", "f30k", seeds=1)
    (swept,) = (make_plan(one, settings, tmp_path) for one in sweeps("tuning-tags"))
    planned = make_plan(load_artifact("flickr8k.uniter"), settings, tmp_path)
    for name in ("aligned-on", "aligned-tags", "aligned-tags-dc"):
        assert swept.runs[f"{name}, lr=0.0003"][0].digest == planned.runs[name][0].digest


@pytest.mark.parametrize("name", TABLES)
def test_a_table_about_photos_is_not_made_from_scenes_without_a_word(name, tmp_path) -> None:
    with pytest.raises(ConfigError, match=f"{name} is about real photos.*--data"):
        invoke("reproduce", name, "--out", tmp_path)
    assert "finished, in" in invoke(
        "reproduce", name, "--out", tmp_path, "--scale", "smoke", "--seeds", 1, "--dry-run"
    )


def test_published_numbers_are_told_to_be_of_other_data() -> None:
    result = {one.name: (one, find_data_set(one, "work/lite2-36", None)) for one in tables()}
    published = [(one, key) for one, key in result.values() if key in one.published_on]
    assert published
    for artifact, key in published:
        assert artifact.data_sets[key].elsewhere == (key == "f30k")


def test_the_pages_have_a_section_for_every_table() -> None:
    folder = ROOT / "docs" / "results" / "flickr8k"
    text = "".join(page.read_text(encoding="utf-8") for page in pages_to_fill(folder))
    for name in TABLES:
        assert f"<!-- results: {name}@" in text, name


def test_the_pages_show_every_stored_result_and_their_pictures_exist() -> None:
    results = ROOT / "docs" / "results"
    pages = pages_to_fill(results / "flickr8k")
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    for stored in results.glob("flickr8k.*.json"):
        assert text.count(f"<!-- results: {stored.stem} -->") == 1, stored
    for page in pages:
        for picture in re.findall(r"\]\((\S+\.svg)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / picture).is_file(), f"{page}: {picture}"


def flat(tree: object, prefix: str = "") -> dict[str, object]:
    """A tree of plain values by the full names of its keys."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        name: value
        for key, item in tree.items()
        for name, value in flat(item, f"{prefix}.{key}" if prefix else key).items()
    }


def differences(one: RunConfig, other: RunConfig) -> set[str]:
    """Keys with other values, whatever is left to its default filled in."""
    trees = []
    for config in (one, other):
        tree = config.model_dump()
        tree["objective"] = {
            name: {**objectives.options(name), **(options or {})}
            for name, options in tree["objective"].items()
        }
        trees.append(flat(tree))
    ours, theirs = trees
    missing = object()
    names = ours.keys() | theirs.keys()
    return {name for name in names if ours.get(name, missing) != theirs.get(name, missing)}


RANK = {"objective.tags.rank"}


@pytest.mark.parametrize("data", ["lite2-36", "scenes"])
@pytest.mark.parametrize(
    ("control", "row", "named"),
    [
        ("uniter", "tags", RANK),
        ("uniter", "tags-word", RANK | {"objective.tags.unit"}),
        ("uniter-on", "tags-on", RANK),
    ],
)
def test_the_control_beside_tags_differs_by_its_foils_alone(data, control, row, named) -> None:
    for tuned in ({}, {"uniter": ("train.optimizer.lr=0.0005",)}):
        settings = Settings(data, "f30k" if data != "scenes" else None, seeds=1, tuned=tuned)
        plan = make_plan(load_artifact("flickr8k.tags"), settings, Path("out"))
        configs = {run.name: run.config for run in plan.in_order() if run.config.seed == 0}
        assert differences(configs[control], configs[row]) == named
        assert configs[control].objective["tags"]["rank"] == 0.0


@pytest.mark.parametrize(
    ("row", "named"), [("tags", RANK), ("tags-word", RANK | {"objective.tags.unit"})]
)
def test_the_recipe_of_the_control_differs_from_tags_by_its_foils_alone(row, named) -> None:
    one, other = (load_config(f"flickr8k/{name}") for name in ("uniter", row))
    assert differences(one, other) == named


def test_recipes_of_uniter_and_tags_have_the_rate_that_was_chosen_on_dev() -> None:
    """Dev chose it for UNITER; rows that are like it take it, so the recipes say the same."""
    stored = read_stored(ROOT / "docs" / "results" / "flickr8k.first-rates-tags@lite2-36.json")
    tuned = best_values(stored)
    settings = Settings("lite2-36", "f30k", seeds=1, tuned=tuned)
    plan = make_plan(load_artifact("flickr8k.tags"), settings, Path("out"))
    rates = {run.name: run.config.train.optimizer.lr for run in plan.in_order()}
    for name in ("uniter", "tags", "tags-word", "tags-dc"):
        recipe = load_config(f"flickr8k/{name}")
        assert recipe.train.optimizer.lr == pytest.approx(rates[name]), name


@pytest.mark.parametrize(("name", "tuned_by"), [("tuning", None), ("negatives", "tuning")])
def test_stored_results_are_of_the_settings_that_would_be_trained_now(
    name, tuned_by, tmp_path, monkeypatch
) -> None:
    """A key that is added to the config must not make hours of training unknown."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lite2-36").mkdir()
    stored = ROOT / "docs" / "results"
    result = read_stored(stored / f"flickr8k.{name}@lite2-36.json")
    tuning = [read_stored(stored / f"flickr8k.{tuned_by}@lite2-36.json")] if tuned_by else []
    artifact = load_artifact(f"flickr8k.{name}")
    if isinstance(artifact, Sweep):
        artifact = with_tried(artifact, result)
    overrides = tuple(result.overrides)
    settings = Settings("lite2-36", "f8k", "full", 1, overrides, best_values(*tuning))
    rows = table_rows(make_plan(artifact, settings, tmp_path))
    planned = {tuple(row.result.label): row.result.recipe for row in rows}
    trained = {tuple(row.label): {each.recipe for each in row.each} for row in result.rows}
    known = [label for label, recipes in trained.items() if recipes == {planned.get(label)}]
    assert known == [label for label, recipes in trained.items() if recipes]
    assert len(known) > 20
