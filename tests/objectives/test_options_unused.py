"""Options that a form or mode does not read are refused, not ignored."""

from __future__ import annotations

import pytest

from counterfoil.core.config import load_config
from counterfoil.core.errors import ConfigError
from counterfoil.encoders import text_encoders
from counterfoil.matchers import matchers
from counterfoil.models import resolve
from counterfoil.objectives import create_objective
from tests.encoders.test_parity import vocabulary


@pytest.mark.parametrize(
    ("objective", "options", "unused", "mode"),
    [
        ("shn", {"temperature": 0.2}, "temperature", "form=paper"),
        ("sct", {"hard_similarity": 0.5}, "hard_similarity", "form=paper"),
        ("sct", {"form": "reference", "margin": 0.3}, "margin", "form=reference"),
        ("tags", {"generator": "runs/a", "mlm": 0.3}, "mlm", "a generator"),
        ("tags-dc", {"generator": "runs/a", "mlm": 0.05}, "mlm", "a generator"),
        ("hrem-graph", {"loss": "vse", "nonzero_cut_off": 1.9}, "nonzero_cut_off", "loss=vse"),
    ],
)
def test_an_objective_refuses_an_option_without_effect(objective, options, unused, mode) -> None:
    with pytest.raises(
        ConfigError, match=f"objective.{objective}.{unused}=.*no effect with {mode}"
    ):
        create_objective({objective: options})


@pytest.mark.parametrize(
    ("matcher", "options", "unused", "mode"),
    [
        ("scan-t2i", {"aggregation": "mean", "lambda_lse": 9.0}, "lambda_lse", "aggregation=mean"),
        ("chan", {"alpha": 0.5}, "alpha", "coding=vha"),
        ("chan", {"pooling": "mean", "beta": 0.5}, "beta", "pooling=mean"),
        ("sgr", {"slots": 20}, "slots", "form=paper"),
        ("saf", {"slots": 20}, "slots", "form=paper"),
        ("gsmn", {"parser": "spacy"}, "parser", "graph=dense"),
        ("naaf", {"mining": False, "alpha": 3.0}, "alpha", "mining=false"),
        ("naaf", {"mining": False, "adjust_epoch": 7}, "adjust_epoch", "mining=false"),
        ("naaf", {"mining": False, "momentum": 0.5}, "momentum", "mining=false"),
        ("naaf", {"mining": False, "min_samples": 9}, "min_samples", "mining=false"),
        ("naaf", {"intra": "none", "lambda_intra": 3.0}, "lambda_intra", "intra=none"),
        ("naaf", {"negative": False, "intra": "always"}, "intra", "negative=false"),
        ("naaf", {"negative": False, "lambda_intra": 3.0}, "lambda_intra", "negative=false"),
        ("naaf-reference", {"negative": False, "intra": "always"}, "intra", "negative=false"),
    ],
)
def test_a_matcher_refuses_an_option_without_effect(matcher, options, unused, mode) -> None:
    with pytest.raises(ConfigError, match=f"model.matcher.{unused}=.*no effect with {mode}"):
        matchers[matcher](32, **options)


def test_a_text_encoder_refuses_positions_beside_those_of_its_bert() -> None:
    with pytest.raises(ConfigError, match=r"model.text.positions=64 has no effect with weights"):
        text_encoders["uniter-bert"](vocabulary(20), 16, positions=64)


def build_matcher(recipe: str, *overrides: str) -> None:
    spec = dict(resolve(load_config(recipe, overrides).model).matcher)
    matchers.create(spec.pop("name"), spec, 32, where="model.matcher")


@pytest.mark.parametrize(
    ("recipe", "override"),
    [
        ("scenes/naaf", "model.matcher.mining=false"),
        ("flickr8k/naaf-no-intra", "model.matcher.negative=false"),
        ("flickr8k/naaf", "model.matcher.mining=false"),
        ("coco/scan-i2t", "model.matcher.aggregation=mean"),
    ],
)
def test_the_advice_for_an_option_that_a_recipe_sets_can_be_followed(recipe, override) -> None:
    with pytest.raises(ConfigError, match="or remove") as refused:
        build_matcher(recipe, override)
    advice = str(refused.value).partition(": set ")[2].partition(" (")[0].split()
    build_matcher(recipe, override, *advice)


def test_an_override_that_makes_an_option_of_the_recipe_useless_names_the_command() -> None:
    with pytest.raises(ConfigError, match=r"set model.matcher.adjust_epoch=15 \(its default\), or"):
        build_matcher("scenes/naaf", "model.matcher.mining=false")
    with pytest.raises(ConfigError, match=r"set model.matcher.lambda_lse=5.0 \(its default\), or"):
        build_matcher("coco/scan-i2t", "model.matcher.aggregation=mean")


def test_all_options_without_effect_are_named_at_once() -> None:
    advice = r"set model\.matcher\.alpha=2\.0 model\.matcher\.momentum=0\.1"
    with pytest.raises(ConfigError, match=advice):
        matchers["naaf"](32, mining=False, alpha=3.0, momentum=0.5)
