"""Rows times seeds to runs: each with its config, the hash that names it, and its folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from counterfoil.config import RunConfig, apply_override, build_config, merge
from counterfoil.errors import ConfigError, nearest
from counterfoil.models import resolve
from counterfoil.objectives import objectives
from counterfoil.reproduce.spec import AnyArtefact, Artefact, DataSet, Layers, RunSpec, Sweep, Tree
from counterfoil.training.run import MAY_CHANGE, holds_a_run, is_finished, located

Scale = Literal["full", "smoke"]
State = Literal["finished", "unfinished", "new"]
REFERENCE = re.compile(r"\{run:([^}]+)\}")


@dataclass(frozen=True)
class Settings:
    """What the runs are made on: the data, the published numbers beside them, how much of all."""

    data: str = "scenes"
    published: str | None = None
    scale: Scale = "full"
    seeds: int = 3
    overrides: tuple[str, ...] = ()

    @property
    def on_scenes(self) -> bool:
        return self.data == "scenes"


@dataclass(frozen=True)
class PlannedRun:
    """One training. Two rows, of whatever tables, with one digest share one folder."""

    name: str
    config: RunConfig
    digest: str
    folder: Path
    needs: tuple[PlannedRun, ...] = ()

    @property
    def state(self) -> State:
        if is_finished(self.folder):
            return "finished"
        return "unfinished" if holds_a_run(self.folder) else "new"

    @property
    def title(self) -> str:
        return f"{self.name}, seed {self.config.seed}"

    def refused(self) -> str | None:
        """Why it cannot run, where a name in it is not known."""
        try:
            resolve(self.config.model)
            for name in self.config.objective:
                objectives[name]
        except ConfigError as error:
            return str(error)
        return None


@dataclass
class Plan:
    """The runs of an artefact; ``runs[name]`` has one entry a seed."""

    artefact: AnyArtefact
    settings: Settings
    out: Path
    runs: dict[str, list[PlannedRun]] = field(default_factory=dict)

    @property
    def folder_name(self) -> str:
        """Where its results go, so that other data, scales and changes keep theirs."""
        said = self.settings
        parts = [self.artefact.name, Path(said.data).name]
        if said.published and not said.on_scenes:
            parts.append(said.published)
        parts += [said.scale] if said.scale != "full" else []
        return re.sub(r"[^A-Za-z0-9.=+_-]+", "_", "-".join([*parts, *said.overrides]))[:150]

    def in_order(self) -> list[PlannedRun]:
        """Every training once, after those it needs."""
        found: dict[str, PlannedRun] = {}

        def add(run: PlannedRun) -> None:
            for needed in run.needs:
                add(needed)
            found.setdefault(run.digest, run)

        # seed by seed: a table that is cut short has every row once before any row twice
        for seed in range(self.settings.seeds):
            for runs in self.runs.values():
                add(runs[seed])
        return list(found.values())


def make_plan(artefact: AnyArtefact, settings: Settings, out: Path) -> Plan:
    """Resolve everything that an artefact shows; nothing is run or written."""
    if settings.seeds < 1:
        raise ConfigError(f"--seeds {settings.seeds}: at least one")
    plan = Plan(artefact, settings, out.resolve())
    maker = _Maker(artefact, settings, plan.out / "runs")
    if isinstance(artefact, Sweep):
        for value in artefact.values:
            change = f"{artefact.key}={json.dumps(value)}"
            name = f"{artefact.run}, {artefact.key.rpartition('.')[2]}={value:g}"
            plan.runs[name] = [
                maker.make(artefact.run, seed, change, name) for seed in range(settings.seeds)
            ]
    else:
        for name in artefact.used:
            plan.runs[name] = [maker.make(name, seed) for seed in range(settings.seeds)]
    return plan


def find_data_set(artefact: Artefact, data: str, asked: str | None) -> str | None:
    """Key of the data set whose published numbers belong to ``data``: asked for, or detected."""
    known = artefact.data_sets
    offered = getattr(artefact, "published_on", list(known)) or list(known)
    if asked is not None:
        if asked not in known:
            raise ConfigError(
                f"--published {asked}: not a data set of {artefact.name}{nearest(asked, known)} "
                f"(known: {', '.join(known) or 'none'})"
            )
        return asked
    if data != "scenes":
        name = Path(data).resolve().name.lower()
        for key in offered:
            if any(part in name for part in known[key].detect):
                return key
        return None
    return offered[0] if offered else None


@dataclass
class _Maker:
    """Makes planned runs, each reference to another run included."""

    artefact: Artefact
    settings: Settings
    folder: Path
    making: list[str] = field(default_factory=list)

    def make(self, name: str, seed: int, change: str = "", title: str = "") -> PlannedRun:
        if name in self.making:
            raise ConfigError(f"run '{name}' needs itself ({' → '.join([*self.making, name])})")
        where = f"{self.artefact.name}, run '{name}'"
        tree = self._tree(name, seed, change)
        self.making.append(name)
        try:
            needs = {other: self._needed(other, seed, where) for other in _references(tree)}
        finally:
            self.making.pop()
        named = build_config(_replace(tree, lambda key: f"run:{needs[key].digest}"), where)
        digest = digest_of(located(named))
        config = located(build_config(_replace(tree, lambda key: str(needs[key].folder)), where))
        folder = self.folder / _folder_name(config, digest)
        return PlannedRun(title or name, config, digest, folder, tuple(needs.values()))

    def _needed(self, name: str, seed: int, where: str) -> PlannedRun:
        if name not in self.artefact.runs:
            raise ConfigError(
                f"{where}: refers to the unknown run '{name}'{nearest(name, self.artefact.runs)}"
            )
        return self.make(name, seed)

    def _tree(self, name: str, seed: int, change: str) -> Tree:
        """Base, then the run, then what makes all of it small, then what the user says."""
        base, chain = self.artefact.base, self.artefact.layers(name)
        tree: Tree = {}
        for layers in (base, *chain):
            for part in self._sized(layers):
                tree = merge(tree, part)
        if change:
            tree = apply_override(tree, change)
        if not self.settings.on_scenes:
            tree = merge(tree, {"data": {"source": self.settings.data}})
        if self.settings.scale == "smoke":
            for layers in (base, *chain):
                tree = merge(tree, layers.smoke)
                tree = merge(tree, layers.scenes_smoke if self.settings.on_scenes else {})
        for override in self.settings.overrides:
            tree = apply_override(tree, override)
        first = tree.get("seed", 0)
        return merge(tree, {"seed": first + seed if isinstance(first, int) else first})

    def _sized(self, layers: Layers | RunSpec) -> list[Tree]:
        if self.settings.on_scenes:
            return [layers.common, layers.scenes]
        chosen = self._data_set()
        own = layers.by_data.get(chosen.settings, {}) if chosen and chosen.settings else {}
        return [layers.common, layers.paper, own]

    def _data_set(self) -> DataSet | None:
        key = self.settings.published
        return self.artefact.data_sets.get(key) if key else None


def digest_of(config: RunConfig) -> str:
    """A short hash of everything that may change a result."""
    tree = config.model_dump()
    for section, key in MAY_CHANGE:
        tree[section].pop(key)
    text = json.dumps(tree, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:12]


def _folder_name(config: RunConfig, digest: str) -> str:
    told = f"{config.model.name}-{'+'.join(config.objective)}-seed{config.seed}"
    return re.sub(r"[^A-Za-z0-9.+_-]+", "_", told) + f"-{digest}"


def _references(value: Any) -> list[str]:
    """Names in ``{run:name}`` anywhere in a tree, each once."""
    if isinstance(value, dict):
        return list(dict.fromkeys(name for item in value.values() for name in _references(item)))
    if isinstance(value, list):
        return list(dict.fromkeys(name for item in value for name in _references(item)))
    return REFERENCE.findall(value) if isinstance(value, str) else []


def _replace(value: Any, to: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {key: _replace(item, to) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace(item, to) for item in value]
    return REFERENCE.sub(lambda m: to(m[1]), value) if isinstance(value, str) else value
