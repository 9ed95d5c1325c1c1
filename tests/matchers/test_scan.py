"""SCAN agrees with the public implementation in every setting that works there."""

from __future__ import annotations

import pytest
import torch

from counterfoil.matchers import matchers
from counterfoil.objectives import Context, create_objective
from tests.conftest import assert_close, assert_gradient_close, load_fixture
from tests.matchers.local import encoded_pair

AGGREGATIONS = {"LogSumExp": "lse", "Mean": "mean", "Max": "max", "Sum": "sum"}
FILES = ["scan-t2i", "scan-i2t", "scan-t2i-regions", "scan-i2t-regions"]
CASES = [(name, option) for name in FILES for option in load_fixture(name).options]


def scan(direction: str, setting: dict) -> torch.nn.Module:
    norm = setting["raw_feature_norm"]
    return matchers[f"scan-{direction}"](
        64,
        lambda_softmax=setting["lambda_softmax"],
        lambda_lse=setting["lambda_lse"],
        aggregation=AGGREGATIONS[setting["agg_func"]],
        raw_norm="none" if norm == "no_norm" else norm,
    )


@pytest.mark.parametrize(("name", "option"), CASES)
def test_scores_and_gradients_agree(name, option) -> None:
    fixture = load_fixture(name)
    images, texts = encoded_pair(fixture)
    scores = scan(name.split("-")[1], fixture.options[option])(images, texts)
    assert_close(scores, fixture[f"out.{option}.scores"])
    if f"grad.{option}.images" in fixture.tensors:
        scores.sum().backward()
        assert_gradient_close(images.fragments.grad, fixture[f"grad.{option}.images"])
        assert_gradient_close(texts.fragments.grad, fixture[f"grad.{option}.captions"])


@pytest.mark.parametrize("option", ["t2i.max", "t2i.sum", "i2t.max"])
def test_the_triplet_loss_on_attention_scores_agrees(option) -> None:
    fixture = load_fixture("scan-loss")
    direction, form = option.split(".")
    hyper = fixture.hyper
    setting = {
        "raw_feature_norm": hyper["raw_feature_norm"],
        "agg_func": hyper["agg_func"][direction],
        "lambda_softmax": hyper["lambda_softmax"][direction],
        "lambda_lse": hyper["lambda_lse"][direction],
    }
    images, texts = encoded_pair(fixture)
    scores = scan(direction, setting)(images, texts)
    objective = create_objective("hardest" if form == "max" else "triplet")
    loss = objective.compute(scores, torch.eye(len(scores)).bool(), Context()).loss
    assert_close(loss, fixture[f"out.{option}.loss"])
    if f"grad.{option}.images" in fixture.tensors:
        loss.backward()
        assert_gradient_close(images.fragments.grad, fixture[f"grad.{option}.images"])
        assert_gradient_close(texts.fragments.grad, fixture[f"grad.{option}.captions"])
