"""What a table takes: runs to train and guides to build, each named by a hash of all it is."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union

from counterfoil.config import DataConfig, RunConfig
from counterfoil.errors import ConfigError, DataError
from counterfoil.models import resolve
from counterfoil.objectives import create_objective
from counterfoil.training.guide_manifest import MANIFEST, read_manifest
from counterfoil.training.optimiser import PRETRAINED_FACTOR
from counterfoil.training.run import MAY_CHANGE
from counterfoil.training.run_folder import holds_a_run, is_finished

State = Literal["finished", "unfinished", "new"]


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


MIXED = 3
"""What mixed precision computes: until 1 it rounded vectors of length one, and cosines; until 2
GRUs were not in float16 with scaled gradients. Results and runs of another number are not those of
a plan."""

REVISIONS = {"naaf": 2, "bfan": 2}
"""Matchers that no longer compute what they did: NAAF's boundary from `adjust_epoch` on, which
fragments BFAN attends to. Results and runs of former revisions are not those of a plan either."""


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
    for section, key in MAY_CHANGE:
        tree[section].pop(key, None)
    if config.data.dev_share == DataConfig().dev_share:  # data of the tables have a dev split
        tree["data"].pop("dev_share")
    if config.train.precision != "float32":
        tree["train"]["mixed"] = MIXED
    optimiser = tree["train"]["optimiser"]
    if optimiser["language_model_factor"] is None:  # what it then is
        optimiser["language_model_factor"] = PRETRAINED_FACTOR
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
