"""The runs of the NDGL and NAAF tables have the settings of the recipes for their models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from counterfoil.config import RunConfig, load_config
from counterfoil.reproduce.catalogue import load_artefact
from counterfoil.reproduce.plan import Settings, make_plan

RECIPES = Path(__file__).parents[2] / "recipes"
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
    [("scenes", "f30k"), ("f30k_precomp", "f30k"), ("coco_precomp", "coco-1k")],
)
def test_a_run_has_the_settings_of_its_recipe(
    table, run, small, large, data, published, tmp_path
) -> None:
    name = f"{small}-scenes" if data == "scenes" else f"{large}-{published.partition('-')[0]}"
    if name.startswith("vse-infty") and name.endswith("coco"):
        pytest.skip("GPO has no recipe for COCO")
    plan = make_plan(load_artefact(table), Settings(data, published, seeds=1), tmp_path)
    ours = settings_of(plan.runs[run][0].config)
    assert ours == settings_of(load_config(RECIPES / f"{name}.yaml"))
