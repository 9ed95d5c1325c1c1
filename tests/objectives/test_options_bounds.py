"""Margins, weights and temperatures that make no sense are refused when an objective is built."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import counterfoil as cf
from counterfoil.core.errors import ArgumentError, ConfigError
from counterfoil.objectives import create_objective, objectives
from counterfoil.objectives.triplet import Triplet

BASES = {"aoq": {"first": "runs/a"}, "ndgl": {"guide": "guides/a"}}
ANY_MARGIN = {"infonce", "ssp"}
"""Their margins shift a softmax and select anchors; below 0 they have a meaning."""

WEIGHTS = {
    "alignment": ["match"],
    "ce-clip": ["intra", "rank"],
    "cfm": ["margin2", "warmup_epochs"],
    "fsc-clip": ["whole", "local"],
    "hardest": ["warmup_epochs"],
    "hrem-graph": ["warmup", "reg_weight"],
    "ndgl": ["mr", "hnr", "sr", "gamma"],
    "sct": ["lam"],
    "tags": ["mlm", "rank"],
    "tags-dc": ["mlm", "rank", "discrimination", "correction", "replaced", "original"],
    "triplet-clip": ["second"],
}
POSITIVE = {
    "captioning": ["hidden", "word_dim", "max_len"],
    "distance-weighted": ["dimension", "cut_off", "nonzero_cut_off"],
    "hrem-graph": ["nonzero_cut_off", "topk"],
    "mmd": ["gamma"],
    "uniformity": ["t"],
}
WITH_MARGIN = [name for name in objectives if "margin" in objectives.options(name)]


def build(name: str, option: str, value: float, **others: object) -> None:
    number = type(objectives.options(name)[option])(value)
    create_objective({name: {**BASES.get(name, {}), **others, option: number}})


@pytest.mark.parametrize("name", WITH_MARGIN)
def test_a_margin_may_be_zero_but_not_negative(name) -> None:
    build(name, "margin", 0)
    if name in ANY_MARGIN:
        build(name, "margin", -1)
        return
    with pytest.raises(ConfigError, match=f"objective.{name}.margin: at least 0, got -1"):
        build(name, "margin", -1)


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("name", list(objectives))
def test_no_option_is_infinite_unless_that_has_a_meaning(name, value) -> None:
    for option, default in objectives.options(name).items():
        if type(default) is not float or (name, option) == ("selhn", "epsilon"):
            continue
        with pytest.raises(
            ConfigError, match=rf"\({option}=…\): expected a finite number"
        ) as raised:
            objectives[name](**BASES.get(name, {}), **{option: value})
        assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize(("name", "option"), [(a, b) for a, many in WEIGHTS.items() for b in many])
def test_a_weight_may_be_zero_but_not_negative(name, option) -> None:
    build(name, option, 0)
    with pytest.raises(ConfigError, match=f"objective.{name}.{option}: at least 0, got -1"):
        build(name, option, -1)


@pytest.mark.parametrize(("name", "option"), [(a, b) for a, many in POSITIVE.items() for b in many])
def test_a_size_or_a_distance_is_positive(name, option) -> None:
    for value in (0, -1):
        with pytest.raises(ConfigError, match=f"{name}.{option}: more than 0, got {value}"):
            build(name, option, value)


@pytest.mark.parametrize("name", ["shn", "sct"])
def test_a_temperature_is_positive(name) -> None:
    for value in (0.0, -0.1):
        with pytest.raises(ConfigError, match=f"objective.{name}.temperature: more than 0"):
            build(name, "temperature", value, form="reference")


def test_an_objective_built_in_python_names_its_option_too() -> None:
    with pytest.raises(ConfigError, match=r"objective\.selhn\.margin: at least 0, got -1"):
        cf.objectives.SelHN(margin=-1)

    class Mine(Triplet):
        """Not registered."""

    with pytest.raises(ConfigError, match=r"^Mine\.margin: at least 0, got -1"):
        Mine(margin=-1)


@pytest.mark.parametrize("value", ["no", "false", 0])
def test_an_option_that_is_on_or_off_takes_nothing_else(value) -> None:
    for name in objectives:
        for option, default in objectives.options(name).items():
            if isinstance(default, bool):
                with pytest.raises(
                    ArgumentError, match=rf"\({option}=…\): expected True or False, got {value!r}"
                ):
                    objectives[name](**{option: value})


def test_a_flag_may_be_of_numpy() -> None:
    assert objectives["sel"](hardest=np.bool_(True)).hardest


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"hardest": -1}, "objective.hardest.weight: expected 0 or more, got -1"),
        ({"hardest": {"weight": -0.5}, "infonce": 1}, "objective.hardest.weight: expected 0"),
        ({"hardest": 0}, "all weights are 0"),
        ({"hardest": 0, "infonce": {"weight": 0}}, "all weights are 0"),
    ],
)
def test_a_run_does_not_train_against_its_objective_or_without_one(spec, message) -> None:
    with pytest.raises(ConfigError, match=message):
        create_objective(spec)
    assert create_objective({"hardest": 0, "infonce": 1})  # a term that is off


class ReturnsATensor(Triplet):
    def compute(self, scores, positives, context):
        return super().compute(scores, positives, context).loss


def test_an_objective_of_ones_own_that_returns_a_tensor_is_told_what_to_return() -> None:
    with pytest.raises(ArgumentError, match=r"ReturnsATensor.compute: .*return LossReport\(loss\)"):
        ReturnsATensor()(torch.eye(3))
