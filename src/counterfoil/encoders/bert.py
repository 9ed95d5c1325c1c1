"""A pretrained language model as text encoder: any encoder of `transformers`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from counterfoil.data.batches import TextBatch
from counterfoil.data.texts import HuggingFaceText, TextProcessor
from counterfoil.encoders.encoded import Encoded
from counterfoil.encoders.joint import JointSpace, xavier_linear
from counterfoil.encoders.pooling import Pooling
from counterfoil.encoders.provenance import loaded_ids, names_of
from counterfoil.encoders.texts import text_encoders
from counterfoil.errors import CheckpointError, MissingExtraError


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
        normalise: bool = True,
    ) -> None:
        super().__init__()
        self.bert = LanguageModel.load(pretrained, weights)
        positions = getattr(self.bert.model.config, "max_position_embeddings", None)
        if isinstance(text, HuggingFaceText) and positions:
            text.max_length = min(text.max_length, int(positions))
        self.fc = xavier_linear(self.bert.hidden_size, embed_size)
        self.joint = JointSpace(embed_size, pooling, normalise)

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
