"""Configuration: typed, from YAML and overrides, with errors that name the key."""

from __future__ import annotations

import pytest

from counterfoil.core.config import build_config, load_config
from counterfoil.core.errors import ConfigError


def test_a_config_survives_a_round_trip_through_yaml(tmp_path) -> None:
    config = load_config(None, ["train.epochs=3", "objective=triplet", "model.embed_size=64"])
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epoch=3", "unknown key 'train.epoch'; did you mean 'train.epochs'"),
        ("trian.epochs=3", "unknown key 'trian'; did you mean 'train'"),
        ("train.optimizer.lrr=3", "did you mean 'train.optimizer.lr'"),
        ("train.lr=3", "did you mean 'train.optimizer.lr'"),
        ("lr=3", "did you mean 'train.optimizer.lr'"),
        ("epochs=3", "did you mean 'train.epochs'"),
        ("evaluation.seed=3", "did you mean 'seed'"),
        ("train.epochs=many", "train.epochs: .*integer.* got 'many'"),
        ("train.epochs=2.5", "train.epochs"),
        ("train.epochs=true", "train.epochs"),
        ("train.epochs=0", "train.epochs"),
        ("train.precision=fp8", "train.precision"),
        ("data.drop_regions=1.5", "data.drop_regions"),
        ("train=5", "train"),
        ("train.epochs", "looks like"),
        ("seed.deep=1", "unknown key|not a section|seed"),
    ],
)
def test_a_wrong_override_is_an_error_that_names_the_key(override, message) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [override])


def test_scientific_notation_without_a_point_is_a_number() -> None:
    assert load_config(None, ["train.optimizer.lr=5e-4"]).train.optimizer.lr == 5e-4


def test_short_forms_of_model_and_objective_take_options_too() -> None:
    config = load_config(
        None,
        [
            "model=vse-fc",
            "model.embed_size=32",
            "objective=hardest",
            "objective.hardest.margin=0.3",
        ],
    )
    assert (config.model.name, config.model.embed_size) == ("vse-fc", 32)
    assert config.objective == {"hardest": {"margin": 0.3}}


def test_an_override_of_the_objective_replaces_the_recipes(tmp_path) -> None:
    (tmp_path / "a.yaml").write_text("objective: {hardest: {margin: 0.1}}\n")
    assert load_config(tmp_path / "a.yaml", ["objective=triplet"]).objective == {"triplet": {}}


def test_a_recipe_extends_another(tmp_path) -> None:
    (tmp_path / "base.yaml").write_text("train: {epochs: 3, batch_size: 16}\nmodel: vse-fc\n")
    (tmp_path / "b.yaml").write_text("extends: base.yaml\ntrain: {epochs: 4}\n")
    config = load_config(tmp_path / "b.yaml")
    assert (config.train.epochs, config.train.batch_size, config.model.name) == (4, 16, "vse-fc")


def test_recipes_that_extend_each_other_are_refused(tmp_path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(ConfigError, match="extends itself"):
        load_config(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "mapping"),
        ("train: {epochs: 1\n", "not a readable recipe"),
        ("seed: 1\nseed: 2\n", "given twice"),
        ("data: !!python/object/apply:os.system ['true']\n", "not a readable recipe"),
    ],
)
def test_a_recipe_that_is_not_one_is_refused(tmp_path, text, message) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "a.yaml")


def test_a_missing_recipe_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such recipe"):
        load_config("nowhere.yaml")


def test_values_cannot_be_changed_afterwards() -> None:
    from pydantic import ValidationError

    with pytest.raises(ValidationError):
        build_config({}).train.epochs = 5


def test_no_recipe_is_proposed_only_because_its_name_ends_alike(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"zzzz\.yaml: no such recipe \(counterfoil recipes"):
        load_config("zzzz.yaml")
