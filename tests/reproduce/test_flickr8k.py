"""The tables on Flickr8k and the recipes beside them say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterfoil.config import load_config
from counterfoil.models import resolve
from counterfoil.objectives import create_objective
from counterfoil.reproduce.catalogue import load_artefact, names
from counterfoil.reproduce.plan import Settings, find_data_set, make_plan
from counterfoil.reproduce.spec import Table
from counterfoil.reproduce.sweep import Sweep

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes" / "flickr8k").glob("*.yaml"))
TABLES = [name for name in names() if name.startswith("flickr8k.")]


def tables() -> list[Table]:
    return [one for one in map(load_artefact, TABLES) if isinstance(one, Table)]


def configs() -> dict[str, object]:
    """Of every run of the tables, without what only this plan has."""
    found = {}
    for artefact in tables():
        plan = make_plan(artefact, Settings("lite2-36", "f30k", seeds=1), Path("out"))
        for run in plan.in_order():
            if run.config.seed == 0:
                found[run.name.replace("+", "p")] = run.config
    return found


@pytest.fixture(scope="module")
def planned() -> dict[str, object]:
    return configs()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_has_the_settings_of_the_run_of_its_name(path, planned) -> None:
    config = load_config(path)
    resolve(config.model)
    create_objective(config.objective)
    ours, theirs = config.model_dump(), planned[path.stem].model_dump()
    assert ours["data"].pop("source") == "lite2-36"
    theirs["data"].pop("source")
    for tree in (ours, theirs):  # where other runs lie is the harness's own affair
        tree["model"].pop("start", None)
        tree["objective"].get("ndgl", {}).pop("guide", None)
        tree["objective"].get("aoq", {}).pop("first", None)
    assert ours == theirs


def test_every_model_of_the_tables_has_a_recipe(planned) -> None:
    stems = {path.stem for path in RECIPES}
    models = {load_config(path).model.name for path in RECIPES}
    assert {config.model.name for config in planned.values()} <= models
    assert stems <= set(planned)


def test_the_budget_is_the_same_for_every_method_and_covers_the_tables() -> None:
    sweeps = [one for one in map(load_artefact, TABLES) if isinstance(one, Sweep)]
    assert {(one.key, len(one.values), one.judged_on) for one in sweeps} == {
        ("train.optimiser.lr", 3, "dev")
    }
    tuned = {line.run for sweep in sweeps for line in sweep.lines}
    for artefact in tables():
        for row in artefact.rows:
            for member in row.members:
                name = member.partition("@")[0]
                if not name.endswith("-given"):  # whose rates are part of what was measured
                    assert tuned & set(artefact.lineage(name)), f"{artefact.name}: {row.name}"


def test_published_numbers_are_told_to_be_of_other_data() -> None:
    for artefact in tables():
        key = find_data_set(artefact, "work/lite2-36", None)
        if key in artefact.published_on:
            assert artefact.data_sets[key].elsewhere == (key == "f30k")


def test_the_page_has_a_section_for_every_table() -> None:
    page = (ROOT / "docs" / "results" / "flickr8k.md").read_text(encoding="utf-8")
    for name in TABLES:
        assert f"<!-- results: {name}@" in page, name
