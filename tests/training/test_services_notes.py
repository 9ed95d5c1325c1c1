"""What a run says when an objective on the command line replaces the recipe's."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from counterfoil.cli import app
from counterfoil.cli.train import _objective_notes
from counterfoil.core.config import load_config
from counterfoil.core.errors import DataError
from counterfoil.training.services import objective_notes


def notes(*overrides: str, recipe: str = "scenes/naaf") -> list[str]:
    return objective_notes(load_config(recipe), load_config(recipe, overrides))


def test_a_mean_beside_the_clip_of_a_summed_loss_is_noted() -> None:
    replaced, scale = notes("objective=selhn")
    assert "selhn replaces the recipe's hardest" in replaced
    assert "hardest.warmup_epochs=1" in replaced
    assert "averaged over the batch, the recipe's was summed" in scale
    assert "256 times as small" in scale
    assert "train.optimizer.clip=2" in scale
    assert "objective.selhn.reduction=sum" in scale


def test_nothing_is_said_of_a_scale_that_stays_or_an_objective_that_does() -> None:
    assert len(notes("objective=selhn", "objective.selhn.reduction=sum")) == 1
    assert len(notes("objective=triplet")) == 1
    assert notes("train.epochs=2", "objective.hardest.margin=0.3") == []
    assert "clip" not in notes("objective=selhn", "train.optimizer.clip=0")[1]


def test_notes_on_a_recipe_of_the_package_come_from_any_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = "scenes/naaf"
    changed = load_config(recipe, ["objective=selhn"])
    assert _objective_notes(recipe, changed, resume=False) == notes("objective=selhn")


def test_a_sum_beside_the_clip_of_an_averaged_loss_is_noted() -> None:
    _, scale = notes("objective=hardest", recipe="flickr8k/vse-mlp-selhn")
    assert "summed over the batch, the recipe's was averaged" in scale
    assert "clips nearly always" in scale


def test_a_mixed_objective_names_the_averaged_term_and_not_a_factor_for_all() -> None:
    replaced, scale = notes("objective={selhn: 1, foils: 0.5}")
    assert "selhn, foils replaces the recipe's hardest" in replaced
    assert "selhn is averaged, foils is summed over the batch" in scale
    assert "the recipe's loss was summed" in scale
    assert "times as" not in scale
    assert scale.endswith("to keep the recipe's scale: objective.selhn.reduction=sum")


def test_a_mixed_objective_beside_an_averaged_recipe_names_the_summed_term() -> None:
    recipe = "flickr8k/vse-mlp-selhn"
    *_, scale = notes("objective={selhn: 1, foils: 0.5}", recipe=recipe)
    assert "the recipe's loss was averaged" in scale
    assert scale.endswith("to keep the recipe's scale: objective.foils.reduction=mean")


def test_a_term_added_beside_those_of_the_recipe_is_noted_by_its_reduction() -> None:
    [scale] = notes("objective.selhn=0.5")
    assert "hardest is summed, selhn is averaged" in scale


@pytest.mark.parametrize(
    "objective",
    ["hardest", "{hardest: 1, foils: 0.5}", "{hardest: {reduction: sum}}", "{hardest: 0.5}"],
)
def test_options_that_a_term_of_the_same_name_lost_are_noted(objective) -> None:
    [replaced] = notes(f"objective={objective}")
    assert replaced.endswith("no longer in force: hardest.warmup_epochs=1")


def test_a_term_of_the_same_name_with_another_reduction_is_noted() -> None:
    replaced, scale = notes("objective={hardest: {reduction: mean}}")
    assert replaced.endswith("no longer in force: hardest.warmup_epochs=1")
    assert "256 times as small" in scale
    assert scale.endswith("objective.hardest.reduction=sum")


def test_lost_options_that_are_the_defaults_are_not_noted() -> None:
    recipe = "flickr8k/vse-mlp-selhn"
    assert notes("objective={selhn: {epsilon: 0.01}}", recipe=recipe) == []
    assert notes("objective={hardest: {warmup_epochs: 1}}") == []


def test_train_prints_the_notes_before_it_reads_data(tmp_path) -> None:
    table = tmp_path / "captions.csv"  # what is no data set at all is refused before the notes
    table.write_text("these,are,no,captions\n1,2,3,4\n")
    overrides = ("objective={hardest: {reduction: mean}}", f"data.source={table}")
    command = ["train", "scenes/naaf", *overrides, "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "500"})
    assert isinstance(result.exception, DataError)
    assert "no longer in force: hardest.warmup_epochs=1" in " ".join(result.output.split())
    assert "objective.hardest.reduction=sum" in " ".join(result.output.split())
