"""BERT's weights under the names of our transformer; UNITER's and TAGS' files use the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from counterfoil.encoders.bert import LanguageModel
from counterfoil.encoders.transformer import Transformer
from counterfoil.errors import CheckpointError, ConfigError

LAYER_NAMES = {
    "attention.self.qkv.": "qkv.",
    "attention.output.dense.": "out.",
    "attention.output.LayerNorm.": "attention_norm.",
    "intermediate.dense.": "widen.",
    "output.dense.": "narrow.",
    "output.LayerNorm.": "norm.",
}
"""How names begin within a layer there, after `join_attention`, and here."""

LAYERS = "encoder.layer."


def join_attention(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Queries, keys and values of each layer as one weight and one bias, as we compute them."""
    joined = dict(state)
    for key in state:
        start, found, kind = key.partition("attention.self.query.")
        names = [f"{start}attention.self.{part}.{kind}" for part in ("query", "key", "value")]
        if found and all(name in joined for name in names):
            parts = [joined.pop(name) for name in names]
            joined[f"{start}attention.self.qkv.{kind}"] = torch.cat(parts)
    return joined


def layer_name(key: str) -> str | None:
    """Our name within the transformer: ``encoder.layer.3.output.dense.bias`` → ``layers.3.…``.

    >>> layer_name("encoder.layer.3.attention.output.dense.bias")
    'layers.3.out.bias'
    """
    number, _, rest = key.removeprefix(LAYERS).partition(".")
    for theirs, ours in LAYER_NAMES.items():
        if key.startswith(LAYERS) and rest.startswith(theirs):
            return f"layers.{number}.{ours}{rest[len(theirs) :]}"
    return None


@dataclass(frozen=True)
class Bert:
    """A BERT of `transformers`: its sizes and, with attention joined, its weights."""

    name: str
    width: int
    layers: int
    heads: int
    ffn: int
    positions: int
    state: Mapping[str, Tensor]

    @classmethod
    def load(cls, name: str, width: int) -> Bert:
        """From a local folder or, where there is a network, a hub; its width must be ours."""
        model = LanguageModel.load(name, weights=True).model
        config = model.config
        if config.model_type != "bert" or config.hidden_act != "gelu":
            raise CheckpointError(
                f"'{name}': expected a BERT with exact GELU, found a model of type "
                f"'{config.model_type}' with '{getattr(config, 'hidden_act', '?')}'"
            )
        if config.hidden_size != width:
            raise ConfigError(
                f"'{name}' is {config.hidden_size} numbers wide, model.embed_size is {width}: "
                f"set model.embed_size={config.hidden_size}, or choose another BERT"
            )
        return cls(
            name,
            int(config.hidden_size),
            int(config.num_hidden_layers),
            int(config.num_attention_heads),
            int(config.intermediate_size),
            int(config.max_position_embeddings),
            join_attention(model.state_dict()),
        )

    def fill(self, transformer: Transformer) -> None:
        """Its layers into ours, from the first on; ours may be fewer."""
        ours = (len(transformer.layers), transformer.heads, transformer.ffn)
        if (self.heads, self.ffn) != ours[1:] or self.layers < ours[0]:
            raise ConfigError(
                f"'{self.name}' has {self.layers} layers of {self.heads} heads and an inner width "
                f"of {self.ffn}, model.matcher {ours[0]} of {ours[1]} and {ours[2]}: set "
                f"model.matcher.layers={self.layers}, heads={self.heads}, ffn={self.ffn}"
            )
        wanted = transformer.state_dict()
        renamed = {layer_name(key): value for key, value in self.state.items()}
        transformer.load_state_dict(
            {key: value for key, value in renamed.items() if key is not None and key in wanted}
        )
