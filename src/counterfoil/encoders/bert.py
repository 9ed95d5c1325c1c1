"""BERT and other pretrained language models as text encoders; records of pretrained parameters.

A module that loads pretrained weights has an attribute ``pretrained``: the names of the loaded
parameters, relative to the module, or True for all of them. The optimizer gives exactly these
their own learning rate. ``loading_notes`` are messages for the user about the loading.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from counterfoil.core.errors import MissingExtraError
from counterfoil.data.batches.collate import TextBatch
from counterfoil.data.text.tokenizers import HuggingFaceText, TextProcessor
from counterfoil.encoders.encoded import Encoded
from counterfoil.encoders.layers import JointSpace, xavier_linear
from counterfoil.encoders.pooling import Pooling
from counterfoil.encoders.texts import text_encoders
from counterfoil.features.pretrained import refusals


def pretrained_names(module: nn.Module) -> frozenset[str]:
    """Full names of all parameters of a module that came from pretrained weights.

    >>> layer = nn.Linear(2, 2)
    >>> layer.pretrained = frozenset({"weight"})
    >>> sorted(pretrained_names(nn.Sequential(layer, nn.Linear(2, 2))))
    ['0.weight']
    """
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        for name in _own_names(part)
    )


def pretrained_ids(module: nn.Module) -> set[int]:
    """Python ids of all parameters of a module that came from pretrained weights."""
    identities = set()
    for part in module.modules():
        own = set(_own_names(part))
        identities |= {id(parameter) for name, parameter in part.named_parameters() if name in own}
    return identities


def _own_names(part: nn.Module) -> Iterator[str]:
    loaded: Collection[str] | bool = getattr(part, "pretrained", False)
    if not loaded:
        return
    for name, _ in part.named_parameters():
        if loaded is True or name in loaded:
            yield name


def names_of(module: nn.Module, parameters: Collection[int]) -> frozenset[str]:
    """Names of the parameters of a module whose Python ids are among ``parameters``."""
    return frozenset(name for name, p in module.named_parameters() if id(p) in parameters)


def loaded_ids(model: nn.Module, report: dict[str, Any]) -> set[int]:
    """Python ids of the parameters that a checkpoint had, by the report of `transformers`.

    `transformers` initializes all others randomly.
    """
    missing = not_loaded(report)
    # a tied weight is loaded if the checkpoint has it under one of its names
    named = model.named_parameters(remove_duplicate=False)
    return {id(parameter) for name, parameter in named if name not in missing}


def not_loaded(report: dict[str, Any]) -> set[str]:
    """Weights that a checkpoint lacks or has in another shape."""
    mismatched = {key if isinstance(key, str) else key[0] for key in report["mismatched_keys"]}
    return set(report["missing_keys"]) | mismatched


def loading_notes(module: nn.Module) -> list[str]:
    """Messages for the user about the loading of all parts of a module, each once."""
    notes = (note for part in module.modules() for note in getattr(part, "loading_notes", ()))
    return list(dict.fromkeys(notes))


def load_language_config(name: str) -> Any:
    """The architecture of a language model of `transformers`."""
    try:
        from transformers import AutoConfig
    except ImportError:
        raise MissingExtraError("transformers", "hf", "the text encoder 'bert'") from None
    with language_model_refusals(name):
        return AutoConfig.from_pretrained(name)


def language_model_refusals(name: str) -> AbstractContextManager[None]:
    """Turn what `transformers` raises for a model that it cannot load into `CheckpointError`."""
    advice = "set pretrained to a local folder or to a name on the hub"
    return refusals(name, "language model", advice)


class LanguageModel(nn.Module):
    """A `transformers` encoder; the parameters that it ``loaded`` learn at the reduced rate."""

    def __init__(self, model: Any, loaded: Collection[int] = ()) -> None:
        super().__init__()
        self.model = model
        self.pretrained = names_of(self, loaded)

    @classmethod
    def load(cls, name: str, weights: bool) -> LanguageModel:
        """Load from a local folder or from the hub; ``weights=False``: random weights."""
        config = load_language_config(name)
        from transformers import AutoModel

        with language_model_refusals(name):
            if not weights:
                return cls(AutoModel.from_config(config))
            model, report = AutoModel.from_pretrained(
                name, dtype=torch.float32, output_loading_info=True
            )
        return cls(model, loaded_ids(model, report))

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.hidden_size)

    def save(self, folder: Path) -> None:
        """Write the architecture only; the weights are saved with the whole model."""
        self.model.config.save_pretrained(folder)


@text_encoders.register("bert")
class BertEncoder(nn.Module):
    """Last hidden states of a language model, projected and pooled over all tokens (VSE∞)."""

    def __init__(
        self,
        text: TextProcessor,
        embed_size: int,
        *,
        pretrained: str = "bert-base-uncased",
        weights: bool = True,
        pooling: Pooling = "gpo",
        normalize: bool = True,
    ) -> None:
        super().__init__()
        self.bert = LanguageModel.load(pretrained, weights)
        positions = getattr(self.bert.model.config, "max_position_embeddings", None)
        if isinstance(text, HuggingFaceText) and positions:
            text.max_length = min(text.max_length, int(positions))
        self.fc = xavier_linear(self.bert.hidden_size, embed_size)
        self.joint = JointSpace(embed_size, pooling, normalize)

    @property
    def portable_options(self) -> dict[str, Any]:
        """Replacements for options that name files, for a model saved with its weights."""
        return {"weights": False}

    @property
    def word_table(self) -> nn.Embedding:
        """The embedding of token ids; word attributions read it."""
        table: nn.Embedding = self.bert.model.get_input_embeddings()
        return table

    def words(self, texts: TextBatch) -> Tensor:
        """Projected last hidden states [B, W, embed_size]."""
        output = self.bert.model(input_ids=texts.ids, attention_mask=texts.mask.long())
        words: Tensor = self.fc(output.last_hidden_state)
        return words

    def forward(self, texts: TextBatch) -> Encoded:
        encoded: Encoded = self.joint(self.words(texts), texts.mask)
        return encoded
