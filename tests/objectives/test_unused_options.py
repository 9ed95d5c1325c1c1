"""Options that a form or mode does not read are refused, not ignored."""

from __future__ import annotations

import pytest

from counterfoil.errors import ConfigError
from counterfoil.matchers import matchers
from counterfoil.objectives import create_objective


@pytest.mark.parametrize(
    ("objective", "options", "unused", "mode"),
    [
        ("shn", {"temperature": 0.2}, "temperature", "form=paper"),
        ("sct", {"hard_similarity": 0.5}, "hard_similarity", "form=paper"),
        ("sct", {"form": "reference", "margin": 0.3}, "margin", "form=reference"),
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
    ],
)
def test_a_matcher_refuses_an_option_without_effect(matcher, options, unused, mode) -> None:
    with pytest.raises(ConfigError, match=f"model.matcher.{unused}=.*no effect with {mode}"):
        matchers[matcher](32, **options)
