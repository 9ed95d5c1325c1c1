"""What every importer shares: the layout of the public checkpoints, options, names of weights."""

from __future__ import annotations

import argparse
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from counterfoil.core.errors import CheckpointError
from counterfoil.core.registry import Registry
from counterfoil.models.catalogue import ModelSpec
from counterfoil.models.importers.safe_pickles import read_checkpoint
from counterfoil.models.importers.vocabularies import SPECIALS
from counterfoil.models.model import Model

importers: Registry[type[Importer]] = Registry("importer")

V = TypeVar("V")

LAYERS = 100
"""More layers than any of these models has."""


@dataclass(frozen=True)
class Settings:
    """The options a checkpoint was trained with, read by name and with a check."""

    values: Mapping[str, Any]
    source: str

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def number(self, name: str) -> float:
        found = self._get(name)
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            raise CheckpointError(
                f"{self.source}: opt.{name}: expected a number, got {reprlib.repr(found)}"
            )
        if not math.isfinite(found):
            raise CheckpointError(f"{self.source}: opt.{name} is {found}, expected a finite number")
        return float(found)

    def flag(self, name: str, absent: bool) -> bool:
        found = self.values.get(name, absent)
        if not isinstance(found, bool):
            raise CheckpointError(
                f"{self.source}: opt.{name}: expected a switch, got {reprlib.repr(found)}"
            )
        return found

    def choice(self, name: str, known: Mapping[str, V], absent: str | None = None) -> V:
        """Our word for theirs; a setting that has none is refused."""
        found = self._get(name) if absent is None else self.values.get(name, absent)
        if not isinstance(found, str) or found not in known:
            raise CheckpointError(
                f"{self.source}: opt.{name}={reprlib.repr(found)} is not supported "
                f"(supported: {', '.join(known)})"
            )
        return known[found]

    def _get(self, name: str) -> Any:
        if name not in self.values:
            raise CheckpointError(
                f"{self.source}: opt.{name} is missing, so it is not known how the model scores"
            )
        return self.values[name]


@dataclass(frozen=True)
class Checkpoint:
    """A public checkpoint: {'epoch', 'model': [state dict, …], 'best_rsum', 'opt', 'Eiters'}.

    A file that is nothing but a state dict is one without options.
    """

    path: Path
    states: Sequence[Mapping[str, Tensor]]
    options: Settings
    epoch: int | None
    best_rsum: float | None

    @classmethod
    def read(cls, path: str | Path) -> Checkpoint:
        path = Path(path)
        content = read_checkpoint(path)
        if _is_state(content) and content:
            return cls(path, [_without_wrapper(content)], Settings({}, str(path)), None, None)
        if not isinstance(content, dict) or not {"model", "opt"} <= set(content):
            found = _listed(content) if isinstance(content, dict) else type(content).__name__
            raise CheckpointError(
                f"{path}: expected a dictionary with 'model' and 'opt', found {found}"
            )
        model, options = content["model"], content["opt"]
        if not isinstance(model, (list, tuple)) or not all(_is_state(state) for state in model):
            raise CheckpointError(f"{path}: 'model' is not a list of state dicts")
        values = vars(options) if isinstance(options, argparse.Namespace) else options
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: 'opt' is a {type(options).__name__}, not options")
        return cls(
            path,
            [_without_wrapper(state) for state in model],
            Settings(values, str(path)),
            _number(content.get("epoch"), int),
            _number(content.get("best_rsum"), float),
        )


class Importer:
    """From a public project's checkpoint to a `ModelSpec` and weights under our names.

    ``parts`` says what the state dicts are, ``names`` how the keys of each begin there and here,
    ``unused`` which keys the project saves but never reads.
    """

    title: ClassVar[str]
    mark: ClassVar[str]
    """What only this project's files have: ``opt.NAME``, or the beginning of a key."""
    parts: ClassVar[Sequence[str]] = ("image encoder", "text encoder")
    names: Sequence[Mapping[str, str]]
    unused: ClassVar[Sequence[Sequence[str]]] = ((), ())
    appends_mask: ClassVar[bool] = False
    """Whether the project's code appends ``<mask>`` to the vocabulary it reads."""
    tokenizer: ClassVar[str] = ""
    """Whose tokenizer it reads captions with; empty where it has a vocabulary of words."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.options = checkpoint.options
        self.image, self.text = checkpoint.states[0], checkpoint.states[1]

    @classmethod
    def misfit(cls, checkpoint: Checkpoint) -> str | None:
        """Why the checkpoint is not one of this project; None where it is."""
        if len(checkpoint.states) != len(cls.parts):
            count = len(checkpoint.states)
            return f"state dicts: {count} instead of {len(cls.parts)} ({', '.join(cls.parts)})"
        keys = (key for state in checkpoint.states for key in state)
        option = cls.mark.removeprefix("opt.")
        marked = (
            option in checkpoint.options
            if option != cls.mark
            else any(key.startswith(cls.mark) for key in keys)
        )
        return None if marked else f"it has no {cls.mark}"

    def spec(self) -> ModelSpec:
        raise NotImplementedError

    def learned(self) -> dict[str, Tensor]:
        """What the project keeps outside its state dicts, under our names."""
        return {}

    def entries(self) -> Sequence[str] | None:
        """The vocabulary, where the project keeps it in the checkpoint."""
        return None

    @property
    def specials(self) -> Sequence[str]:
        """The first words of the project's vocabularies."""
        return SPECIALS

    @property
    def embedding(self) -> Tensor:
        for key, table in self.text.items():
            named = self._rename(1, key) == "text_encoder.embed.weight"
            if named and table.dim() == 2 and table.numel():
                return table
        raise CheckpointError(f"{self.checkpoint.path}: no word embedding in the {self.parts[1]}")

    @property
    def input_dim(self) -> int:
        """Width of the image fragments the model reads."""
        return self.size(0, "fc.weight_v" if "fc.weight_v" in self.image else "fc.weight", 1)

    def size(self, part: int, key: str, axis: int) -> int:
        found = self.checkpoint.states[part].get(key)
        if found is None or found.dim() <= axis or not found.numel():
            raise CheckpointError(
                f"{self.checkpoint.path}: no usable weight '{key}' in the {self.parts[part]}"
            )
        return int(found.shape[axis])

    def layers(self, count: int) -> int:
        """A number of layers that was counted by the names of weights."""
        if count > LAYERS:
            raise CheckpointError(
                f"{self.checkpoint.path}: weights of {count:,} layers; {self.title} has fewer than "
                f"{LAYERS}"
            )
        return max(1, count)

    def text_options(self) -> dict[str, Any]:
        """The recurrent text encoder all these projects share, by what its weights say."""
        depths = [key.partition("rnn.weight_hh_l")[2] for key in self.text]
        return {
            "name": "bigru" if any(depth.endswith("_reverse") for depth in depths) else "gru",
            "word_dim": int(self.embedding.shape[1]),
            "layers": self.layers(sum(depth.isdigit() for depth in depths)),
            "normalize": not self.options.flag("no_txtnorm", False),
        }

    def weights(self, model: Model) -> dict[str, Tensor]:
        """The checkpoint's weights under the model's names, each of them accounted for.

        Where the vocabulary got a ``<mask>`` that the project did not have, its row is zero: the
        word only occurs in captions disturbed on purpose, and a zero vector adds nothing.
        """
        wanted = model.state_dict()
        found: dict[str, Tensor] = dict(self.learned())
        unknown: list[str] = []
        for part, state in enumerate(self.checkpoint.states):
            for key, value in state.items():
                if any(key.startswith(start) for start in self.unused[part]):
                    continue
                name = self._rename(part, key)
                if name is None or name not in wanted:
                    shown = key if key.isprintable() else repr(key)
                    unknown.append(f"{shown} ({self.parts[part]})")
                else:
                    found[name] = value
        missing = []
        for name, value in wanted.items():
            if name in found:
                found[name] = self._fit(name, found[name], value)
            elif name.endswith("num_batches_tracked"):  # unknown before torch 0.4.1, and never read
                found[name] = torch.zeros(value.shape, dtype=value.dtype)
            else:
                missing.append(self._theirs(name))
        if unknown or missing:
            raise CheckpointError(
                f"{self.checkpoint.path}: not the weights of {self.title} as its options describe "
                f"it; missing: {_listed(missing)}; unknown: {_listed(unknown)}"
            )
        return found

    def _fit(self, name: str, found: Tensor, wanted: Tensor) -> Tensor:
        wider = found.dim() == 2 and len(found) + 1 == len(wanted)
        if name == "text_encoder.embed.weight" and wider:
            found = torch.cat([found, torch.zeros_like(found[:1])])
        if found.shape != wanted.shape and found.numel() == wanted.numel() == 1:
            found = found.reshape(wanted.shape)  # a lone number had a shape of its own once
        if found.shape != wanted.shape:
            raise CheckpointError(
                f"{self.checkpoint.path}: {self._theirs(name)} has the shape {tuple(found.shape)}, "
                f"its options imply {tuple(wanted.shape)}"
            )
        if not torch.isfinite(found).all():
            raise CheckpointError(
                f"{self.checkpoint.path}: {self._theirs(name)} holds numbers that are not finite"
            )
        return found.to(wanted.dtype)

    def _rename(self, part: int, key: str) -> str | None:
        for theirs, ours in self.names[part].items():
            if key.startswith(theirs):
                return ours + key[len(theirs) :]
        return None

    def _theirs(self, name: str) -> str:
        for part, names in enumerate(self.names):
            for theirs, ours in names.items():
                if name.startswith(ours):
                    return f"{theirs}{name[len(ours) :]} ({self.parts[part]})"
        return name


def _is_state(state: Any) -> bool:
    return isinstance(state, dict) and all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in state.items()
    )


def _without_wrapper(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keys without the ``module.`` of `DataParallel`."""
    return {key.removeprefix("module."): value for key, value in state.items()}


def _number(value: Any, kind: type[V]) -> V | None:
    usable = isinstance(value, (int, float)) and not isinstance(value, bool)
    return kind(value) if usable and math.isfinite(value) else None  # type: ignore[call-arg]


def _listed(names: Iterable[Any], most: int = 12) -> str:
    names = [name[:100] if isinstance(name, str) else reprlib.repr(name) for name in names]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more
