"""The data that several runs share, read as their configs say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from counterfoil.config import RunConfig, model_folder
from counterfoil.data.dev_split import read_dev_split
from counterfoil.data.pairs import Split
from counterfoil.errors import ConfigError
from counterfoil.progress import Progress
from counterfoil.training.load import run_config
from counterfoil.training.run import read_data

SHARED = ("source", "format", "options", "features", "noise", "noise_index", "dev_share")
"""What decides which images, captions and features a run has, and in which order."""


def shared_train_split(runs: Sequence[Path], cache: Path, progress: Progress) -> Split:
    """The training split of some runs, which must agree on it.

    Vocabulary and augmentation may differ. A saved model without a run takes the others' data.
    """
    for run in runs:
        model_folder(run)
    configs = {run: config for run in runs if (config := run_config(run)) is not None}
    if not configs:
        raise ConfigError("none of these is a run that names its data; give at least one that does")
    (first, config), *others = configs.items()
    for run, other in others:
        for key, mine in _data_keys(config).items():
            theirs = _data_keys(other)[key]
            if mine != theirs:
                raise ConfigError(
                    f"{run} and {first} were trained on different data ({key}: {theirs!r} and "
                    f"{mine!r}); a guide takes runs on the same"
                )
    return read_data(config, cache, progress, aside=read_dev_split(first)).train


def _data_keys(config: RunConfig) -> dict[str, Any]:
    tree = config.data.model_dump()
    keys = {f"data.{key}": tree[key] for key in SHARED}
    if config.data.noise:
        keys["seed"] = config.seed  # which captions are shuffled depends on it
    return keys
