"""The recipes of TAGS and TAGS-DC have the numbers of the public code, and fit together."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterfoil.core.config import ModelConfig, load_config
from counterfoil.core.recipes import recipe_names
from counterfoil.models import resolve
from counterfoil.models.catalogue import PARTS
from counterfoil.reproduce.catalogue import load_artifact
from counterfoil.reproduce.plan import Settings, make_plan

ROOT = Path(__file__).parents[2]
# learning rate, temperature, weights of ranking and filling, candidates kept, anchors
FIRST = {
    "f30k/{}-base": (5e-5, 2.0, 5e-4, 0.05, 31, 16),
    "coco/{}-base": (5e-5, 1.5, 5e-5, 0.01, 31, 32),
    "f30k/{}-large": (5e-5, 2.0, 1e-3, 0.05, 23, 32),
    "coco/{}-large": (4e-5, 1.5, 1e-3, 0.05, 23, 32),
}
SECOND = {
    "f30k/{}-base": (1e-5, 1.5, 5e-4, 0.1, 31, 32),
    "coco/{}-base": (1e-5, 1.5, 1e-4, 0.05, 31, 32),
    "f30k/{}-large": (1e-5, 1.5, 5e-4, 0.05, 23, 32),
    "coco/{}-large": (1e-5, 1.5, 1e-4, 0.05, 31, 32),
}


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("objective", ["tags", "tags-dc"])
def test_numbers_are_those_of_the_public_code(objective, name) -> None:
    config = load_config(name.format(objective))
    rate, temperature, rank, mlm, kept, anchors = (FIRST if objective == "tags" else SECOND)[name]
    term, hard = config.objective[objective], config.objective["hard-candidates"]
    assert config.train.optimizer.lr == rate
    assert (term["temperature"], term["rank"], term["mlm"]) == (temperature, rank, mlm)
    assert (term.get("kept", 31), hard["kept"]) == (kept, kept)
    assert (term["anchors"], hard["anchors"]) == (anchors, anchors)
    assert config.train.optimizer.no_decay == "norms-and-biases"
    assert config.train.optimizer.betas == [0.9, 0.98]
    assert config.train.optimizer.pretrained_lr_factor == 1.0  # one rate, BERT's weights as well
    assert config.train.schedule.name == "linear"


@pytest.mark.parametrize("name", ["scenes/{}", *FIRST])
def test_stage_two_starts_from_a_model_of_the_same_make(name) -> None:
    one, two = (load_config(name.format(stage)) for stage in ("tags", "tags-dc"))
    assert one.model.init_from == ("runs/scenes-uniter-pretrain" if name == "scenes/{}" else None)
    where_stage_1_goes = "runs/" + name.format("tags").replace("/", "-")
    assert two.model.init_from == where_stage_1_goes
    assert two.data == one.data
    specs = [resolve(config.model).model_dump() for config in (one, two)]
    extras = [set(spec["matcher"].pop("extras")) for spec in specs]
    assert specs[0] == specs[1]
    assert extras[0] < extras[1] >= {"mlm", "discrimination", "correction"}


def test_on_the_scenes_baseline_and_foils_start_alike_and_take_as_many_updates() -> None:
    names = ("uniter-small", "tags", "tags-dc-one-stage", "tags-dc")
    first = load_config("scenes/uniter-pretrain")
    configs = [load_config(f"scenes/{name}") for name in names]
    assert {config.model.init_from for config in configs[:3]} == {"runs/scenes-uniter-pretrain"}
    for config in configs:
        assert config.data == first.data
        assert config.train == configs[0].train
        assert config.objective["alignment"] == configs[0].objective["alignment"]


def test_the_papers_own_weights_are_a_recipe_too() -> None:
    term = load_config("f30k/tags-paper-base").objective["tags"]
    assert (term["mlm"], term["rank"]) == (0.1, 0.001)


@pytest.mark.parametrize(
    ("data", "published"), [("scenes", None), ("f30k", "f30k"), ("coco", "coco-5k")]
)
def test_the_static_rows_of_the_tables_share_nothing_with_their_generator(data, published) -> None:
    plan = make_plan(load_artifact("tags.table2"), Settings(data, published, seeds=1), Path("out"))
    runs = {run.name: run for run in plan.in_order()}
    generator = runs.get("uniter-mlm") or runs["uniter-pretrain"]  # on the scenes, one run
    static, dynamic = runs["tags-static"].config, runs["tags"].config
    term = dict(static.objective["tags"])
    assert term.pop("generator") == str(generator.folder)
    assert "mlm" not in static.model.matcher["extras"]
    assert "mlm" in generator.config.model.matcher["extras"]
    assert term == dynamic.objective["tags"] | {"mlm": 0.05}  # all that it uses is the same (§3.2)
    assert static.train == dynamic.train
    assert "hard-candidates" not in static.objective or (
        static.objective["hard-candidates"] == dynamic.objective["hard-candidates"]
    )


def test_no_recipe_sets_a_rate_factor_for_a_model_without_pretrained_parts() -> None:
    for name in recipe_names():
        config = load_config(name)
        optimizer = config.train.optimizer
        if optimizer.pretrained_lr_factor not in (None, 1.0):
            assert any(loads_weights(config.model)), name


def loads_weights(model: ModelConfig) -> list[bool]:
    """Of each part, whether it names pretrained weights (also by default) and loads them."""
    spec = resolve(model)
    options = [
        registry.options(getattr(spec, part)["name"]) | getattr(spec, part)
        for part, registry in PARTS.items()
    ]
    return [bool(part.get("pretrained")) and part.get("weights") is not False for part in options]


def test_a_part_without_pretrained_weights_is_seen_as_such() -> None:
    name = "f30k/chan-bert"
    assert any(loads_weights(load_config(name).model))
    assert not any(loads_weights(load_config(name, ["model.text.weights=false"]).model))
    assert not any(loads_weights(load_config("f30k/chan").model))


def test_the_language_model_of_the_papers_perplexity_is_named() -> None:
    table = ROOT / "src/counterfoil/reproduce/tables/tags.table3.yaml"
    for path in (ROOT / "docs/reproduce.md", table):
        text = " ".join(path.read_text(encoding="utf-8").split())
        assert "GPT-2" in text
        assert "not named" not in text
        assert "does not name its language model" not in text
