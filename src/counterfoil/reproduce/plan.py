"""Rows times seeds to runs and guides: each with its config, the hash that names it, its folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union

from counterfoil.core.config import RunConfig, apply_override, build_config, merge
from counterfoil.core.errors import ConfigError, DataError, nearest
from counterfoil.models import resolve
from counterfoil.objectives import create_objective
from counterfoil.reproduce.artifact import Artifact, DataSet, Layers, RunSpec, Sweep, Tree
from counterfoil.reproduce.columns import references, replace_references, run_reference
from counterfoil.reproduce.spec import AnyArtifact
from counterfoil.training.guides.manifest import MANIFEST, read_manifest
from counterfoil.training.optim import PRETRAINED_FACTOR
from counterfoil.training.run_folder import RESUMABLE_KEYS, holds_a_run, is_finished, resolve_paths

State = Literal["finished", "unfinished", "new"]

MIXED_PRECISION_REVISION = 3
"""What mixed precision computes: until 1 it rounded vectors of length one, and cosines; until 2
GRUs were not in float16 with scaled gradients. Results and runs of another number are not those of
a plan."""

REVISIONS = {"naaf": 2, "bfan": 2}
"""Matchers that no longer compute what they did: NAAF's boundary from `adjust_epoch` on, which
fragments BFAN attends to. Results and runs of former revisions are not those of a plan either."""

Scale = Literal["full", "smoke"]


@dataclass(frozen=True)
class PlannedRun:
    """One training. Two rows, of whatever tables, with one digest share one folder.

    ``recipe`` is a digest of the same settings without the seed and without places on this
    machine: runs of one recipe may be averaged, wherever they were made.
    """

    name: str
    config: RunConfig
    digest: str
    folder: Path
    needs: tuple[Job, ...] = ()
    recipe: str = ""

    @property
    def state(self) -> State:
        if is_finished(self.folder):
            return "finished"
        return "unfinished" if holds_a_run(self.folder) else "new"

    @property
    def title(self) -> str:
        return f"{self.name}, seed {self.config.seed}"

    def refused(self) -> str | None:
        """Why it cannot run, where a name or an option in it makes no sense."""
        try:
            resolve(self.config.model)
            create_objective(self.config.objective)
        except ConfigError as error:
            return str(error)
        return None


@dataclass(frozen=True)
class PlannedGuide:
    """What some runs think of all their training data (NDGL), built once they are finished."""

    teachers: tuple[PlannedRun, ...]
    digest: str
    folder: Path

    @property
    def needs(self) -> tuple[Job, ...]:
        return self.teachers

    @property
    def recipe(self) -> str:
        return _digest("guide " + " ".join(run.recipe for run in self.teachers))

    @property
    def config(self) -> RunConfig:
        """Whose data it is built on, and on which device."""
        return self.teachers[0].config

    @property
    def state(self) -> State:
        if not (self.folder / MANIFEST).is_file():
            return "new"
        try:
            return "finished" if read_manifest(self.folder).complete else "unfinished"
        except DataError:  # building it says what is wrong
            return "unfinished"

    @property
    def title(self) -> str:
        return "guide of " + " and ".join(run.title for run in self.teachers)

    def refused(self) -> str | None:
        return None


Job = Union[PlannedRun, PlannedGuide]  # noqa: UP007 - the classes above refer to it


def digest_of(config: RunConfig) -> str:
    """A short hash of everything that may change a result."""
    return _digest(json.dumps(_telling(config), sort_keys=True, ensure_ascii=False))


def recipe_of(config: RunConfig) -> str:
    """A short hash of what may change a result, but for the seed and for where files lie."""
    tree = _telling(config)
    tree.pop("seed")
    return _digest(json.dumps(_unplaced(tree), sort_keys=True, ensure_ascii=False))


def _telling(config: RunConfig) -> dict[str, Any]:
    tree = config.model_dump()
    for section, key in RESUMABLE_KEYS:
        tree[section].pop(key)
    if config.train.precision != "float32":
        tree["train"]["mixed"] = MIXED_PRECISION_REVISION
    optimizer = tree["train"]["optimizer"]
    if optimizer["pretrained_lr_factor"] is None:  # what it then is
        optimizer["pretrained_lr_factor"] = PRETRAINED_FACTOR
    matcher = resolve(config.model).matcher["name"]
    if matcher in REVISIONS:
        tree["model"]["revision"] = REVISIONS[matcher]
    return tree


def _unplaced(value: Any) -> Any:
    """A tree with every absolute path cut down to its last name."""
    if isinstance(value, dict):
        return {key: _unplaced(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_unplaced(item) for item in value]
    if isinstance(value, str) and Path(value).is_absolute():
        return Path(value).name
    return value


def guide_digest(teachers: Sequence[PlannedRun]) -> str:
    """A short hash of the runs that a guide is made of."""
    return _digest("guide " + " ".join(run.digest for run in teachers))


def run_folder_name(config: RunConfig, digest: str) -> str:
    told = f"{config.model.name}-{'+'.join(config.objective)}-seed{config.seed}"
    return re.sub(r"[^A-Za-z0-9.+_-]+", "_", told) + f"-{digest}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:12]


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

    artifact: AnyArtifact
    settings: Settings
    out: Path
    runs: dict[str, list[PlannedRun]] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
    """Digests of runs whose numbers are known already: trained only where others need them."""

    @property
    def folder_name(self) -> str:
        """Where its results go, so that other data, scales and changes keep theirs."""
        said = self.settings
        parts = [self.artifact.name, Path(said.data).name]
        if said.published and not said.on_scenes:
            parts.append(said.published)
        parts += [said.scale] if said.scale != "full" else []
        return re.sub(r"[^A-Za-z0-9.=+_-]+", "_", "-".join([*parts, *said.overrides]))[:150]

    @property
    def folds(self) -> int | None:
        """In which folds the chosen data set is judged, where that is not the runs' own affair."""
        said = self.settings
        chosen = self.artifact.data_sets.get(said.published or "")
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


def make_plan(artifact: AnyArtifact, settings: Settings, out: Path) -> Plan:
    """Resolve everything that an artefact shows; nothing is run or written."""
    if settings.seeds < 1:
        raise ConfigError(f"--seeds {settings.seeds}: at least one")
    plan = Plan(artifact, settings, out.resolve())
    maker = _Maker(artifact, settings, plan.out)
    seeds = range(settings.seeds)
    if isinstance(artifact, Sweep):
        for point in artifact.points:
            change = f"{artifact.key}={json.dumps(point.value)}"
            plan.runs[point.title] = [
                maker.make(point.line.run, seed, change, point.title) for seed in seeds
            ]
    else:
        for name in artifact.used:
            plan.runs[name] = [maker.make(name, seed) for seed in seeds]
    return plan


def find_data_set(artifact: Artifact, data: str, asked: str | None) -> str | None:
    """Key of the data set whose published numbers belong to ``data``: asked for, or detected."""
    known = artifact.data_sets
    offered = getattr(artifact, "published_on", list(known)) or list(known)
    if asked is not None:
        if asked not in known:
            raise ConfigError(
                f"--published {asked}: not a data set of {artifact.name}{nearest(asked, known)} "
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

    artifact: Artifact
    settings: Settings
    out: Path
    making: list[str] = field(default_factory=list)

    def make(self, reference: str, seed: int, change: str = "", title: str = "") -> PlannedRun:
        """The run that is meant by ``reference`` where ``seed`` is in hand."""
        meant = run_reference(reference)
        name, seed = meant.name, meant.at(seed)
        if name in self.making:
            raise ConfigError(f"run '{name}' needs itself ({' → '.join([*self.making, name])})")
        where = f"{self.artifact.name}, run '{name}'"
        tree = self._tree(name, seed, change)
        self.making.append(name)
        try:
            needs = {text: self._needed(text, seed, where) for text in references(tree)}
        finally:
            self.making.pop()
        # hashed by what its needs are, not by where they lie
        told = {text: f"{text.partition(':')[0]}:{job.digest}" for text, job in needs.items()}
        digest = digest_of(
            resolve_paths(build_config(replace_references(tree, told.__getitem__), where))
        )
        alike = {text: f"{text}:{job.recipe}" for text, job in needs.items()}
        recipe = recipe_of(resolve_paths(build_config(replace_references(tree, alike.__getitem__))))
        places = {text: str(job.folder) for text, job in needs.items()}
        config = resolve_paths(build_config(replace_references(tree, places.__getitem__), where))
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
        if name not in self.artifact.runs:
            raise ConfigError(
                f"{where}: refers to the unknown run '{name}'{nearest(name, self.artifact.runs)}"
            )
        return self.make(reference, seed)

    def _tree(self, name: str, seed: int, change: str) -> Tree:
        """Base, then the run, then what makes all of it small, then the changes.

        A tuned value comes after the run it was tuned for, so that a run that is like it takes it,
        unless it has a value of its own.
        """
        base, chain = self.artifact.base, self.artifact.layers(name)
        tree: Tree = {}
        tuned = [self.settings.tuned.get(one, "") for one in self.artifact.lineage(name)]
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
        return self.artifact.data_sets.get(key) if key else None


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
