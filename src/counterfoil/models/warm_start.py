"""Initialize a model with the weights of a trained one: second training stages and fine-tuning.

Both models must agree on everything that affects a score. Only the heads of a cross-encoder may
differ: as in TAGS, new heads start from the trained ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from torch import Tensor, nn

from counterfoil.core import zoo
from counterfoil.core.config import model_folder
from counterfoil.core.errors import ConfigError
from counterfoil.data.text.tokenizers import HuggingFaceText, TextProcessor, WordText
from counterfoil.features.extractors import same_extractor, split_full_name
from counterfoil.matchers.cross_encoder import CrossEncoder, CrossHeads, Head
from counterfoil.models.catalogue import PARTS
from counterfoil.models.model import Model
from counterfoil.models.store import first_member, from_pretrained

IGNORED_OPTIONS = frozenset(
    {"name", "pretrained", "weights", "checkpointing", "alike", "extras", "vocabulary"}
    | {"positions", "layers", "ffn"}
)
"""Options that are not compared: they do not affect scores, or weight shapes show them."""


@dataclass(frozen=True)
class WarmStart:
    """Where weights came from, which heads are new, and which were left out."""

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


def start_from(model: Model, folder: str | Path, cache: Path | None = None) -> WarmStart:
    """Load the weights of a run's best checkpoint, or of a saved model, into a new model."""
    folder = zoo.resolve(folder, cache=cache)
    other = from_pretrained(model_folder(folder))
    _check_fragments(model, other, folder)
    _check_words(model, other, folder)
    _check_parts(model, other, folder)
    new: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    if isinstance(model.matcher, CrossEncoder) and isinstance(other.matcher, CrossEncoder):
        new, left = _match_heads(other, model)
    weights = other.state_dict()
    _check_weights(model.state_dict(), weights, folder)
    model.load_state_dict(weights)
    # parameters that are pretrained in either model keep their reduced learning rate
    model.pretrained |= other.pretrained & weights.keys()
    return WarmStart(str(folder), new, left)


def _match_heads(trained: Model, wanted: Model) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Give a trained model the wanted heads; returns the names of new and of removed heads.

    A new head that the wanted model has from a language model keeps its weights.
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
    """Whether two text processors give every word the same id."""
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
    wanted, own = other.fragments_name, model.fragments_name
    if wanted is not None and own is not None and not same_extractor(wanted, own):
        raise ConfigError(
            f"model.init_from: {folder} reads fragments of '{wanted}', this run reads those of "
            f"'{own}': set data.features.extractor={split_full_name(wanted)[0]} and its options"
        )


def _check_words(model: Model, other: Model, folder: str | Path) -> None:
    if same_ids(model.text, other.text):
        return
    hint = "set model.text.pretrained to the same language model"
    if isinstance(other.text, WordText):
        path = model_folder(Path(folder)) / WordText.file
        hint = f"read its words with data.vocabulary={path}"
    raise ConfigError(
        f"model.init_from: {folder} knows other words ({len(other.text):,} of kind "
        f"'{other.text.kind}') than this run ({len(model.text):,} of kind '{model.text.kind}'); "
        f"{hint}"
    )


def _check_parts(model: Model, other: Model, folder: str | Path) -> None:
    """Refuse parts of another class, or with other options that affect scores."""
    for part, registry in PARTS.items():
        mine, theirs = getattr(model.spec, part), getattr(other.spec, part)
        here, there = _part(model, part), _part(other, part)
        if not isinstance(here, type(there)) and not isinstance(there, type(here)):
            raise ConfigError(
                f"model.init_from: {folder} has the {part} part '{theirs['name']}', this run has "
                f"'{mine['name']}': set model.{part}.name={theirs['name']}"
            )
        ours = _compared_options(here, {**registry.options(mine["name"]), **mine})
        others = _compared_options(there, {**registry.options(theirs["name"]), **theirs})
        for key in sorted(ours.keys() & others.keys()):
            if ours[key] != others[key]:
                raise ConfigError(
                    f"model.init_from: {folder} has model.{part}.{key}={others[key]}, this run "
                    f"{ours[key]}: start from a model with the same options, or set it to match"
                )


def _part(model: Model, part: str) -> nn.Module:
    name = part if part == "matcher" else f"{part}_encoder"
    return first_member(getattr(model, name))


def _compared_options(part: nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a part that must be equal, with the actual number of heads."""
    compared = {k: v for k, v in options.items() if k not in IGNORED_OPTIONS and "dropout" not in k}
    return compared | ({"heads": part.transformer.heads} if isinstance(part, CrossEncoder) else {})


def _check_weights(
    mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], folder: str | Path
) -> None:
    """Refuse weights with other names or shapes."""
    for names, whose in ((mine.keys() - theirs, "has no"), (theirs.keys() - mine, "also has")):
        if names:
            raise ConfigError(
                f"model.init_from: {folder} {whose} {min(names)} ({len(names)} such weights): "
                "start from a model of the same parts and size"
            )
    for key, value in mine.items():
        if value.shape != theirs[key].shape:
            raise ConfigError(
                f"model.init_from: {key} is {list(theirs[key].shape)} in {folder}, here "
                f"{list(value.shape)}: start from a model of the same size"
            )
