"""SIGKILL inside a save: the links of a run always lead to checkpoints that load."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import torch

from counterfoil.core.config import build_config
from counterfoil.core.errors import CounterfoilError
from counterfoil.models import create_model, from_pretrained
from counterfoil.training.checkpoint import Checkpoints, Position
from tests.conftest import make_split
from tests.faults.children import Moment, import_all, run_child
from tests.faults.commands import Try

SAVES = 3


def save_often(folder: Path) -> None:
    """Save a model as several steps of a run; each is the best so far."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    split = make_split(folder / "data", "train", 8, 0)
    config = build_config(
        {"model": {"name": "rvse-mlp", "embed_size": 16}, "data": {"min_count": 1}}
    )
    model = create_model(config.model, split, config.data)
    checkpoints = Checkpoints(folder / "run")
    (folder / "run").mkdir(exist_ok=True)
    for step in range(1, SAVES + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
        started = time.monotonic()
        state = {"moments": [parameter.detach().clone() for parameter in model.parameters()]}
        checkpoints.save(model, state, Position(step=step), best=True)
        print(time.monotonic() - started, flush=True)


def try_save(root: Path, rng: random.Random) -> Try:
    """Kill a run in its second or third save; then `last` and `best` must load."""
    import_all()
    folder = root / "whole"
    if not (folder / "output.txt").exists():
        run_child(lambda: save_often(folder), folder)
    seconds = max(map(float, (folder / "output.txt").read_text().split()))
    operations = sum(line.startswith("disk") for line in _save_lines(folder))
    number = rng.randint(2, SAVES)
    moment = Moment(stage="save", occurrence=number, seconds=rng.uniform(0, 1.2 * seconds))
    if rng.random() < 0.5:
        moment = Moment(stage="save", occurrence=number, operation=rng.randint(1, operations))
    tried = root / "tried"
    shutil.rmtree(tried, ignore_errors=True)
    ended = run_child(lambda: save_often(tried), tried, moment)
    outcome = Try()
    if ended.killed:
        outcome.kills.append((str(moment), "save" if ended.where == "save" else "after the save"))
    elif ended.code != 0:
        outcome.problems.append(ended.output[-1500:])
    last = _check(tried / "run", {number - 1, number, number + 1}, outcome)
    run_child(lambda: save_often(tried), tried)  # the run goes on
    if _check(tried / "run", {SAVES}, outcome) != SAVES or last is None:
        outcome.problems.append(f"{moment}: the run did not go on")
    left = sorted(path.name for path in (tried / "run").iterdir() if path.name.startswith("."))
    inside = sorted(path.name for path in (tried / "run" / "checkpoints").iterdir())
    if left or len(inside) != 1:
        outcome.problems.append(f"{moment}: left behind: {left} {inside}")
    return outcome


def _save_lines(folder: Path) -> list[str]:
    """The trace of the last save."""
    lines = (folder / "trace.txt").read_text().splitlines()
    start = max(i for i, line in enumerate(lines) if line == "begin save")
    return lines[start : lines.index("end save", start)]


def _check(run: Path, steps: set[int], outcome: Try) -> int | None:
    """The step of the last checkpoint, if it and the best one load."""
    try:
        _, _, position = Checkpoints(run).load()
        for link in ("last", "best"):
            model = from_pretrained(run / link)
            values = {float(parameter.detach().flatten()[0]) for parameter in model.parameters()}
            if len(values) != 1 or not values <= set(map(float, steps)):
                outcome.problems.append(f"{link}: weights of {values}, expected one of {steps}")
    except CounterfoilError as error:
        outcome.problems.append(f"not loadable: {error}")
        return None
    if position.step not in steps:
        outcome.problems.append(f"last is of step {position.step}, expected one of {steps}")
    return position.step
