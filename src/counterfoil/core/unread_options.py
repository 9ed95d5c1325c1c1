"""Settings of a config that another setting leaves without effect, such as momentum with adamw."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel

from counterfoil.core.errors import ConfigError
from counterfoil.core.recipes import parse_yaml
from counterfoil.core.registry import declared


class Reader(NamedTuple):
    """An option that is read only if the setting ``decided_by`` has one of some values.

    Without ``values``, any number but 0 and any list but an empty one will do.
    """

    option: str
    decided_by: str
    values: tuple[str, ...]
    advice: str

    def reads(self, value: Any) -> bool:
        return value in list(self.values) if self.values else bool(value)


_NOT_GIVEN = object()

READERS = (
    Reader("train.schedule.decay_epochs", "train.schedule.name", ("step",), "step"),
    Reader("train.schedule.factor", "train.schedule.name", ("step",), "step"),
    Reader("train.schedule.factor", "train.schedule.decay_epochs", (), "a list of epochs"),
    Reader("train.optimizer.momentum", "train.optimizer.name", ("sgd",), "sgd"),
    Reader("train.optimizer.betas", "train.optimizer.name", ("adam", "adamw"), "adam or adamw"),
    Reader("data.drop_regions_varying", "data.drop_regions", (), "a share above 0"),
)


PARTS = {
    "image": ("encoders", "image_encoders"),
    "text": ("encoders", "text_encoders"),
    "matcher": ("matchers", "matchers"),
}
"""Sections of ``model``, with the package and the registry of their parts."""


def refuse_unread(config: BaseModel) -> None:
    """Raise if an option differs from its default, but the config has no use for it."""
    defaults, problems = type(config)(), dict[str, str]()
    for reader in READERS:
        value, decisive = _value(config, reader.option), _value(config, reader.decided_by)
        default = _value(defaults, reader.option)
        if value != default and not reader.reads(decisive) and reader.option not in problems:
            problems[reader.option] = (
                f"{reader.option}={_text(value)} has no effect with "
                f"{reader.decided_by}={_text(decisive)}: set {reader.decided_by} to "
                f"{reader.advice}, or remove {reader.option} (its default is {_text(default)})"
            )
    if problems:
        raise ConfigError("\n  ".join(problems.values()))


def without_replaced(tree: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A recipe without the options that no longer have a use after the overrides.

    ``train.schedule.name=cosine`` also removes the ``decay_epochs`` of the recipe, and
    ``model.matcher.name=chan`` the options of the recipe's matcher that CHAN does not have.
    """
    given = {}
    for one in overrides:
        key, _, text = one.partition("=")
        with suppress(ValueError, yaml.YAMLError):  # refused when it is applied
            given[key.strip()] = parse_yaml(text)
    return _without_unread(tree, given)


def without_extended(tree: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a recipe that is extended by another one, ``change``."""
    given = {}
    for decisive in (*(reader.decided_by for reader in READERS), *map(_name_key, PARTS)):
        value: Any = change
        for key in decisive.split("."):
            value = value.get(key, _NOT_GIVEN) if isinstance(value, Mapping) else _NOT_GIVEN
        if value is not _NOT_GIVEN:
            given[decisive] = value
    return _without_unread(tree, given)


def _name_key(part: str) -> str:
    return f"model.{part}.name"


def _without_unread(tree: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(tree)
    for reader in READERS:
        if reader.decided_by in given and not reader.reads(given[reader.decided_by]):
            result = _without(result, reader.option.split("."))
    for part, (package, registry) in PARTS.items():
        name, model = given.get(_name_key(part)), result.get("model")
        options = model.get(part) if isinstance(model, Mapping) else None
        if not isinstance(name, str) or not isinstance(options, Mapping):
            continue
        if name == options.get("name") or (known := declared(package, registry).get(name)) is None:
            continue
        for option in options.keys() - {"name", *known}:
            result = _without(result, ["model", part, option])
    return result


def _without(tree: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    below = tree.get(keys[0])
    others = {key: value for key, value in tree.items() if key != keys[0]}
    if len(keys) == 1:
        return others
    return {**tree, keys[0]: _without(below, keys[1:])} if isinstance(below, Mapping) else {**tree}


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def _text(value: Any) -> str:
    """A value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)
