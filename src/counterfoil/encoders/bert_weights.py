"""BERT's weights under the names of our transformer; UNITER's and TAGS' files use the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from counterfoil.encoders.bert import language_model_refusals, load_language_config
from counterfoil.encoders.provenance import loaded_ids, not_loaded
from counterfoil.encoders.transformer import Transformer
from counterfoil.errors import CheckpointError, ConfigError
from counterfoil.features.pretrained import silent_loading

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


WORD_HEAD = {
    "transform.dense.weight": "dense.weight",
    "transform.dense.bias": "dense.bias",
    "transform.LayerNorm.weight": "norm.weight",
    "transform.LayerNorm.bias": "norm.bias",
}
"""BERT's masked-word head without its output layer: names there and in our `WordHead`."""

HEAD = "cls.predictions."


@dataclass(frozen=True)
class BertWordHead:
    """BERT's masked-word head: weights by our names, and the word vectors that it writes with.

    ``table`` [V, D] is its output layer, the word vectors of BERT itself unless they were untied.
    """

    state: Mapping[str, Tensor]
    table: Tensor


@dataclass(frozen=True)
class Bert:
    """A BERT of `transformers`: its sizes and, with attention joined, its weights.

    ``state`` has only what the checkpoint has: `transformers` makes up the rest, such as the pooler
    of a `BertForMaskedLM`. ``word_head`` is None if the checkpoint has none that is whole;
    ``missing`` are the weights it lacks, or has in another shape.
    """

    name: str
    width: int
    layers: int
    heads: int
    ffn: int
    positions: int
    state: Mapping[str, Tensor]
    word_head: BertWordHead | None = None
    missing: tuple[str, ...] = ()

    @classmethod
    def load(cls, name: str, width: int) -> Bert:
        """From a local folder or, where there is a network, a hub; its width must be ours.

        Any of BERT's classes will do (`BertModel`, `BertForMaskedLM`, `BertForPreTraining`), as
        will files that call the parameters of norms gamma and beta.
        """
        config = load_language_config(name)
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
        state, missing = _checkpoint(name)
        body = {k.removeprefix("bert."): v for k, v in state.items() if k.startswith("bert.")}
        lacking = [key for key in missing if key.startswith(("bert.embeddings.", "bert.encoder."))]
        if lacking:
            raise CheckpointError(
                f"'{name}': {len(lacking)} weights of BERT are missing or have another shape, "
                f"{lacking[0]} for one: give the folder of a whole BERT"
            )
        return cls(
            name,
            int(config.hidden_size),
            int(config.num_hidden_layers),
            int(config.num_attention_heads),
            int(config.intermediate_size),
            int(config.max_position_embeddings),
            join_attention(body),
            _word_head(state),
            missing,
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


def _checkpoint(name: str) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The weights that a BERT checkpoint has, and the names of those it lacks.

    `BertForPreTraining` has all parts that we read, the pooler and the masked-word head.
    """
    from transformers import BertForPreTraining

    # transformers initialises missing weights randomly; keep our RNG state
    with language_model_refusals(name), silent_loading(), torch.random.fork_rng(devices=[]):
        model, report = BertForPreTraining.from_pretrained(
            name, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
    missing = not_loaded(report)
    parameters = loaded_ids(model, report)
    named = model.named_parameters(remove_duplicate=False)
    state = {key: value.detach() for key, value in named if id(value) in parameters}
    return state, tuple(sorted(missing - state.keys()))


def _word_head(state: Mapping[str, Tensor]) -> BertWordHead | None:
    """The masked-word head of a checkpoint, if all of it is there."""
    table = state.get(f"{HEAD}decoder.weight")
    bias = state.get(f"{HEAD}decoder.bias", state.get(f"{HEAD}bias"))
    found = {ours: state.get(HEAD + theirs) for theirs, ours in WORD_HEAD.items()}
    weights = {key: value for key, value in {**found, "bias": bias}.items() if value is not None}
    if table is None or len(weights) < len(found) + 1:
        return None
    return BertWordHead(weights, table)
