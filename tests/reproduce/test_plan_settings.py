"""The runs of the NDGL and NAAF tables have the settings of the recipes for their models."""

from __future__ import annotations

from typing import Any

import pytest

from counterfoil.core.config import RunConfig, load_config
from counterfoil.core.errors import ConfigError
from counterfoil.reproduce.catalogue import load_artifact
from counterfoil.reproduce.plan import Settings, made_equal, make_plan
from tests.conftest import thinned
from tests.reproduce.conftest import TINY, planned, tiny

MODELS = [
    ("ndgl.table1", "gpo", "vse-infty", "vse-infty-bert"),
    ("ndgl.table1", "esa", "esa", "esa"),
    ("ndgl.table1", "esa-bert", "esa", "esa-bert"),
    ("ndgl.table1", "chan", "chan", "chan"),
    ("ndgl.table1", "chan-bert", "chan", "chan-bert"),
    ("ndgl.table1", "hrem", "hrem", "hrem-bert"),
    ("ndgl.table1", "dive", "dive", "dive"),
    ("ndgl.table1", "vsrn", "vsrn", "vsrn"),
    ("naaf.table3", "naaf", "naaf", "naaf"),
    ("naaf.table1", "scan-i2t", "scan-i2t", "scan-i2t"),
    ("naaf.table1", "scan-t2i", "scan-t2i", "scan-t2i"),
    ("naaf.table1", "bfan-equal", "bfan", "bfan"),
    ("naaf.table1", "imram", "imram", "imram"),
    ("naaf.table1", "gsmn", "gsmn", "gsmn"),
    ("naaf.table1", "vse-infty-bigru", "vse-infty", "vse-infty"),
    ("naaf.table1", "saf", "saf", "saf"),
    ("naaf.table1", "sgr", "sgr", "sgr"),
]


def settings_of(config: RunConfig) -> dict[str, Any]:
    """What decides a result, without what is said although it is the default."""
    tree = config.model_dump(exclude={"seed"})
    tree["data"].pop("source")
    text = tree["model"]["text"]
    if text.get("word_dim") == 300:
        del text["word_dim"]
    if text.get("name") == "bert":
        del text["name"]
    if tree["model"]["image"].get("final_norm") is False:
        del tree["model"]["image"]["final_norm"]
    tree["objective"] = {
        name: {key: value for key, value in options.items() if (key, value) != ("margin", 0.2)}
        if isinstance(options, dict)
        else options
        for name, options in tree["objective"].items()
    }
    return tree


@pytest.mark.parametrize(("table", "run", "small", "large"), MODELS)
@pytest.mark.parametrize(
    ("data", "published"),
    thinned(
        [("scenes", "f30k"), ("f30k_precomp", "f30k"), ("coco_precomp", "coco-1k")],
        ("f30k_precomp", "f30k"),
    ),
)
def test_a_run_has_the_settings_of_its_recipe(
    table, run, small, large, data, published, tmp_path
) -> None:
    name = f"scenes/{small}" if data == "scenes" else f"{published.partition('-')[0]}/{large}"
    if name.startswith("coco/vse-infty"):
        with pytest.raises(ConfigError, match="no such recipe"):  # GPO has none for COCO
            load_config(name)
        return
    plan = make_plan(load_artifact(table), Settings(data, published, seeds=1), tmp_path)
    ours = settings_of(plan.runs[run][0].config)
    assert ours == settings_of(load_config(name))


@pytest.mark.parametrize("data", ["scenes", "f30k_precomp"])
@pytest.mark.parametrize(
    "override",
    thinned(["model.text.glove=g.npz", 'model.text={"glove": "g.npz"}'], "model.text.glove=g.npz"),
)
@pytest.mark.parametrize("table", ["table1", "table2", "table3", "table4", "figure3", "figure4"])
def test_glove_is_given_to_the_rows_that_have_it_in_the_paper_only(
    table, data, override, tmp_path
) -> None:
    artifact = load_artifact(f"naaf.{table}")
    plain = make_plan(artifact, Settings(data, "f30k", seeds=1), tmp_path)
    given = make_plan(artifact, Settings(data, "f30k", seeds=1, overrides=(override,)), tmp_path)
    for name, [run] in given.runs.items():
        has_it = name.startswith("naaf") and name != "naaf-no-glove"
        assert bool(run.config.model.text.get("glove")) == has_it, name
        if not override.startswith("model.text={"):  # which replaces other keys, too
            assert (run.digest == plain.runs[name][0].digest) == (not has_it), name
    assert "GloVe" in (artifact.note or "")


def test_an_override_does_not_reach_a_key_that_a_run_ignores(tmp_path) -> None:
    runs = TINY["runs"] | {"deaf": {"like": "hard", "ignores": ["train.epochs", "model.text.x"]}}
    rows = [{"label": [name], "run": name} for name in runs]
    plan = planned(tiny(runs=runs, rows=rows), tmp_path, overrides=("train.epochs=7", "seed=5"))
    epochs = {name: run.config.train.epochs for name, [run] in plan.runs.items()}
    assert epochs == {"all": 7, "hard": 7, "deaf": 2}
    assert plan.runs["deaf"][0].config.seed == 5


def test_runs_that_an_override_makes_equal_are_grouped(tmp_path) -> None:
    runs = TINY["runs"] | {"again": {"like": "hard"}}  # equal without any override
    rows = [{"label": [name], "run": name} for name in runs]
    artifact = tiny(runs=runs, rows=rows)
    assert made_equal(planned(artifact, tmp_path)) == []
    assert made_equal(planned(artifact, tmp_path, overrides=("train.epochs=7",))) == []
    equal = planned(artifact, tmp_path, overrides=("objective=selhn",))
    assert made_equal(equal) == [["all", "hard", "again"]]


def test_a_sweep_refuses_an_override_of_the_key_that_it_varies(tmp_path) -> None:
    sweep = load_artifact("selhn.figure6")
    settings = Settings(seeds=1, overrides=("train.epochs=1", f"{sweep.key}=0.1"))
    with pytest.raises(ConfigError, match=r"selhn\.figure6 compares values of .*epsilon, so it"):
        make_plan(sweep, settings, tmp_path)
