"""Settings that have no effect are refused; an override removes those of the recipe."""

from __future__ import annotations

import re

import pytest

from counterfoil.core.config import load_config
from counterfoil.core.errors import ConfigError
from counterfoil.core.recipes import recipe_names
from counterfoil.core.unknown_names import check_names
from counterfoil.core.unread_options import READERS, refuse_unread

UNREAD = [
    ("train.schedule.factor=0.5", "train.schedule.name=cosine", "train.schedule.name to step"),
    ("train.schedule.decay_epochs=[3]", "train.schedule.name=constant", "to step"),
    ("train.schedule.factor=0.5", "train.schedule.decay_epochs=[]", "to a list of epochs"),
    ("train.optimizer.momentum=0.5", "train.optimizer.name=adamw", "to sgd"),
    ("train.optimizer.betas=[0.5, 0.9]", "train.optimizer.name=sgd", "to adam or adamw"),
    ("data.drop_regions_varying=true", "data.drop_regions=0.0", "to a share above 0"),
]


@pytest.mark.parametrize(("option", "setting", "advice"), UNREAD, ids=lambda text: str(text))
def test_an_option_without_effect_is_refused_in_any_order(option, setting, advice) -> None:
    expected = re.escape(f"{option} has no effect with {setting}: set ") + f".*{advice}, or remove"
    for overrides in ([option, setting], [setting, option]):
        with pytest.raises(ConfigError, match=expected):
            refuse_unread(load_config(None, overrides))


def test_every_rule_is_tested() -> None:
    tested = {(option.partition("=")[0], other.partition("=")[0]) for option, other, _ in UNREAD}
    assert tested == {(reader.option, reader.decided_by) for reader in READERS}


def test_all_problems_are_named_at_once() -> None:
    config = load_config(None, ["train.optimizer.momentum=0.5", "data.drop_regions_varying=true"])
    with pytest.raises(ConfigError, match=r"(?s)momentum.*drop_regions_varying"):
        refuse_unread(config)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.schedule.name=cosine", "train.schedule.factor=0.1"],  # the default
        ["train.schedule.decay_epochs=[3]", "train.schedule.factor=0.5"],
        ["train.optimizer.name=sgd", "train.optimizer.momentum=0.5"],
        ["data.drop_regions=0.2", "data.drop_regions_varying=true"],
    ],
    ids=str,
)
def test_defaults_and_options_that_are_read_pass(overrides) -> None:
    refuse_unread(load_config(None, overrides))


@pytest.mark.parametrize("name", [name for name in recipe_names() if "/_" not in name])
def test_no_recipe_of_the_package_sets_an_option_without_effect(name) -> None:
    refuse_unread(load_config(name))


def test_an_override_removes_what_only_the_recipes_setting_reads(tmp_path) -> None:
    recipe = tmp_path / "a.yaml"
    recipe.write_text(
        "train: {schedule: {name: step, decay_epochs: [3], factor: 0.5, warmup_steps: 7}}\n"
        "data: {drop_regions: 0.2, drop_regions_varying: true}\n"
    )
    overrides = ["train.schedule.name=cosine", "data.drop_regions=0"]
    config = load_config(recipe, overrides)
    refuse_unread(config)
    schedule = config.train.schedule
    assert (schedule.decay_epochs, schedule.factor, schedule.warmup_steps) == ([], 0.1, 7)
    assert not config.data.drop_regions_varying
    with pytest.raises(ConfigError, match=r"decay_epochs=\[4\] has no effect"):
        refuse_unread(load_config(recipe, [*overrides, "train.schedule.decay_epochs=[4]"]))
    same = load_config(recipe, ["train.schedule.name=linear", "train.schedule.name=step"])
    assert same == load_config(recipe)


def test_a_recipe_that_contradicts_itself_loads_but_is_refused_for_a_new_run(tmp_path) -> None:
    """A run of an older version may have such a config, and must stay readable."""
    recipe = tmp_path / "config.yaml"
    recipe.write_text("train: {optimizer: {name: adam, momentum: 0.5}}\n")
    with pytest.raises(
        ConfigError, match=r"momentum=0\.5 has no effect with train\.optimizer\.name=adam"
    ):
        refuse_unread(load_config(recipe))


@pytest.mark.parametrize("override", ["train.schedule.name={", "train.schedule.name", "train=5"])
def test_an_override_that_is_none_is_still_refused_as_before(override) -> None:
    with pytest.raises(ConfigError, match=r"not a value|looks like|train"):
        load_config("coco/chan", [override])


def test_a_recipe_that_extends_another_replaces_its_schedule(tmp_path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: coco/chan\ntrain: {schedule: {name: cosine}}\n", encoding="utf-8")
    config = load_config(mine, [])
    refuse_unread(config)
    assert config.train.schedule.decay_epochs == []
    mine.write_text("extends: coco/chan\ntrain: {schedule: {factor: 0.5}}\n", encoding="utf-8")
    assert load_config(mine, []).train.schedule.decay_epochs == [15]


@pytest.mark.parametrize(
    ("recipe", "override", "part", "left"),
    [
        ("scenes/naaf", "model.matcher.name=scan-t2i", "matcher", {"name"}),
        ("scenes/naaf", "model.matcher.name=naaf-reference", "matcher", {"name"}),
        ("scenes/naaf", "model.matcher.name=naaf", "matcher", {"name", "adjust_epoch"}),
        ("scenes/dive", "model.image.name=fc", "image", {"name"}),
        ("scenes/naaf", "model.text.name=gru", "text", {"name", "word_dim"}),
    ],
)
def test_a_replaced_part_takes_along_what_it_alone_had(recipe, override, part, left) -> None:
    config = load_config(recipe, [override])
    check_names(config)
    assert set(getattr(config.model, part)) == left


def test_an_option_given_with_another_part_stays_and_is_refused_there(tmp_path) -> None:
    config = load_config("scenes/naaf", ["model.matcher.name=chan", "model.matcher.alpha=0.5"])
    assert config.model.matcher == {"name": "chan", "alpha": 0.5}
    wrong = load_config("scenes/naaf", ["model.matcher.name=chan", "model.matcher.adjust_epoch=2"])
    with pytest.raises(ConfigError, match="'chan' has no option 'adjust_epoch'"):
        check_names(wrong)
    (tmp_path / "mine.yaml").write_text("extends: scenes/naaf\nmodel: {matcher: {name: chan}}\n")
    assert load_config(tmp_path / "mine.yaml").model.matcher == {"name": "chan"}
