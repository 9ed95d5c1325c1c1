"""Files of tables: what is refused, what they resolve to, and every one that is shipped."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch

from counterfoil.core.errors import ConfigError
from counterfoil.matchers import matchers
from counterfoil.models import models, resolve
from counterfoil.objectives import create_objective, objectives
from counterfoil.reproduce.artifact import Sweep
from counterfoil.reproduce.catalogue import load_artifact, names
from counterfoil.reproduce.plan import Settings, digest_of, find_data_set, make_plan
from counterfoil.reproduce.spec import ROUNDING_TOLERANCE, Curves, build_artifact
from tests.conftest import thinned
from tests.reproduce.conftest import TINY, planned, tiny

ROW = {"label": ["a"], "run": "all"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "tabel"}, "kind: expected table"),
        ({"title": None}, "title: missing$"),
        ({"colour": "red"}, "unknown key 'colour'"),
        ({"rows": []}, "rows: List should have at least 1"),
        ({"rows": [{"label": ["a"]}]}, "exactly one of run, ensemble and published_only"),
        ({"rows": [{"label": ["a"], "published_only": True}]}, "there are no numbers"),
        ({"rows": [ROW | {"standardize": True}]}, "standardize is only for ensembles"),
        ({"rows": [{"label": ["a"], "run": "hrad"}]}, "unknown run 'hrad'; did you mean 'hard'"),
        ({"rows": [{"label": ["a", "b"], "run": "all"}]}, "2 labels for 1 columns"),
        ({"rows": [ROW, ROW]}, "two rows are called 'a'"),
        ({"rows": [ROW | {"published": {"f30k": [1.0]}}]}, "expected 7 numbers"),
        ({"rows": [ROW | {"published": {"f3k": [1, 2, 3, 4, 5, 6, 21]}}]}, "did you mean 'f30k'"),
        (
            {"rows": [ROW | {"published": {"f30k": [1, 2, 3, 4, 5, 6, 21.5]}}]},
            "add up to 21.0, but RSUM is 21.5",
        ),
        (
            {"runs": {**TINY["runs"], "deaf": {"like": "hard", "ignores": ["train.epoch"]}}},
            "run 'deaf': ignores: unknown key 'train.epoch'; did you mean 'train.epochs'",
        ),
        (
            {"runs": {**TINY["runs"], "all": {"like": "zz"}}},
            "run 'all': like: unknown run 'zz'",
        ),
        ({"runs": {"all": {"like": "hard"}, "hard": {"like": "all"}}}, "forms a circle"),
        ({"vary": {"column": "Rate", "key": "seed", "values": [1]}}, "at least 2 items"),
        (
            {"vary": {"column": "Rate", "key": "seed", "values": [1, 2]}, "rows": [{"run": "all"}]},
            "vary: needs columns, runs, and rows with labels",
        ),
        (
            {"vary": {"column": "Rate", "key": "seed", "values": [1234567, 1234568]}},
            r"two values are written 1.23457e\+06",
        ),
        (
            {"vary": {"column": "Rate", "key": "seed", "values": [1, 2], "fixed": ["al"]}},
            "unknown run 'al'; did you mean 'all'",
        ),
        (
            {
                "vary": {"column": "Rate", "key": "seed", "values": [1, 2]},
                "rows": [{"label": ["a"], "ensemble": ["all", "hard"]}],
            },
            "rows of ensembles are not repeated",
        ),
        ({"runs": {"all": {"commn": {}}, "hard": {}}}, r"unknown key 'runs.all.commn'"),
    ],
)
def test_a_mistake_in_a_file_is_named(change, message) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build_artifact(tiny(**change), "mine.yaml")
    assert str(caught.value).startswith("mine.yaml: ")


def test_rows_that_vary_are_trained_with_each_value(tmp_path) -> None:
    vary = {"column": "Rate", "key": "train.optimizer.lr", "values": [1e-4, 2e-4], "fixed": ["all"]}
    rows = [ROW, {"label": ["b"], "run": "hard"}]
    plan = planned(tiny(vary=vary, rows=rows, columns=["Model"]), tmp_path)
    table = plan.artifact
    assert table.columns == ["Model", "Rate"]
    expected = [
        (["a", "–"], "all"),
        (["b", "0.0001"], "hard=0.0001"),
        (["b", "0.0002"], "hard=0.0002"),
    ]
    assert [(row.label, row.run) for row in table.rows] == expected
    rates = {name: of[0].config.train.optimizer.lr for name, of in plan.runs.items()}
    assert {name: rates[name] for _, name in expected[1:]} == {
        "hard=0.0001": 1e-4,
        "hard=0.0002": 2e-4,
    }
    assert len({of[0].digest for of in plan.runs.values()}) == len(plan.runs)


def test_a_note_lets_the_papers_own_sum_stand() -> None:
    row = ROW | {"published": {"f30k": [1, 2, 3, 4, 5, 6, 25]}, "note": "so printed"}
    assert build_artifact(tiny(rows=[row]), "x").rows[0].note == "so printed"


def test_an_unknown_name_is_answered_with_the_nearest(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'selhn\.table1'"):
        load_artifact("selhn.tabel1")
    with pytest.raises(ConfigError, match="no such recipe"):
        load_artifact(str(tmp_path / "mine.yaml"))


def test_layers_are_merged_base_first_and_the_users_word_last(tmp_path) -> None:
    tree = tiny(
        base={
            "common": {"train": {"epochs": 1, "batch_size": 8}},
            "paper": {"train": {"epochs": 20}},
            "scenes": {"train": {"epochs": 10}},
            "by_data": {"big": {"train": {"epochs": 30}}},
            "smoke": {"model": {"embed_size": 4}},
            "scenes_smoke": {"train": {"epochs": 2}},
        },
        data_sets={"f30k": {"title": "F", "detect": ["f30k"], "settings": "big"}},
    )

    def epochs(**settings: object) -> int:
        return planned(tree, tmp_path, **settings).runs["all"][0].config.train.epochs

    assert epochs() == 10
    assert epochs(scale="smoke") == 2
    assert epochs(scale="smoke", overrides=("train.epochs=7",)) == 7
    assert epochs(data="elsewhere") == 30
    assert epochs(data="elsewhere", published=None) == 20
    run = planned(tree, tmp_path, data="elsewhere").runs["all"][0]
    assert run.config.data.source == "elsewhere"
    assert run.config.train.batch_size == 8


def test_the_hash_is_of_what_changes_a_result(tmp_path) -> None:
    def digest(*overrides: str) -> str:
        return planned(tiny(), tmp_path, overrides=overrides).runs["all"][0].digest

    same = digest()
    for harmless in ("train.device=auto", "data.workers=3", "train.log_every=5"):
        assert digest(harmless) == same
    for telling in ("train.epochs=3", "seed=1", "objective.triplet.margin=0.1"):
        assert digest(telling) != same


def test_seeds_follow_each_other_and_rows_come_before_repeats(tmp_path) -> None:
    plan = planned(tiny(), tmp_path, seeds=2, overrides=("seed=5",))
    assert [(run.name, run.config.seed) for run in plan.in_order()] == [
        ("all", 5), ("hard", 5), ("all", 6), ("hard", 6),
    ]  # fmt: skip


def test_two_names_for_one_config_are_one_run(tmp_path) -> None:
    runs = {"all": {}, "hard": {"like": "all"}}
    assert len(planned(tiny(runs=runs), tmp_path).in_order()) == 1


def test_a_run_may_refer_to_the_folder_of_another(tmp_path) -> None:
    runs = {
        "hard": {"common": {"objective": "hardest"}},
        "all": {"common": {"objective": {"triplet": {"first": "{run:hard}"}}}},
    }
    plan = planned(tiny(runs=runs), tmp_path, seeds=2)
    for second, first in zip(plan.runs["all"], plan.runs["hard"], strict=True):
        assert second.config.objective["triplet"]["first"] == str(first.folder)
        assert second.needs == (first,)
    assert [run.name for run in plan.in_order()][:2] == ["hard", "all"]
    elsewhere = planned(tiny(runs=runs), tmp_path / "other")
    assert elsewhere.runs["all"][0].digest == plan.runs["all"][0].digest
    circle = {"common": {"objective": {"triplet": {"first": "{run:all}"}}}}
    with pytest.raises(ConfigError, match="needs itself"):
        planned(tiny(runs={"all": circle, "hard": {}}), tmp_path)
    lost = {"common": {"objective": {"triplet": {"first": "{run:hrad}"}}}}
    with pytest.raises(ConfigError, match="unknown run 'hrad'"):
        planned(tiny(runs={"all": lost, "hard": {}}), tmp_path)


def test_the_data_set_is_told_by_the_name_of_its_folder() -> None:
    table = load_artifact("selhn.table3")
    assert find_data_set(table, "x/f30k_precomp", None) == "f30k"
    assert find_data_set(table, "x/coco_precomp/", None) == "coco-1k"
    assert find_data_set(table, "x/coco_precomp", "coco-5k") == "coco-5k"
    assert find_data_set(table, "x/mine", None) is None
    assert find_data_set(load_artifact("selhn.table11"), "data/coco", None) == "coco-5k"
    with pytest.raises(ConfigError, match="did you mean 'f30k'"):
        find_data_set(table, "scenes", "f30")


DATA = [("scenes", None), ("f30k_precomp", "f30k"), ("coco_precomp", "coco-5k")]
RESOLVED = [
    (name, scale, *data) for name in names() for scale in ("full", "smoke") for data in DATA
]
FIRST = {name.partition(".")[0]: name for name in reversed(names())}
"""The first file of each paper; the others are tried on the scenes alone."""


@pytest.mark.parametrize(
    ("name", "scale", "data", "published"),
    thinned(
        RESOLVED,
        *(
            case
            for case in RESOLVED
            if case[1] == "full" and (case[2] == "scenes" or case[0] in FIRST.values())
        ),
    ),
)
def test_every_shipped_file_resolves_to_runs_that_can_be_built(
    name, scale, data, published, tmp_path
) -> None:
    plan = make_plan(load_artifact(name), Settings(data, published, scale, 1), tmp_path)
    assert plan.in_order()
    for run in plan.in_order():
        config = run.config
        assert config.data.source == data
        if name.startswith("selhn.") and "vse-infty" not in run.name:
            assert "warmup_epochs" not in config.objective.get("hardest", {})
        if config.model.name in models:
            assert run.find_error() is None or not set(config.objective) <= set(objectives)
        create_objective(config.objective)
        build_matcher(json.dumps(resolve(config.model).matcher, sort_keys=True))


@cache
def build_matcher(options: str) -> None:
    """Raises on options that have no effect beside others; no weights are read or allocated."""
    given = json.loads(options)
    if given.get("pretrained"):
        given["pretrained"] = ""
    if "vocabulary" in matchers.options(given["name"]):
        given["vocabulary"] = 8
    with torch.device("meta"):
        matchers.create(given.pop("name"), given, 96, where="model.matcher")


def test_published_recalls_add_up() -> None:
    """One test for all files: to read them when tests are collected would cost every worker."""
    artifacts = {name: load_artifact(name) for name in names()}
    rows = {
        f"{name}: {row.name}": row
        for name, artifact in artifacts.items()
        if not isinstance(artifact, Sweep)
        for row in artifact.rows
    }
    assert any(row.published for row in rows.values())
    for name, row in rows.items():
        for numbers in row.published.values():
            *recalls, total = numbers
            if None not in numbers:
                assert abs(math.fsum(recalls) - total) <= ROUNDING_TOLERANCE or row.note, name
            known = [number for number in recalls if number is not None]
            assert all(0 < number < 100 for number in known), name
            for side in (recalls[:3], recalls[3:]):
                met = [number for number in side if number is not None]
                assert met == sorted(met), f"{name}: recall falls with K"


@pytest.mark.slow
def test_tables_that_share_a_row_share_its_run_and_its_published_numbers(tmp_path) -> None:
    def digests(name: str) -> set[str]:
        plan = make_plan(load_artifact(name), Settings(seeds=1), tmp_path)
        return {run.digest for run in plan.in_order()}

    assert len(digests("selhn.table1") & digests("selhn.table3")) == 3
    assert digests("selhn.figure3") | digests("selhn.figure5") < digests("selhn.table1")
    assert digests("selhn.table2") == digests("selhn.table7")
    assert len(digests("selhn.figure6") & digests("selhn.table1")) == 1
    assert digests("ndgl.figure3") == digests("ndgl.table1")
    assert len(digests("ndgl.table3") & digests("ndgl.table4")) == 3  # two teachers and K = 2
    assert len(digests("ndgl.table4") & digests("ndgl.figure4")) == 4  # and CHAN by itself
    assert digests("naaf.table1") == digests("naaf.table2")
    assert len(digests("naaf.table3") & digests("naaf.table4")) == 1
    printed: dict[tuple[str, ...], list[float | None]] = {}
    for name in names():
        for row in getattr(load_artifact(name), "rows", []):
            for data, numbers in row.published.items():
                if row.members and printed.setdefault((*row.members, data), numbers) != numbers:
                    assert row.note, f"{name}: {row.name}"  # which says why


def test_the_papers_settings_are_used_on_its_own_data(tmp_path) -> None:
    plan = make_plan(load_artifact("selhn.table1"), Settings("f30k", "f30k"), tmp_path)
    for runs in plan.runs.values():
        train = runs[0].config.train
        assert (train.epochs, train.batch_size, train.optimizer.name) == (20, 128, "adamw")
        assert (train.optimizer.lr, train.schedule.warmup_steps) == (5e-4, 0)
        assert runs[0].config.model.embed_size == 1024
        assert next(iter(runs[0].config.objective.values()))["reduction"] == "mean"
    best = make_plan(load_artifact("selhn.table5"), Settings("f30k", "f30k"), tmp_path)
    train = best.runs["rvse++"][0].config.train
    assert (train.epochs, train.schedule.decay_epochs, train.schedule.factor) == (30, [15], 0.1)


def test_curves_and_sweeps_ask_for_what_training_logs() -> None:
    for name in ("selhn.figure3", "selhn.figure5"):
        figure = load_artifact(name)
        assert isinstance(figure, Curves)
        metrics = [panel.metric for panel in figure.panels]
        assert metrics == ["loss", "gradient/projection", "dev.rsum", "gap/abs"]
    sweep = load_artifact("selhn.figure6")
    assert isinstance(sweep, Sweep)
    assert sweep.values == [0, 1e-4, 1e-3, 1e-2, 1e-1]


def test_the_examples_of_the_documentation_are_tables(tmp_path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reproduce.md").read_text(encoding="utf-8")
    file = tmp_path / "mine.yaml"
    file.write_text(page.split("```yaml\n")[1].split("```")[0], encoding="utf-8")
    plan = make_plan(load_artifact(str(file)), Settings(seeds=1), tmp_path)
    assert [run.name for run in plan.in_order()] == ["rvse-mlp-hn", "narrow"]
    assert plan.runs["narrow"][0].config.objective["hardest"]["margin"] == 0.1
    file.write_text(page.split("```yaml\n")[2].split("```")[0], encoding="utf-8")
    plan = make_plan(load_artifact(str(file)), Settings(seeds=1), tmp_path)
    assert [job.title for job in plan.jobs()][-4:] == [
        "chan, seed 1",
        "chan, seed 2",
        "guide of chan, seed 1 and chan, seed 2",
        "gpo-chan, seed 0",
    ]
    file.write_text("extends: flickr8k.tunings", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"neither a file .* did you mean 'flickr8k\.tuning'"):
        load_artifact(str(file))


def test_the_digest_of_a_config_repeats(tmp_path: Path) -> None:
    run = planned(tiny(), tmp_path).runs["all"][0]
    assert digest_of(run.config) == run.digest
    assert run.folder.name == f"vse-fc-triplet-seed0-{run.digest}"
