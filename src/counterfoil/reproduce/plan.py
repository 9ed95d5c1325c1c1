"""Plans the training runs and guides of a table or figure: configs, digests and folders."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Union

from counterfoil.core.config import DataConfig, RunConfig, apply_override, build_config, merge
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
"""Part of the digest of runs in mixed precision. Revision 1 stopped rounding unit vectors and
cosines; 2 runs GRUs in float16 with gradient scaling. A plan ignores runs of other revisions."""

REVISIONS = {"naaf": 2, "bfan": 2}
"""Part of the digest of runs with matchers that have changed: NAAF's boundary from `adjust_epoch`
on, and the fragments to which BFAN attends. A plan ignores runs of other revisions."""

Scale = Literal["full", "smoke"]


@dataclass(frozen=True)
class PlannedRun:
    """One training run. Rows with the same digest share its folder, also across tables.

    ``recipe`` is a digest of the settings without the seed and without the folders of paths. Runs
    with the same recipe may be averaged, also if they come from different machines.
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

    def find_error(self) -> str | None:
        """The error in a name or an option of its config; None if there is none."""
        try:
            resolve(self.config.model)
            create_objective(self.config.objective)
        except ConfigError as error:
            return str(error)
        return None


@dataclass(frozen=True)
class PlannedGuide:
    """Teacher scores of some runs for all their training data (NDGL)."""

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
        """The config with its data and its device."""
        return self.teachers[0].config

    @property
    def state(self) -> State:
        if not (self.folder / MANIFEST).is_file():
            return "new"
        try:
            return "finished" if read_manifest(self.folder).complete else "unfinished"
        except DataError:  # building it raises an error with the reason
            return "unfinished"

    @property
    def title(self) -> str:
        return "guide of " + " and ".join(run.title for run in self.teachers)

    def find_error(self) -> str | None:
        return None


Job = Union[PlannedRun, PlannedGuide]  # noqa: UP007 - the classes above refer to it


def digest_of(config: RunConfig) -> str:
    """A short hash of everything that may change a result."""
    return _digest(json.dumps(_relevant(config), sort_keys=True, ensure_ascii=False))


def recipe_of(config: RunConfig) -> str:
    """A short hash of what may change a result, without the seed and the folders of paths."""
    tree = _relevant(config)
    tree.pop("seed")
    return _digest(json.dumps(_without_folders(tree), sort_keys=True, ensure_ascii=False))


def _relevant(config: RunConfig) -> dict[str, Any]:
    """The settings that may change a result, and the revisions of what computes it."""
    tree = config.model_dump()
    for section, key in RESUMABLE_KEYS:
        tree[section].pop(key)
    streaming = ("stream", "shuffle_buffer")
    if all(tree["data"][key] == DataConfig.model_fields[key].default for key in streaming):
        for key in streaming:  # younger than most stored results
            del tree["data"][key]
    if config.train.precision != "float32":
        tree["train"]["mixed"] = MIXED_PRECISION_REVISION
    optimizer = tree["train"]["optimizer"]
    if optimizer["pretrained_lr_factor"] is None:  # the default
        optimizer["pretrained_lr_factor"] = PRETRAINED_FACTOR
    matcher = resolve(config.model).matcher["name"]
    if matcher in REVISIONS:
        tree["model"]["revision"] = REVISIONS[matcher]
    return tree


def _without_folders(value: Any) -> Any:
    """A tree with every absolute path reduced to its last part."""
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    if isinstance(value, str) and Path(value).is_absolute():
        return Path(value).name
    return value


def run_folder_name(config: RunConfig, digest: str) -> str:
    name = f"{config.model.name}-{'+'.join(config.objective)}-seed{config.seed}"
    return re.sub(r"[^A-Za-z0-9.+_-]+", "_", name) + f"-{digest}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:12]


@dataclass(frozen=True)
class Settings:
    """Data, published numbers to compare with, scale, seeds and overrides of a plan."""

    data: str = "scenes"
    published: str | None = None
    scale: Scale = "full"
    seeds: int = 3
    overrides: tuple[str, ...] = ()
    tuned: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By run name, overrides for it and for the runs that extend it."""
    at_edges: frozenset[str] = frozenset()
    """The runs with a tuned value that is the last one tried: a better one may lie beyond it."""

    @property
    def on_scenes(self) -> bool:
        return self.data == "scenes"


@dataclass
class Plan:
    """The runs of an artifact; ``runs[name]`` has one entry per seed."""

    artifact: AnyArtifact
    settings: Settings
    out: Path
    runs: dict[str, list[PlannedRun]] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
    """Digests of runs whose numbers are known; they are trained only if other runs need them."""

    @property
    def folder_name(self) -> str:
        """The folder of its results, which depends on data, scale and overrides."""
        settings = self.settings
        parts = [self.artifact.name, Path(settings.data).name]
        if settings.published and not settings.on_scenes:
            parts.append(settings.published)
        parts += [settings.scale] if settings.scale != "full" else []
        return re.sub(r"[^A-Za-z0-9.=+_-]+", "_", "-".join([*parts, *settings.overrides]))[:150]

    @property
    def folds(self) -> int | None:
        """The folds of the chosen data set; None if the runs' configs decide."""
        chosen = self.artifact.data_sets.get(self.settings.published or "")
        return None if self.settings.on_scenes or chosen is None else chosen.folds

    def jobs(self) -> list[Job]:
        """Every run and guide once, after those that it needs."""
        return _ordered(self._runs_by_seed(), lambda job: True)

    def missing(self) -> list[Job]:
        """Jobs that are not finished, without the needs of finished ones."""
        wanted = [run for run in self._runs_by_seed() if run.digest not in self.settled]
        return _ordered(wanted, lambda job: job.state != "finished")

    def in_order(self) -> list[PlannedRun]:
        """Every run once, after those that it needs."""
        return [job for job in self.jobs() if isinstance(job, PlannedRun)]

    def _runs_by_seed(self) -> list[PlannedRun]:
        # the first seed of every row, then the second: an interrupted table has every row
        return [runs[seed] for seed in range(self.settings.seeds) for runs in self.runs.values()]


def _ordered(jobs: Sequence[Job], wanted: Callable[[Job], bool]) -> list[Job]:
    """Wanted jobs without repetition, each after the wanted ones that it needs."""
    ordered: dict[str, Job] = {}

    def add(job: Job) -> None:
        if job.digest in ordered or not wanted(job):
            return
        for needed in job.needs:
            add(needed)
        ordered[job.digest] = job

    for job in jobs:
        add(job)
    return list(ordered.values())


def make_plan(artifact: AnyArtifact, settings: Settings, out: Path) -> Plan:
    """Resolve the runs of an artifact; nothing is run or written."""
    if settings.seeds < 1:
        raise ConfigError(f"--seeds {settings.seeds}: expected at least 1")
    plan = Plan(artifact, settings, out.resolve())
    maker = _Maker(artifact, settings, plan.out)
    seeds = range(settings.seeds)
    if isinstance(artifact, Sweep):
        _refuse_swept(artifact, settings.overrides)
        for point in artifact.points:
            values = {**artifact.change, artifact.key: point.value}
            changes = [f"{key}={json.dumps(value)}" for key, value in values.items()]
            plan.runs[point.title] = [
                maker.make(point.line.run, seed, changes, point.title) for seed in seeds
            ]
    else:
        for name in artifact.used:
            plan.runs[name] = [maker.make(name, seed) for seed in seeds]
    return plan


def _refuse_swept(sweep: Sweep, overrides: Sequence[str]) -> None:
    """Raise if an override would give all values of a sweep's key the same one."""
    for override in overrides:
        if override.partition("=")[0].strip() == sweep.key:
            raise ConfigError(
                f"'{override}': {sweep.name} compares values of {sweep.key}, so it cannot be "
                "overridden; remove it"
            )


def made_equal(plan: Plan) -> list[list[str]]:
    """Groups of runs that differ in the artifact, and that the overrides make the same run."""
    plain = make_plan(plan.artifact, replace(plan.settings, overrides=()), plan.out)
    groups: dict[str, list[str]] = {}
    for name, runs in plan.runs.items():
        groups.setdefault(runs[0].digest, []).append(name)
    return [
        names
        for names in groups.values()
        if len({plain.runs[name][0].digest for name in names}) > 1
    ]


def find_data_set(artifact: Artifact, data: str, published: str | None) -> str | None:
    """Key of the data set with published numbers for ``data``: ``published``, or detected."""
    known = artifact.data_sets
    offered = getattr(artifact, "published_on", list(known)) or list(known)
    if published is not None:
        if published not in known:
            raise ConfigError(
                f"--published {published}: not a data set of {artifact.name}"
                f"{nearest(published, known)} (known: {', '.join(known) or 'none'})"
            )
        return published
    if data != "scenes":
        name = Path(data).resolve().name.lower()
        for key in offered:
            if any(part in name for part in known[key].detect):
                return key
        return None
    return offered[0] if offered else None


@dataclass
class _Maker:
    """Creates planned runs, and the runs and guides that they need."""

    artifact: Artifact
    settings: Settings
    out: Path
    making: list[str] = field(default_factory=list)

    def make(
        self, reference: str, seed: int, changes: Sequence[str] = (), title: str = ""
    ) -> PlannedRun:
        """The run that ``reference`` yields for a row's ``seed``."""
        parsed = run_reference(reference)
        name, seed = parsed.name, parsed.at(seed)
        if name in self.making:
            raise ConfigError(f"run '{name}' needs itself ({' → '.join([*self.making, name])})")
        where = f"{self.artifact.name}, run '{name}'"
        tree = self._tree(name, seed, changes)
        self.making.append(name)
        try:
            needs = {text: self._needed(text, seed, where) for text in references(tree)}
        finally:
            self.making.pop()

        def config_with(replacement: Callable[[str, Job], str]) -> RunConfig:
            texts = {text: replacement(text, job) for text, job in needs.items()}
            replaced = replace_references(tree, texts.__getitem__)
            return resolve_paths(build_config(replaced, where))

        # hashes depend on the digests of the needed jobs, not on their folders
        digest = digest_of(config_with(lambda t, job: f"{t.partition(':')[0]}:{job.digest}"))
        recipe = recipe_of(config_with(lambda t, job: f"{t}:{job.recipe}"))
        config = config_with(lambda _, job: str(job.folder))
        folder = self.out / "runs" / run_folder_name(config, digest)
        return PlannedRun(title or name, config, digest, folder, tuple(needs.values()), recipe)

    def _needed(self, text: str, seed: int, where: str) -> Job:
        kind, _, names = text.partition(":")
        if kind == "run":
            return self._referred(names, seed, where)
        runs = tuple(self._referred(name, seed, where) for name in names.split(","))
        digest = _digest("guide " + " ".join(run.digest for run in runs))
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

    def _tree(self, name: str, seed: int, swept: Sequence[str]) -> Tree:
        """Merge the base, the run, the smoke settings, the changes and the overrides.

        A tuned value comes after the run for which it was tuned. So a run that extends this one has
        it too, unless it sets its own value.
        """
        base, chain = self.artifact.base, self.artifact.layers(name)
        tree: Tree = {}
        tuned = [self.settings.tuned.get(one, ()) for one in self.artifact.lineage(name)]
        for layers, chosen in zip((base, *chain), ((), *tuned), strict=True):
            for part in self._sized(layers):
                tree = merge(tree, part)
            for override in chosen:
                tree = apply_override(tree, override)
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
        for override in (*swept, *self.settings.overrides):
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


def _with_former(tree: Tree, former: Tree, key: str) -> Tree:
    """The tree with the value of a former tree at ``key``, or without the key.

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
    """The ``beside`` terms of a run and of those that it extends."""
    terms: Tree = {}
    for spec in chain:
        terms = merge(terms, spec.beside)
    return terms
