"""A pretrained language model as text encoder, and which parameters pretrained weights gave.

A module that loads pretrained weights has an attribute ``pretrained``: the names of the parameters
that it loaded, relative to itself, or True if it loaded all of them. The optimiser gives exactly
these their own learning rate. ``loading_notes`` is what a user should know about the loading.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from counterfoil.core.errors import CheckpointError, MissingExtraError
from counterfoil.data.batches.collate import TextBatch
from counterfoil.data.text.tokenizers import HuggingFaceText, TextProcessor
from counterfoil.encoders.encoded import Encoded
from counterfoil.encoders.layers import JointSpace, xavier_linear
from counterfoil.encoders.pooling import Pooling
from counterfoil.encoders.texts import text_encoders


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
    """Identities of those parameters."""
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
    """Names of the parameters of a module that are among some identities."""
    return frozenset(name for name, p in module.named_parameters() if id(p) in parameters)


def loaded_ids(model: nn.Module, report: dict[str, Any]) -> set[int]:
    """Identities of the parameters that `transformers` found in a checkpoint, by its report.

    What a checkpoint lacks, `transformers` fills with random numbers.
    """
    missing = not_loaded(report)
    # of a tied weight, one name in the checkpoint is enough
    named = model.named_parameters(remove_duplicate=False)
    return {id(parameter) for name, parameter in named if name not in missing}


def not_loaded(report: dict[str, Any]) -> set[str]:
    """Weights that a checkpoint lacks or has in another shape."""
    mismatched = {key if isinstance(key, str) else key[0] for key in report["mismatched_keys"]}
    return set(report["missing_keys"]) | mismatched


def loading_notes(module: nn.Module) -> list[str]:
    """What is worth knowing of the loading of all parts of a module, each once."""
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


@contextmanager
def language_model_refusals(name: str) -> Iterator[None]:
    """What `transformers` raises when it cannot load a language model, as one error of ours."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"no language model could be loaded from '{name}': {error}") from None


class LanguageModel(nn.Module):
    """A `transformers` encoder; the parameters that it ``loaded`` learn at the reduced rate."""

    def __init__(self, model: Any, loaded: Collection[int] = ()) -> None:
        super().__init__()
        self.model = model
        self.pretrained = names_of(self, loaded)

    @classmethod
    def load(cls, name: str, weights: bool) -> LanguageModel:
        """From a local folder or, where there is a network, a hub; ``weights=False``: random."""
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
        """What replaces the options that name files once the weights are saved."""
        return {"weights": False}

    @property
    def word_table(self) -> nn.Embedding:
        """Where ids become vectors, for what asks how much each word matters."""
        table: nn.Embedding = self.bert.model.get_input_embeddings()
        return table

    def forward(self, texts: TextBatch) -> Encoded:
        hidden = self.bert.model(
            input_ids=texts.ids, attention_mask=texts.mask.long()
        ).last_hidden_state
        encoded: Encoded = self.joint(self.fc(hidden), texts.mask)
        return encoded
