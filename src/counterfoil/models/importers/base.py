"""Base of the importers: the layout of public checkpoints, their options, names of weights."""

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
"""Upper limit of layers; no imported model has as many."""


@dataclass(frozen=True)
class Settings:
    """Training options of a checkpoint, checked when they are read."""

    values: Mapping[str, Any]
    source: str

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def number(self, name: str) -> float:
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckpointError(
                f"{self.source}: opt.{name}: expected a number, got {reprlib.repr(value)}"
            )
        if not math.isfinite(value):
            raise CheckpointError(f"{self.source}: opt.{name} is {value}, expected a finite number")
        return float(value)

    def flag(self, name: str, absent: bool) -> bool:
        value = self.values.get(name, absent)
        if not isinstance(value, bool):
            raise CheckpointError(
                f"{self.source}: opt.{name}: expected a switch, got {reprlib.repr(value)}"
            )
        return value

    def choice(self, name: str, known: Mapping[str, V], absent: str | None = None) -> V:
        """Our name for the project's setting; raises for unsupported settings."""
        value = self._get(name) if absent is None else self.values.get(name, absent)
        if not isinstance(value, str) or value not in known:
            raise CheckpointError(
                f"{self.source}: opt.{name}={reprlib.repr(value)} is not supported "
                f"(supported: {', '.join(known)})"
            )
        return known[value]

    def _get(self, name: str) -> Any:
        if name not in self.values:
            raise CheckpointError(
                f"{self.source}: opt.{name} is missing, and the scores of the model depend on it"
            )
        return self.values[name]


@dataclass(frozen=True)
class Checkpoint:
    """A public checkpoint: {'epoch', 'model': [state dict, …], 'best_rsum', 'opt', 'Eiters'}.

    A plain state dict is a checkpoint without options.
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
            given = _listed(content) if isinstance(content, dict) else type(content).__name__
            raise CheckpointError(
                f"{path}: expected a dictionary with 'model' and 'opt', found {given}"
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
    """Converts a public project's checkpoint to a `ModelSpec` and weights under our names.

    ``parts`` describes the state dicts, ``names`` maps prefixes of their keys to ours, ``unused``
    are prefixes of keys that the project saves but never reads.
    """

    title: ClassVar[str]
    mark: ClassVar[str]
    """Identifies the project's files: ``opt.NAME``, or the prefix of a key."""
    parts: ClassVar[Sequence[str]] = ("image encoder", "text encoder")
    names: Sequence[Mapping[str, str]]
    unused: ClassVar[Sequence[Sequence[str]]] = ((), ())
    appends_mask: ClassVar[bool] = False
    """Whether the project's code appends ``<mask>`` to the vocabulary it reads."""
    tokenizer: ClassVar[str] = ""
    """Name of the tokenizer; empty if the project has a vocabulary of words."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.options = checkpoint.options
        self.image, self.text = checkpoint.states[0], checkpoint.states[1]

    @classmethod
    def misfit(cls, checkpoint: Checkpoint) -> str | None:
        """Why the checkpoint is not from this project; None if it is."""
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
        """Learned values outside the state dicts, under our names."""
        return {}

    def entries(self) -> Sequence[str] | None:
        """The vocabulary, if the checkpoint has it."""
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
        weight = self.checkpoint.states[part].get(key)
        if weight is None or weight.dim() <= axis or not weight.numel():
            raise CheckpointError(
                f"{self.checkpoint.path}: no usable weight '{key}' in the {self.parts[part]}"
            )
        return int(weight.shape[axis])

    def layers(self, count: int) -> int:
        """A number of layers, counted by names of weights, within the limit."""
        if count > LAYERS:
            raise CheckpointError(
                f"{self.checkpoint.path}: weights of {count:,} layers; {self.title} has fewer than "
                f"{LAYERS}"
            )
        return max(1, count)

    def text_options(self) -> dict[str, Any]:
        """Options of the recurrent text encoder of these projects, from its weights."""
        depths = [key.partition("rnn.weight_hh_l")[2] for key in self.text]
        return {
            "name": "bigru" if any(depth.endswith("_reverse") for depth in depths) else "gru",
            "word_dim": int(self.embedding.shape[1]),
            "layers": self.layers(sum(depth.isdigit() for depth in depths)),
            "normalize": not self.options.flag("no_txtnorm", False),
        }

    def weights(self, model: Model) -> dict[str, Tensor]:
        """The checkpoint's weights under the model's names; raises if any is missing or unknown.

        If `Vocabulary` added a ``<mask>``, its row is zero: only augmented captions contain it.
        """
        wanted = model.state_dict()
        weights: dict[str, Tensor] = dict(self.learned())
        unknown: list[str] = []
        for part, state in enumerate(self.checkpoint.states):
            for key, value in state.items():
                if any(key.startswith(start) for start in self.unused[part]):
                    continue
                name = self._rename(part, key)
                if name is None or name not in wanted:
                    label = key if key.isprintable() else repr(key)
                    unknown.append(f"{label} ({self.parts[part]})")
                else:
                    weights[name] = value
        missing = []
        for name, value in wanted.items():
            if name in weights:
                weights[name] = self._fit(name, weights[name], value)
            elif name.endswith("num_batches_tracked"):  # unknown before torch 0.4.1, and never read
                weights[name] = torch.zeros(value.shape, dtype=value.dtype)
            else:
                missing.append(self._theirs(name))
        if unknown or missing:
            raise CheckpointError(
                f"{self.checkpoint.path}: not the weights of {self.title} as its options describe "
                f"it; missing: {_listed(missing)}; unknown: {_listed(unknown)}"
            )
        return weights

    def _fit(self, name: str, weight: Tensor, wanted: Tensor) -> Tensor:
        wider = weight.dim() == 2 and len(weight) + 1 == len(wanted)
        if name == "text_encoder.embed.weight" and wider:
            weight = torch.cat([weight, torch.zeros_like(weight[:1])])
        if weight.shape != wanted.shape and weight.numel() == wanted.numel() == 1:
            weight = weight.reshape(wanted.shape)  # older torch gave scalars another shape
        if weight.shape != wanted.shape:
            raise CheckpointError(
                f"{self.checkpoint.path}: {self._theirs(name)} has shape {tuple(weight.shape)}, "
                f"its options imply {tuple(wanted.shape)}"
            )
        if not torch.isfinite(weight).all():
            raise CheckpointError(
                f"{self.checkpoint.path}: {self._theirs(name)} holds numbers that are not finite"
            )
        return weight.to(wanted.dtype)

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
