"""The folder of a run: lock, config, correction rule, and loading its model.

Only one process writes it at a time; an existing run is deleted only with ``overwrite``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from counterfoil.core import zoo
from counterfoil.core.config import RunConfig, load_config, model_folder, read_value
from counterfoil.core.distributed import on_first_process, rank
from counterfoil.core.errors import CheckpointError, ConfigError
from counterfoil.core.storage.atomic import home_folder, write_atomically
from counterfoil.core.storage.locks import LOCK, locked_folder
from counterfoil.core.storage.reading import read_text
from counterfoil.core.storage.remote import is_url
from counterfoil.core.tensors.device import choose_device
from counterfoil.data.load import is_named
from counterfoil.data.pairs import Pairs
from counterfoil.data.splits import shared_with_train
from counterfoil.models import from_pretrained, resolve
from counterfoil.models.correction_rule import CorrectionRule
from counterfoil.models.match import load_yardstick
from counterfoil.models.model import Model
from counterfoil.objectives import create_objective

RUN_FILES = {
    "config.yaml", "metrics.jsonl", "timing.jsonl", "last", "best", "checkpoints", "results.json",
    "report.html", "tensorboard", "noise.npy", "dev_split.json", "yardstick.json",
    "correction_rule.json",
}  # fmt: skip

ELSEWHERE = "choose another folder"
ADVICE = f"wait for it, stop it, or {ELSEWHERE}"

RULE = "correction_rule.json"
RULE_BYTES = 1 << 16

RESUMABLE_KEYS = {
    ("data", "workers"),
    ("data", "features_on_gpu"),
    ("train", "device"),
    ("train", "cuda_graphs"),
    ("train", "tensorboard"),
    ("train", "log_every"),
    ("train", "save_every"),
}

Leaked = dict[str, int]


@contextmanager
def locked_run(folder: Path, advice: str = ADVICE) -> Iterator[None]:
    """Lock a folder against training by other processes; reading stays possible.

    In distributed training the first process holds the lock for all; if it fails, all raise its
    error. The lock is reentrant.
    """
    began = (folder / "config.yaml").exists()
    with ExitStack() as stack:
        lock = locked_folder(folder, "training a run there", advice)
        on_first_process(lambda: stack.enter_context(lock))
        try:
            yield
        except Exception:
            if not began and rank() == 0:
                discard_unstarted(folder)
            raise


def discard_unstarted(folder: Path) -> None:
    """Delete the files of a run that failed before its first record, which cannot be resumed."""
    if (folder / "last").exists() or any(
        path.name not in RUN_FILES and path.name != LOCK for path in folder.iterdir()
    ):
        return
    logs = [folder / "metrics.jsonl", folder / "timing.jsonl"]
    if any(log.exists() and log.stat().st_size for log in logs):
        return
    for path in folder.iterdir():
        if path.name == LOCK:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def make_room(folder: Path, overwrite: bool, otherwise: str) -> None:
    """Delete an existing run if ``overwrite``; otherwise raise with the advice ``otherwise``."""
    if holds_a_run(folder):
        if not overwrite:
            strangers = _strangers(folder)
            if strangers and not (folder / "config.yaml").is_file():
                names = _listed(strangers)
                raise ConfigError(f"{folder}: not empty and not a run{names}; {ELSEWHERE}")
            raise ConfigError(f"{folder} already holds a run: {otherwise}")
        clear_run(folder)


def _strangers(folder: Path) -> list[str]:
    """Names in a folder that no run writes."""
    return [
        path.name
        for path in folder.iterdir()
        if path.name not in RUN_FILES and path.suffix != ".png" and not path.name.startswith(".")
    ]


def _listed(names: Iterable[str]) -> str:
    listed = sorted(names)
    return f" (it holds {', '.join(listed[:3])})" if listed else ""


def holds_a_run(folder: Path) -> bool:
    """Whether a folder holds more than the config of a run that never started."""
    ignored = ("config.yaml", LOCK)
    return folder.is_dir() and any(path.name not in ignored for path in folder.iterdir())


def clear_run(folder: Path) -> None:
    """Delete a run; refuses a folder with other files."""
    resolved = folder.resolve()
    here, home = Path.cwd(), home_folder().resolve()
    if resolved in (here, home, *here.parents, *home.parents):
        raise ConfigError(f"{folder}: a working or home folder is not deleted; {ELSEWHERE}")
    strangers = _strangers(folder)
    if strangers or not (folder / "config.yaml").is_file():
        others = _listed(strangers)
        raise ConfigError(f"{folder}: not a run{others}, so it is not deleted; {ELSEWHERE}")
    load_config(folder / "config.yaml")
    # The config goes last, so that a partly deleted folder is still recognized as a run.
    for path in sorted(folder.iterdir(), key=lambda path: path.name == "config.yaml"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def write_config(folder: Path, config: RunConfig) -> None:
    write_atomically(folder / "config.yaml", config.to_yaml())


def is_finished(folder: Path) -> bool:
    try:
        return bool(json.loads(read_text(folder / "results.json")))
    except (OSError, ValueError, RecursionError):
        return False


def load_rule(folder: Path) -> CorrectionRule | None:
    """The rule of a run, or of the run of a `best` checkpoint; None without one."""
    path = folder / RULE
    if folder.name == "best" and not path.is_file():
        path = folder.parent / RULE
    if not path.is_file():
        return None
    try:
        return CorrectionRule(**json.loads(read_text(path, RULE_BYTES)))
    except (OSError, ValueError, TypeError, RecursionError, ConfigError) as error:
        raise CheckpointError(
            f"{path}: damaged ({str(error)[:200]}); delete it, and choose it anew with "
            "counterfoil correct RUN --choose"
        ) from None


def checked_config(config: RunConfig) -> RunConfig:
    """The config with the ensemble size of its objective, and all names checked."""
    ensemble_size = max(
        config.model.ensemble_size, create_objective(config.objective).ensemble_size
    )
    model = config.model.model_copy(update={"ensemble_size": ensemble_size})
    resolve(model)
    choose_device(config.train.device)
    return config.model_copy(update={"model": model})


def resolve_paths(config: RunConfig) -> RunConfig:
    """The config with absolute paths."""
    data = config.data
    change = {
        key: str(Path(value).resolve())
        for key, value in (("source", data.source), ("vocabulary", data.vocabulary))
        if value and Path(value).exists() and not (key == "source" and is_named(value, data.format))
    }
    if data.noise_index:
        change["noise_index"] = str(Path(data.noise_index).resolve())
    start = config.model.init_from
    model_changes: dict[str, Any] = {}
    if start and not zoo.is_pretrained(start):
        model_changes["init_from"] = str(Path(start).resolve())
    for part in ("image", "text", "matcher"):
        model_changes[part] = _located_pretrained(getattr(config.model, part))
    return config.model_copy(
        update={
            "data": data.model_copy(update=change),
            "model": config.model.model_copy(update=model_changes),
            "objective": _located_options(config.objective),
        }
    )


def _located_pretrained(part: dict[str, Any]) -> dict[str, Any]:
    """A part's options, with the folder of its pretrained weights as an absolute path."""
    name = part.get("pretrained")
    here = isinstance(name, str) and bool(name) and Path(name).is_dir()
    return {**part, "pretrained": str(Path(str(name)).resolve())} if here else part


def _located_options(objective: dict[str, Any]) -> dict[str, Any]:
    """Options of objectives that name a file or a run, as absolute paths.

    Only values with a separator count as paths: ``rules`` is a name even if such a folder exists.
    """
    return {
        name: {
            key: str(Path(value).resolve())
            if isinstance(value, str) and os.sep in value and Path(value).exists()
            else value
            for key, value in options.items()
        }
        if isinstance(options, dict)
        else options
        for name, options in objective.items()
    }


def resumed_config(folder: Path, requested: RunConfig | None) -> RunConfig:
    """The config to resume a run with: ``requested`` may differ in `RESUMABLE_KEYS` only."""
    saved = saved_config(folder)
    if requested is None:
        return saved
    requested = checked_config(requested)
    if changed := changed_settings(saved, requested):
        raise ConfigError(
            f"{folder}: the run was started with another {', '.join(changed)}; "
            "resume it without these, or choose another folder with --out"
        )
    return requested


def saved_config(folder: Path) -> RunConfig:
    """The config of a run to resume."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise CheckpointError(f"{folder}: not a run (no config.yaml there), nothing to resume")
    return load_config(path)


def changed_settings(saved: RunConfig, requested: RunConfig) -> list[str]:
    """Keys by which two configs differ, other than `RESUMABLE_KEYS`."""
    before = saved.model_dump()
    now = read_value(requested.to_yaml())  # as read from a file: a tuple becomes a list
    changed = [
        (section, key)
        for section, values in now.items()
        if isinstance(values, dict)
        for key in dict.fromkeys([*values, *before[section]])
        if before[section].get(key) != values.get(key)
    ]
    if requested.seed != saved.seed:
        changed.append(("seed", ""))
    return [".".join(filter(None, key)) for key in changed if key not in RESUMABLE_KEYS]


def load_model(folder: str | Path, device: str = "auto") -> Model:
    """The best checkpoint of a run, a saved model's folder, or a pretrained model by name."""
    folder = zoo.resolve(folder)
    model = from_pretrained(model_folder(folder)).to(choose_device(device))
    model.yardstick = load_yardstick(folder) or model.yardstick
    model.correction_rule = load_rule(folder) or model.correction_rule
    return model


def run_config(folder: Path) -> RunConfig | None:
    path = folder / "config.yaml"
    return load_config(path) if path.is_file() else None


def leakage_into(run: Path, data: str | None, options: dict[str, Any], pairs: Pairs) -> Leaked:
    """Counts, per split, of images that a run was trained on, by their ids.

    Ids of different data sets are unrelated, so other data than the run's share none.
    """
    config = run_config(run)
    if config is None:
        return {}
    if data is not None and not _is_source(config, data, options):
        return {}
    return shared_with_train(pairs, *pairs.splits)


def _is_source(config: RunConfig, data: str, options: dict[str, Any]) -> bool:
    own = config.data
    if is_named(data, None) or is_named(own.source, own.format):
        return data == own.source and options == own.options
    if is_url(data) or is_url(own.source):
        return data == own.source
    return Path(data).resolve() == Path(own.source).resolve()
