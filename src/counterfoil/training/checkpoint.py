"""Checkpoints: complete folders behind two links, `last` and `best`, each replaced atomically.

After a kill, every link still points to a complete folder. The state needed to resume (optimizer,
schedule, scaler, random states, position in the epoch) is beside the model, with its own checksum.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from counterfoil.core.distributed import gather_rows, rank
from counterfoil.core.errors import CheckpointError, TrainingError
from counterfoil.core.storage.atomic import atomic_folder, put_in_place
from counterfoil.core.storage.checksums import STATE, STATE_SUM, check_sum, write_sums
from counterfoil.core.storage.locks import LOCK
from counterfoil.models.importers.safe_pickles import read_checkpoint
from counterfoil.models.model import Model
from counterfoil.models.store import load_weights, write_model

MEASURED_OF_BEST = ("yardstick.json", "correction_rule.json")
"""Files of a run that describe its best checkpoint; deleted when that changes."""

OPERATIONS = 20_000_000
"""Limit of pickle instructions of a training state, which lists all captions repeatedly."""


@dataclass
class Position:
    """Progress of a run: all counters, without learned values."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    loss_sum: float = 0.0
    loss_count: int = 0
    skipped: list[str] = field(default_factory=list)
    best_rsum: float = -1.0
    best_epoch: int = -1
    best_folder: str = ""
    worse_epochs: int = 0
    finished: bool = False
    metrics_bytes: int = 0
    margins: list[int] = field(default_factory=list)
    seconds: float = 0.0
    data_digest: str = ""
    """A hash of the training images' ids and captions; empty in runs of earlier versions."""


def _is_position(values: dict[Any, Any]) -> bool:
    """Whether a dictionary has all fields of a `Position`, each of its type."""
    expected = asdict(Position())
    return values.keys() == expected.keys() and all(
        type(values[name]) is type(value) or (type(value) is float and type(values[name]) is int)
        for name, value in expected.items()
    )


class Stateful(Protocol):
    """A part of a run that a checkpoint saves, such as the optimizer."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


def random_states(device: torch.device) -> dict[str, torch.Tensor | None]:
    """States of PyTorch's random generators, one row per process."""
    cuda = None
    cpu = gather_rows(torch.get_rng_state()[None].to(device)).cpu()
    if device.type == "cuda":
        cuda = gather_rows(torch.cuda.get_rng_state(device)[None].to(device)).cpu()
    return {"random": cpu, "cuda_random": cuda}


def _restore_random(state: dict[str, Any], device: torch.device) -> None:
    """Set this process's random generators to its row of `random_states`, if it has one."""
    if rank() < len(state["random"]):
        torch.set_rng_state(
            state["random"][rank()].clone()
        )  # set_rng_state ignores the offset of a view
        if state["cuda_random"] is not None and device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_random"][rank()].clone(), device)


@dataclass
class Checkpoints:
    """The checkpoints of one run folder."""

    run: Path
    links: tuple[str, str] = field(default=("last", "best"), init=False)

    def save(
        self, model: Model, state: dict[str, Any], position: Position, *, best: bool = False
    ) -> None:
        """Write a checkpoint, link `last` (and `best`) to it, delete unlinked checkpoints."""
        name = f"step-{position.step:08d}-epoch-{position.epoch:04d}-batch-{position.batch:06d}"
        if best:
            position.best_folder = name
        try:
            with atomic_folder(self.run / "checkpoints" / name) as folder:
                write_model(model, folder)
                torch.save({**state, "position": asdict(position)}, folder / STATE)
                write_sums(folder, [STATE], STATE_SUM)
            self._point("last", name)
            if best:
                self._point("best", name)
        except (OSError, RuntimeError, CheckpointError) as error:
            raise TrainingError(
                f"the checkpoint {name} could not be written ({error}); the one before is intact: "
                f"make room, then continue with: counterfoil train --resume {self.run}"
            ) from error
        self._sweep()

    def load(self) -> tuple[Path, dict[str, Any], Position]:
        """The last checkpoint: its folder, its state, its position."""
        folder = self.run / "last"
        if not (folder / STATE).is_file():
            raise CheckpointError(
                f"{self.run}: no checkpoint to resume from; start it with: counterfoil train"
            )
        check_sum(folder, STATE, STATE_SUM)
        state = read_checkpoint(folder / STATE, OPERATIONS)
        values = state.pop("position", None) if isinstance(state, dict) else None
        if isinstance(values, dict):
            values = {"data_digest": "", **values}  # of an earlier version
        if not isinstance(values, dict) or not _is_position(values):
            raise CheckpointError(f"{folder / STATE}: damaged (no valid position of the run)")
        position = Position(**values)
        if (
            rank() == 0
            and position.best_folder
            and (self.run / "checkpoints" / position.best_folder).is_dir()
        ):
            self._point("best", position.best_folder)
        return folder, state, position

    def restore(
        self, model: Model, parts: Mapping[str, Stateful], device: torch.device
    ) -> Position:
        """Load the last checkpoint into the model and the parts of a run; returns its position."""
        folder, state, position = self.load()
        load_weights(model, folder)
        try:
            for name, part in parts.items():
                part.load_state_dict(state[name])
            _restore_random(state, device)
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise CheckpointError(
                f"{folder / STATE}: not the state of this run ({error!r:.200}); was the config or "
                "the version of Counterfoil changed?"
            ) from error
        if rank() == 0:
            self._sweep()  # a kill inside the last save can have left an older checkpoint
        return position

    def _point(self, link: str, name: str) -> None:
        if link == "best" and (self.run / "best").resolve().name != name:
            for measured in MEASURED_OF_BEST:
                (self.run / measured).unlink(missing_ok=True)
        temporary = self.run / f".{link}.new"  # one name: a kill leaves at most this link
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(Path("checkpoints") / name)
        put_in_place(temporary, self.run / link)

    def _sweep(self) -> None:
        linked = {
            Path(os.readlink(self.run / x)).name for x in self.links if (self.run / x).is_symlink()
        }
        for folder in (self.run / "checkpoints").iterdir():
            if folder.name.endswith(LOCK):  # left by a kill
                folder.unlink(missing_ok=True)
            elif folder.name not in linked:
                shutil.rmtree(folder, ignore_errors=True)
