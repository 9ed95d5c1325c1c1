"""Rows times seeds to runs: each with its config, the hash that names it, and its folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from counterfoil.config import apply_override, build_config, merge
from counterfoil.errors import ConfigError, nearest
from counterfoil.reproduce.artefact import Artefact, DataSet, Layers, RunSpec, Tree
from counterfoil.reproduce.planned import (
    Job,
    PlannedGuide,
    PlannedRun,
    digest_of,
    guide_digest,
    recipe_of,
    run_folder_name,
)
from counterfoil.reproduce.references import references, replace_references, run_reference
from counterfoil.reproduce.spec import AnyArtefact
from counterfoil.reproduce.sweep import Sweep
from counterfoil.training.run import located

Scale = Literal["full", "smoke"]


@dataclass(frozen=True)
class Settings:
    """What the runs are made on: the data, the published numbers beside them, how much of all."""

    data: str = "scenes"
    published: str | None = None
    scale: Scale = "full"
    seeds: int = 3
    overrides: tuple[str, ...] = ()
    tuned: Mapping[str, str] = field(default_factory=dict)
    """By the name of a run, an override for it and for those that are like it."""

    @property
    def on_scenes(self) -> bool:
        return self.data == "scenes"


@dataclass
class Plan:
    """The runs of an artefact; ``runs[name]`` has one entry a seed."""

    artefact: AnyArtefact
    settings: Settings
    out: Path
    runs: dict[str, list[PlannedRun]] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
    """Digests of runs whose numbers are known already: trained only where others need them."""

    @property
    def folder_name(self) -> str:
        """Where its results go, so that other data, scales and changes keep theirs."""
        said = self.settings
        parts = [self.artefact.name, Path(said.data).name]
        if said.published and not said.on_scenes:
            parts.append(said.published)
        parts += [said.scale] if said.scale != "full" else []
        return re.sub(r"[^A-Za-z0-9.=+_-]+", "_", "-".join([*parts, *said.overrides]))[:150]

    @property
    def folds(self) -> int | None:
        """In which folds the chosen data set is judged, where that is not the runs' own affair."""
        said = self.settings
        chosen = self.artefact.data_sets.get(said.published or "")
        return None if said.on_scenes or chosen is None else chosen.folds

    def jobs(self) -> list[Job]:
        """Every training and every guide once, after those it needs."""
        return _ordered(self._shown(), lambda job: True)

    def missing(self) -> list[Job]:
        """What is still to do: a finished run asks for nothing that it was made with."""
        wanted = [run for run in self._shown() if run.digest not in self.settled]
        return _ordered(wanted, lambda job: job.state != "finished")

    def in_order(self) -> list[PlannedRun]:
        """Every training once, after those it needs."""
        return [job for job in self.jobs() if isinstance(job, PlannedRun)]

    def _shown(self) -> list[PlannedRun]:
        # seed by seed: a table that is cut short has every row once before any row twice
        return [runs[seed] for seed in range(self.settings.seeds) for runs in self.runs.values()]


def _ordered(shown: Sequence[Job], wanted: Callable[[Job], bool]) -> list[Job]:
    found: dict[str, Job] = {}

    def add(job: Job) -> None:
        if job.digest in found or not wanted(job):
            return
        for needed in job.needs:
            add(needed)
        found[job.digest] = job

    for job in shown:
        add(job)
    return list(found.values())


def make_plan(artefact: AnyArtefact, settings: Settings, out: Path) -> Plan:
    """Resolve everything that an artefact shows; nothing is run or written."""
    if settings.seeds < 1:
        raise ConfigError(f"--seeds {settings.seeds}: at least one")
    plan = Plan(artefact, settings, out.resolve())
    maker = _Maker(artefact, settings, plan.out)
    seeds = range(settings.seeds)
    if isinstance(artefact, Sweep):
        for point in artefact.points:
            change = f"{artefact.key}={json.dumps(point.value)}"
            plan.runs[point.title] = [
                maker.make(point.line.run, seed, change, point.title) for seed in seeds
            ]
    else:
        for name in artefact.used:
            plan.runs[name] = [maker.make(name, seed) for seed in seeds]
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
    """Makes planned runs, and what each of them refers to."""

    artefact: Artefact
    settings: Settings
    out: Path
    making: list[str] = field(default_factory=list)

    def make(self, reference: str, seed: int, change: str = "", title: str = "") -> PlannedRun:
        """The run that is meant by ``reference`` where ``seed`` is in hand."""
        meant = run_reference(reference)
        name, seed = meant.name, meant.at(seed)
        if name in self.making:
            raise ConfigError(f"run '{name}' needs itself ({' → '.join([*self.making, name])})")
        where = f"{self.artefact.name}, run '{name}'"
        tree = self._tree(name, seed, change)
        self.making.append(name)
        try:
            needs = {text: self._needed(text, seed, where) for text in references(tree)}
        finally:
            self.making.pop()
        # hashed by what its needs are, not by where they lie
        told = {text: f"{text.partition(':')[0]}:{job.digest}" for text, job in needs.items()}
        digest = digest_of(located(build_config(replace_references(tree, told.__getitem__), where)))
        alike = {text: f"{text}:{job.recipe}" for text, job in needs.items()}
        recipe = recipe_of(located(build_config(replace_references(tree, alike.__getitem__))))
        places = {text: str(job.folder) for text, job in needs.items()}
        config = located(build_config(replace_references(tree, places.__getitem__), where))
        folder = self.out / "runs" / run_folder_name(config, digest)
        return PlannedRun(title or name, config, digest, folder, tuple(needs.values()), recipe)

    def _needed(self, text: str, seed: int, where: str) -> Job:
        kind, _, named = text.partition(":")
        runs = tuple(self._referred(part, seed, where) for part in _parts(kind, named))
        if kind == "run":
            return runs[0]
        digest = guide_digest(runs)
        return PlannedGuide(runs, digest, self.out / "guides" / digest)

    def _referred(self, reference: str, seed: int, where: str) -> PlannedRun:
        try:
            name = run_reference(reference).name
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        if name not in self.artefact.runs:
            raise ConfigError(
                f"{where}: refers to the unknown run '{name}'{nearest(name, self.artefact.runs)}"
            )
        return self.make(reference, seed)

    def _tree(self, name: str, seed: int, change: str) -> Tree:
        """Base, then the run, then what makes all of it small, then the changes.

        A tuned value comes after the run it was tuned for, so that a run that is like it takes it,
        unless it has a value of its own.
        """
        base, chain = self.artefact.base, self.artefact.layers(name)
        tree: Tree = {}
        tuned = [self.settings.tuned.get(one, "") for one in self.artefact.lineage(name)]
        for layers, chosen in zip((base, *chain), ("", *tuned), strict=True):
            for part in self._sized(layers):
                tree = merge(tree, part)
            if chosen:
                tree = apply_override(tree, chosen)
        if not self.settings.on_scenes:
            tree = merge(tree, {"data": {"source": self.settings.data}})
        if self.settings.scale == "smoke":
            for layers in (base, *chain):
                tree = merge(tree, layers.smoke)
                tree = merge(tree, layers.scenes_smoke if self.settings.on_scenes else {})
        for term, options in _beside(chain).items():
            tree = apply_override(tree, f"objective.{term}={json.dumps(options)}")
        changes = {key: value for spec in chain for key, value in spec.change.items()}
        for key, value in changes.items():
            tree = apply_override(tree, f"{key}={json.dumps(value)}")
        before = tree
        for override in filter(None, (change, *self.settings.overrides)):
            tree = apply_override(tree, override)
        for key in {key: None for spec in chain for key in spec.ignores}:
            tree = _with_former(tree, before, key)
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


def _parts(kind: str, named: str) -> list[str]:
    return named.split(",") if kind == "guide" else [named]


def _with_former(tree: Tree, former: Tree, key: str) -> Tree:
    """A tree that has at ``key`` what another one has there, or nothing.

    >>> _with_former({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}}, "a.b")
    {'a': {'c': 2}}
    """
    first, _, rest = key.partition(".")
    here, there = tree.get(first), former.get(first)
    if rest:
        if not isinstance(here, dict):
            return tree
        below = _with_former(here, there if isinstance(there, dict) else {}, rest)
        return {**tree, first: below}
    others = {name: value for name, value in tree.items() if name != first}
    return {**others, first: former[first]} if first in former else others


def _beside(chain: Sequence[RunSpec]) -> Tree:
    """Terms that a run and those it is like have beside their objective."""
    terms: Tree = {}
    for spec in chain:
        terms = merge(terms, spec.beside)
    return terms
