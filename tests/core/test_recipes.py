"""Recipes that are meant to hurt, and numbers that nothing can be made of, are errors in words."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import yaml
from typer.testing import CliRunner

from counterfoil.cli import app
from counterfoil.core.config import build_config, load_config
from counterfoil.core.errors import ConfigError
from counterfoil.core.recipes import parse_yaml
from counterfoil.core.registry import Registry
from tests.conftest import thinned
from tests.special import SPECIAL, make_special, within

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 500))
HOSTILE = {
    "alias bomb": LAUGHS,
    "alias bomb in mappings": "a: &a {x: 1, y: 2}\n"
    + "".join(f"{b}: &{b} {{x: *{a}, y: *{a}}}\n" for a, b in pairwise("abcdefghijklmnopq")),
    "alias chain": CHAIN,
    "alias of itself": "a: &a [1, *a]",
    "alias of itself in a mapping": "a: &a {b: *a}",
    "merge of itself": "a: &a {<<: *a}",
    "merge": "a: &a {x: 1}\nb: {<<: *a, y: 2}",
    "merge of a list": "a: &a {x: 1}\nb: {<<: [*a, *a]}",
    "many tags": "!" * 200_000,
    "a long tag": "a: !" + "x" * 100_000 + " 1",
    "a long anchor": "a: *" + "x" * 100_000,
    "a long key twice": "? " + "k" * 1000 + "\n: 1\n? " + "k" * 1000 + "\n: 2",
    "a key twice with an escape": '"\\e[2J": 1\n"\\e[2J": 2',
    "3000 lists": "a: " + "[" * 3000 + "]" * 3000,
    "3000 open lists": "a: " + "[" * 3000,
    "3000 mappings": "{a: " * 3000 + "1" + "}" * 3000,
    "3000 blocks": "".join(" " * n + "a:\n" for n in range(480)),
    "many values": "a: [" + "1, " * 60_000 + "]",
    "a long number": "a: " + "9" * 5000,
    "a long number of base 60": "a: " + "1:" * 2000 + "1",
    "a long hexadecimal number": "a: 0x" + "f" * 5000,
    "a date by its tag": "a: !!timestamp nodate",
    "a boolean by its tag": "a: !!bool maybe",
    "a number by its tag": "a: !!int x",
    "an empty number by its tag": "a: !!int ''",
    "bytes by their tag": "a: !!binary eA==",
    "a set by its tag": "a: !!set {x}",
    "Python": "a: !!python/object/apply:os.system [true]",
    "a list as a key": "? [1, 2]\n: 3",
    "a control character": "a: \x01",
    "two documents": "a: 1\n---\nb: 2",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_recipe_is_a_config_error_and_takes_no_time(name, tmp_path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(HOSTILE[name], encoding="utf-8")
    with pytest.raises(ConfigError, match="not a readable recipe") as error:
        within(60, lambda: load_config(path))
    message = str(error.value).removeprefix(str(path))
    assert len(message) < 250
    assert "\n" not in message
    assert "unicode string" not in message


@pytest.mark.parametrize("name", thinned(HOSTILE, "Python", "a list as a key"))
def test_a_hostile_value_of_an_override_is_a_config_error(name) -> None:
    value = HOSTILE[name] if "\n" in HOSTILE[name] else HOSTILE[name].removeprefix("a: ")
    with pytest.raises(ConfigError):
        within(60, lambda: load_config(None, [f"objective={value}"]))


def test_aliases_in_moderation_are_read() -> None:
    shared = {"x": 1, "y": [1, 2]}
    assert parse_yaml("a: &a {x: 1, y: [1, 2]}\nb: [*a, *a]") == {
        "a": shared,
        "b": [shared, shared],
    }
    assert parse_yaml("[1_000, 0x1F, 5e-4, .5, true, null, 2020-01-01, 1:30]") == [
        1000, 31, 5e-4, 0.5, True, None, "2020-01-01", 90,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["merge", "merge of a list"])
def test_merge_keys_are_refused_in_words(name) -> None:
    with pytest.raises(yaml.YAMLError, match=r"^line 2: merge keys \(<<\) are not supported; use"):
        parse_yaml(HOSTILE[name])
    assert parse_yaml("a: '<<'\n'<<': 1") == {"a": "<<", "<<": 1}


def test_a_key_given_twice_is_an_error_that_names_it() -> None:
    with pytest.raises(yaml.YAMLError, match="'k5' is given twice"):
        parse_yaml("".join(f"k{n}: 1\n" for n in range(9)) + "k5: 2\n")


def test_a_recipe_beyond_its_size_is_a_config_error(tmp_path) -> None:
    path = tmp_path / "recipe.yaml"
    with path.open("wb") as file:
        file.truncate(2**34)
    with pytest.raises(ConfigError, match="too large: 16 GiB, at most 256 KiB"):
        load_config(path)


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_recipe_that_is_no_regular_file_is_a_config_error(kind, tmp_path) -> None:
    make_special(kind, tmp_path / "recipe.yaml")
    (tmp_path / "next.yaml").write_text("extends: recipe.yaml")
    for name in ("recipe.yaml", "next.yaml"):
        with pytest.raises(ConfigError, match="not a regular file"):
            within(20, lambda name=name: load_config(tmp_path / name))


def test_recipes_that_extend_each_other_without_end_are_a_config_error(tmp_path) -> None:
    for number in range(400):
        (tmp_path / f"{number}.yaml").write_text(f"extends: {number + 1}.yaml")
    (tmp_path / "400.yaml").write_text("seed: 1")
    with pytest.raises(ConfigError, match="more than 16 recipes"):
        load_config(tmp_path / "0.yaml")
    assert load_config(tmp_path / "390.yaml").seed == 1
    (tmp_path / "odd.yaml").write_text('extends: "a\\0b"')
    for path in (tmp_path / "odd.yaml", "a\0b", "\ud800"):
        with pytest.raises(ConfigError, match="no such recipe"):
            load_config(path)


BEYOND = [
    "train.optimizer.lr=.inf", "train.optimizer.lr=.nan", "train.optimizer.lr=1e300",
    "train.optimizer.lr=-.inf", "train.optimizer.lr=nan", "train.optimizer.lr=0",
    "train.optimizer.weight_decay=.inf", "train.optimizer.weight_decay=1e300",
    "train.optimizer.momentum=1.5", "train.optimizer.betas=[0.9, 1.0]",
    "train.optimizer.betas=[.nan, 0.5]", "train.optimizer.betas=[-1, 0.5]",
    "train.optimizer.clip=.inf", "train.optimizer.clip=.nan", "train.optimizer.clip=1e300",
    "train.optimizer.pretrained_lr_factor=1e300", "train.schedule.factor=.inf",
    "train.schedule.decay_epochs=[-1]", "train.schedule.warmup_steps=99999999999999999999",
    "seed=-1", "seed=4294967296", "seed=99999999999999999999999999", "seed=1.5",
    "train.epochs=99999999999999999999", "train.batch_size=99999999999", "train.batch_size=-2",
    "train.chunk_size=99999999999", "train.accumulate=99999999999", "train.log_every=0",
    "train.save_every=99999999999999999999", "train.early_stop=99999999999999999999",
    "data.workers=99999999", "data.workers=-1", "data.views=99999999", "data.noise=.nan",
    "data.min_count=99999999999999999999", "data.drop_regions=.nan", "data.random_crop=.nan",
    "model.embed_size=99999999999", "model.embed_size=-1", "model.embed_size=1e9",
    "model.ensemble_size=99999999", "evaluation.folds=99999999999",
    "evaluation.bootstrap=99999999999",
    "evaluation.batch_size=99999999999", "evaluation.max_images=99999999999999999999",
]  # fmt: skip


@pytest.mark.parametrize("override", BEYOND)
def test_a_number_that_is_not_finite_or_beyond_its_bound_is_a_config_error(override) -> None:
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        load_config(None, [override])


def test_an_error_about_a_huge_value_is_short() -> None:
    with pytest.raises(ConfigError) as error:
        build_config({"seed": ["x" * 100_000]})
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e300, 10**30, [float("nan")]])
def test_an_option_of_a_part_that_is_not_a_finite_number_is_a_config_error(value) -> None:
    parts: Registry = Registry("part")

    @parts.register("one")
    class One:
        def __init__(self, *, size: int | float | list[float] = 1) -> None:
            self.size = size

    with pytest.raises(ConfigError, match=r"parts.size: expected a finite number"):
        parts.create("one", {"size": value}, where="parts")
    assert parts.create("one", {"size": 2**32}).size == 2**32


@pytest.mark.parametrize(
    "override",
    [
        "objective={hardest: {margin: .inf}}", "objective={hardest: .nan}",
        "objective={hardest: {weight: .inf}}", "objective={hardest: {margin: 1e300}}",
        "model.text.word_dim=99999999999", "model.text.layers=1000000",
        "model.image={name: 7}", "objective={}",
    ],
)  # fmt: skip
def test_the_command_line_ends_in_one_error_for_options_of_parts(override, tmp_path) -> None:
    args = ["train", "data.options.images=[8,4,4]", override, "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, [*args, "--cache", str(tmp_path / "cache")])
    assert isinstance(result.exception, ConfigError), result.exception
    assert not (tmp_path / "run").exists()


def _parts(fault: Exception) -> Registry:
    parts: Registry = Registry("part")

    @parts.register("one")
    class One:
        def __init__(self, *, size: int = 1) -> None:
            raise fault

    return parts


@pytest.mark.parametrize("options", [{}, {"size": 2}])
@pytest.mark.parametrize(
    "fault",
    [
        MemoryError("no room"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        NotImplementedError("not written yet"),
        KeyError("size"),
    ],
)
def test_a_bug_or_a_full_memory_in_a_part_is_no_config_error(fault, options) -> None:
    with pytest.raises(type(fault)) as error:
        _parts(fault).create("one", options)
    assert error.value is fault


def test_a_value_that_a_part_refuses_is_a_config_error_only_if_a_user_set_one() -> None:
    for fault in (
        ValueError("size must be even"),
        ZeroDivisionError("division by zero"),
        RuntimeError("Trying to create tensor with negative dimension -4: [-4, 2]"),
    ):
        with pytest.raises(
            ConfigError, match=r"'one' cannot be built with \{'size': 2\}: "
        ) as error:
            _parts(fault).create("one", {"size": 2})
        assert error.value.__cause__ is fault
        with pytest.raises(type(fault)):
            _parts(fault).create("one", {})
