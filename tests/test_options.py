"""Every option of every registered part has an effect: another value, another result."""

from __future__ import annotations

import inspect
import itertools
import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

import counterfoil.models.importers
import counterfoil.search  # noqa: F401 - the rest of what registers parts
from counterfoil.core.errors import ConfigError
from counterfoil.core.registry import Registry
from counterfoil.encoders import image_encoders, poolings, text_encoders
from counterfoil.features import extractors
from counterfoil.features.efficientnet import has_weights
from counterfoil.matchers import matchers
from counterfoil.objectives import Objective, objectives
from counterfoil.objectives.protection import protections
from tests import option_probes as probes
from tests.option_cases import (
    ANY,
    BASES,
    ELSEWHERE,
    MODELS,
    NO_EFFECT,
    OTHER_KINDS,
    TOGETHER,
    VSE,
    Together,
)

REGISTRIES: list[Registry[Any]] = [
    poolings,
    image_encoders,
    text_encoders,
    matchers,
    objectives,
    protections,
    extractors,
]
OPTIONS = [
    (registry.kind, name, option)
    for registry in REGISTRIES
    for name in registry
    if name not in ELSEWHERE
    for option in registry.options(name)
]
BY_KIND = {registry.kind: registry for registry in REGISTRIES}


Probe = Callable[[str, Mapping[str, Any]], probes.Result | Iterator[probes.Result]]


class Trials:
    """Results by part and options, each computed once."""

    def __init__(self, root: Path) -> None:
        self.pairs = probes.small_pairs(root)
        self.folders = probes.folders(root, self.pairs)
        self.runs = (root / f"run-{number}" for number in itertools.count())
        self.results: dict[str, probes.Stages] = {}

    def result(self, kind: str, name: str, options: Mapping[str, Any]) -> probes.Stages:
        text = json.dumps(dict(options))
        for key in sorted(self.folders, key=len, reverse=True):
            text = text.replace(f"${key}", self.folders[key])
        key = f"{kind} {name} {text}"
        if key not in self.results:
            self.results[key] = self._refusals(self._probe(kind), name, json.loads(text))
        return self.results[key]

    def _refusals(self, probe: Probe, name: str, options: Mapping[str, Any]) -> probes.Stages:
        """A value that only another package could serve is refused, and so read."""

        def stages() -> probes.Stages:
            result = probe(name, options)
            return probes.Stages([result] if isinstance(result, dict) else result)

        if "nobody" not in options.values():
            return stages()
        with pytest.raises(ConfigError, match="nobody") as refused:
            stages()
        return probes.Stages([{"refused": str(refused.value)}])

    def _probe(self, kind: str) -> Probe:
        return {
            "pooling": probes.pooling,
            "image encoder": probes.image_encoder,
            "text encoder": probes.text_encoder,
            "matcher": probes.matcher,
            "objective": self._objective,
            "protection": self._protection,
            "extractor": probes.extractor,
        }[kind]

    def _objective(
        self, name: str, options: Mapping[str, Any]
    ) -> probes.Result | Iterator[probes.Result]:
        kind = objectives[name]
        if not kind.requires and kind.before_step is Objective.before_step:
            return probes.score_objective(name, options)
        return self._train(MODELS.get(name, VSE), {name: options})

    def _protection(self, name: str, options: Mapping[str, Any]) -> Iterator[probes.Result]:
        return self._train(VSE, {"triplet": {}, name: options})

    def _train(
        self, model: Mapping[str, Any], objective: Mapping[str, Any]
    ) -> Iterator[probes.Result]:
        tree = {
            "model": model,
            "objective": objective,
            "data": {"min_count": 1},
            "train": {"batch_size": 12, "epochs": 2},
        }
        return probes.training(tree, self.pairs, next(self.runs))


@pytest.fixture(scope="module")
def trials(tmp_path_factory) -> Trials:
    return Trials(tmp_path_factory.mktemp("options"))


def attempts(kind: str, name: str, option: str) -> tuple[dict[str, Any], list[Any]]:
    """What to set beside an option, and the values to try it with."""
    together = TOGETHER.get((kind, name, option)) or ANY.get((kind, option)) or Together("")
    base = {**BASES.get((kind, name), {}), **together.base}
    entry = BY_KIND[kind][name]
    hint = get_type_hints(entry.__init__ if inspect.isclass(entry) else entry)[option]
    default = base.get(option, BY_KIND[kind].options(name)[option])
    values = together.values or other_values(hint, default)
    assert values, f"say in TOGETHER which values {kind} '{name}' is to be given as {option}"
    return base, values


def other_values(hint: Any, default: Any) -> list[Any]:
    """Values of a type other than the default; nothing where the type does not tell any."""
    if get_origin(hint) is Literal:
        return [choice for choice in get_args(hint) if choice != default]
    if get_origin(hint) in (Union, types.UnionType):
        return [v for part in get_args(hint) for v in other_values(part, default)][:1]
    if hint is bool:
        return [not default]
    if hint is int:
        return [2 * default if default else 3]
    if hint is float:
        return [1.5 * default if default else 0.5]
    return []


@pytest.mark.parametrize(("kind", "name", "option"), OPTIONS, ids=map(" ".join, OPTIONS))
def test_an_option_changes_the_result_unless_it_is_listed_as_one_that_does_not(
    trials, kind, name, option
) -> None:
    if name == "efficientnet-lite" and not all(has_weights(variant) for variant in (0, 1, 2)):
        pytest.skip("its weights are not installed")
    base, values = attempts(kind, name, option)
    results = [trials.result(kind, name, base)]
    results += [trials.result(kind, name, {**base, option: value}) for value in values]
    alike = [
        (one, other)
        for one, other in itertools.combinations(range(len(results)), 2)
        if not probes.differs(results[one], results[other])
    ]
    if (kind, name, option) in NO_EFFECT:
        assert alike, f"{option} has an effect: take it off the list NO_EFFECT"
    else:
        assert not alike, f"{option} of {name}: the same result with {[base, *values]}: {alike}"


def test_every_registry_is_tried_or_listed_as_one_that_is_not() -> None:
    modules = [module for name, module in sys.modules.items() if name.startswith("counterfoil")]
    entries = [value for module in modules for value in vars(module).values()]
    registries = {entry.kind: entry for entry in entries if isinstance(entry, Registry)}
    assert registries.keys() == BY_KIND.keys() | OTHER_KINDS.keys()
    for kind in ("model", "importer"):
        assert not any(registries[kind].options(name) for name in registries[kind])


def test_the_tables_name_options_that_exist() -> None:
    listed = {*TOGETHER, *NO_EFFECT}
    assert listed <= set(OPTIONS)
    assert set(BASES) <= {(kind, name) for kind, name, _ in OPTIONS}
    assert set(ANY) <= {(kind, option) for kind, _, option in OPTIONS}
