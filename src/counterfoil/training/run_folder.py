"""The folder of a run: one process writes it at a time; an older run is deleted only if asked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from counterfoil.collectives import rank
from counterfoil.config import RunConfig, load_config
from counterfoil.errors import ConfigError
from counterfoil.files import write_atomically
from counterfoil.locks import LOCK, locked_folder
from counterfoil.training.distributed import on_first_process

RUN_FILES = {
    "config.yaml", "metrics.jsonl", "timing.jsonl", "last", "best", "checkpoints", "results.json",
    "report.html", "tensorboard", "noise.npy", "dev_split.json", "yardstick.json",
    "correction_rule.json",
}  # fmt: skip


ADVICE = "wait for it, stop it, or choose another folder"


@contextmanager
def locked_run(folder: Path, advice: str = ADVICE) -> Iterator[None]:
    """Keep other processes from training into a folder; reading it is free.

    Of several processes that train one run, the first holds the lock for all. If it is refused, all
    of them end with its error. The process that holds the lock may take it again.
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
    """Delete what a run wrote that failed before its first record: there is nothing to resume."""
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
    """Delete a run, if told to; else refuse with what else can be done."""
    if holds_a_run(folder):
        if not overwrite:
            raise ConfigError(f"{folder} already holds a run: {otherwise}")
        clear_run(folder)


def holds_a_run(folder: Path) -> bool:
    """Whether there is anything in a folder but the config of a run that never began."""
    ignored = ("config.yaml", LOCK)
    return folder.is_dir() and any(path.name not in ignored for path in folder.iterdir())


def clear_run(folder: Path) -> None:
    """Delete a run; refuses a folder that holds anything a run does not write."""
    place = folder.resolve()
    if place in (Path.cwd(), Path.home(), *Path.cwd().parents, *Path.home().parents):
        raise ConfigError(f"{folder}: will not be deleted; choose another folder with --out")
    strangers = [
        path.name
        for path in folder.iterdir()
        if path.name not in RUN_FILES and path.suffix != ".png" and not path.name.startswith(".")
    ]
    if strangers or not (folder / "config.yaml").is_file():
        found = f" (it holds {', '.join(sorted(strangers)[:3])})" if strangers else ""
        raise ConfigError(f"{folder}: not a run{found}, so it is not deleted; choose another --out")
    load_config(folder / "config.yaml")
    # The config goes last: without it, a folder that was cleared in part would be no run.
    for path in sorted(folder.iterdir(), key=lambda path: path.name == "config.yaml"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def write_config(folder: Path, config: RunConfig) -> None:
    write_atomically(folder / "config.yaml", config.to_yaml())


def is_finished(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "results.json").read_text(encoding="utf-8")))
    except (OSError, json.JSONDecodeError):
        return False
