"""What a run says when an objective on the command line replaces the recipe's."""

from __future__ import annotations

from counterfoil.config import load_config
from counterfoil.training.objective_notes import objective_notes


def notes(*overrides: str, recipe: str = "recipes/naaf-scenes.yaml") -> list[str]:
    return objective_notes(load_config(recipe), load_config(recipe, overrides))


def test_a_mean_beside_the_clip_of_a_summed_loss_is_noted() -> None:
    replaced, scale = notes("objective=selhn")
    assert "selhn replaces the recipe's hardest" in replaced
    assert "hardest.warmup_epochs=1" in replaced
    assert "averaged over the batch, the recipe's was summed" in scale
    assert "256 times as small" in scale
    assert "train.optimiser.clip=2" in scale
    assert "objective.selhn.reduction=sum" in scale


def test_nothing_is_said_of_a_scale_that_stays_or_an_objective_that_does() -> None:
    assert len(notes("objective=selhn", "objective.selhn.reduction=sum")) == 1
    assert len(notes("objective=triplet")) == 1
    assert notes("train.epochs=2", "objective.hardest.margin=0.3") == []
    assert "clip" not in notes("objective=selhn", "train.optimiser.clip=0")[1]


def test_a_sum_beside_the_clip_of_an_averaged_loss_is_noted() -> None:
    _, scale = notes("objective=hardest", recipe="recipes/flickr8k/vse-mlp-selhn.yaml")
    assert "summed over the batch, the recipe's was averaged" in scale
    assert "clips nearly always" in scale
