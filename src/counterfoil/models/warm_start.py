"""A new model with the weights of a trained one: the second of two stages, or fine-tuning.

What the two share must be the same in every way that bears on a score. Only the heads of a
cross-encoder may differ: one that is new begins as TAGS begins it, from those that were trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from torch import Tensor, nn

from counterfoil.core.config import model_folder
from counterfoil.core.errors import ConfigError
from counterfoil.data.text.tokenizers import HuggingFaceText, TextProcessor, WordText
from counterfoil.matchers.cross_encoder import CrossEncoder, CrossHeads, Head
from counterfoil.models.catalogue import PARTS
from counterfoil.models.model import Model
from counterfoil.models.store import first_member, from_pretrained

IGNORED_OPTIONS = frozenset(
    {"name", "pretrained", "weights", "checkpointing", "alike", "extras", "vocabulary"}
    | {"positions", "layers", "ffn"}
)
"""Options that are not compared: of no account for a score, or shown by the shapes of weights."""


@dataclass(frozen=True)
class Started:
    """What a model took from a folder: heads it has that were not there, and the other way."""

    folder: str
    new_heads: tuple[str, ...] = ()
    left_heads: tuple[str, ...] = ()

    def note(self) -> str:
        """One line for the log of a run."""
        parts = [f"started from the weights of {self.folder}"]
        if self.new_heads:
            parts.append(f"new heads: {', '.join(self.new_heads)}")
        if self.left_heads:
            parts.append(f"heads not taken over: {', '.join(self.left_heads)}")
        return "; ".join(parts)


def start_from(model: Model, folder: str | Path) -> Started:
    """Give a new model the weights of a run's best checkpoint, or of a saved model, in place."""
    other = from_pretrained(model_folder(Path(folder)))
    _check_fragments(model, other, folder)
    _check_words(model, other, folder)
    _check_parts(model, other, folder)
    started = Started(str(folder))
    if isinstance(model.matcher, CrossEncoder) and isinstance(other.matcher, CrossEncoder):
        new, left = _with_heads(other, model)
        started = Started(str(folder), new, left)
    weights = other.state_dict()
    _check_weights(model.state_dict(), weights, folder)
    model.load_state_dict(weights)
    # what began as a language model there, or was given as one here, keeps its learning rate
    model.pretrained |= other.pretrained & weights.keys()
    return started


def _with_heads(trained: Model, wanted: Model) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Give a trained model the heads that are wanted; which are new, which are left out.

    A new head that the wanted model has from a language model stays as it is.
    """
    heads, wishes = _heads(trained), _heads(wanted)
    names = get_args(Head)
    new = tuple(name for name in names if name in wishes and name not in heads)
    left = tuple(name for name in names if name in heads and name not in wishes)
    for name in new:
        heads.add([name], len(trained.text))
        if f"matcher.heads.{name}.bias" in wanted.pretrained:
            heads[name].load_state_dict(wishes[name].state_dict())
    for name in left:
        del heads[name]
    return new, left


def _heads(model: Model) -> CrossHeads:
    assert isinstance(model.matcher, CrossEncoder)  # noqa: S101 - the caller has looked
    return model.matcher.heads


def same_ids(one: TextProcessor, other: TextProcessor) -> bool:
    """Whether two processors give every word the same id."""
    if one.kind != other.kind or len(one) != len(other):
        return False
    if isinstance(one, WordText) and isinstance(other, WordText):
        return one.vocabulary.index == other.vocabulary.index
    if isinstance(one, HuggingFaceText) and isinstance(other, HuggingFaceText):
        return bool(one.tokenizer.get_vocab() == other.tokenizer.get_vocab())
    return True


def _check_fragments(model: Model, other: Model, folder: str | Path) -> None:
    if other.input_dim != model.input_dim:
        raise ConfigError(
            f"model.init_from: {folder} reads fragments of {other.input_dim} numbers, the data of "
            f"this run has {model.input_dim}: start from a run on the same features"
        )
    made_by = (other.fragments_from, model.fragments_from)
    if None not in made_by and made_by[0] != made_by[1]:
        raise ConfigError(
            f"model.init_from: {folder} reads fragments of '{made_by[0]}', this run those of "
            f"'{made_by[1]}': set data.features.extractor={made_by[0]}"
        )


def _check_words(model: Model, other: Model, folder: str | Path) -> None:
    if same_ids(model.text, other.text):
        return
    hint = "set model.text.pretrained to the same language model"
    if isinstance(other.text, WordText):
        place = model_folder(Path(folder)) / WordText.file
        hint = f"read its words with data.vocabulary={place}"
    raise ConfigError(
        f"model.init_from: {folder} knows other words ({len(other.text):,} of kind "
        f"'{other.text.kind}') than this run ({len(model.text):,} of kind '{model.text.kind}'); "
        f"{hint}"
    )


def _check_parts(model: Model, other: Model, folder: str | Path) -> None:
    """Parts of the same make, with the same options wherever these bear on a score."""
    for part, registry in PARTS.items():
        mine, theirs = getattr(model.spec, part), getattr(other.spec, part)
        here, there = _part(model, part), _part(other, part)
        if not isinstance(here, type(there)) and not isinstance(there, type(here)):
            raise ConfigError(
                f"model.init_from: {folder} has the {part} part '{theirs['name']}', this run has "
                f"'{mine['name']}': set model.{part}.name={theirs['name']}"
            )
        ours = _meant(here, {**registry.options(mine["name"]), **mine})
        others = _meant(there, {**registry.options(theirs["name"]), **theirs})
        for key in sorted(ours.keys() & others.keys()):
            if ours[key] != others[key]:
                raise ConfigError(
                    f"model.init_from: {folder} has model.{part}.{key}={others[key]}, this run "
                    f"{ours[key]}: start from a model of the same make, or set it so"
                )


def _part(model: Model, part: str) -> nn.Module:
    name = part if part == "matcher" else f"{part}_encoder"
    return first_member(getattr(model, name))


def _meant(part: nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a part that must be the same, with what 0 stands for."""
    meant = {k: v for k, v in options.items() if k not in IGNORED_OPTIONS and "dropout" not in k}
    return meant | ({"heads": part.transformer.heads} if isinstance(part, CrossEncoder) else {})


def _check_weights(
    mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], folder: str | Path
) -> None:
    """The same weights on both sides, in the same shapes."""
    for names, whose in ((mine.keys() - theirs, "has no"), (theirs.keys() - mine, "also has")):
        if names:
            raise ConfigError(
                f"model.init_from: {folder} {whose} {min(names)} ({len(names)} such weights): "
                "start from a model of the same make and size"
            )
    for key, value in mine.items():
        if value.shape != theirs[key].shape:
            raise ConfigError(
                f"model.init_from: {key} is {list(theirs[key].shape)} in {folder}, here "
                f"{list(value.shape)}: start from a model of the same size"
            )
