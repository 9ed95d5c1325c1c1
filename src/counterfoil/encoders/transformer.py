"""A BERT-style transformer over packed sequences, and BERT's weights under its names.

Nothing is computed for padding. UNITER's and TAGS' files name their weights as BERT's do.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from counterfoil.core.errors import CheckpointError, ConfigError
from counterfoil.encoders.bert import (
    language_model_refusals,
    load_language_config,
    loaded_ids,
    not_loaded,
)
from counterfoil.features.pretrained import silent_loading

EPS = 1e-12
"""Of every layer normalisation, as BERT has it."""

SPREAD = 0.02
"""Standard deviation of new weights, as BERT has it."""

BASE = 768
"""Inputs of a layer of BERT-base, which that is made for; with fewer, new weights are wider."""

HEAD_WIDTH = 64
"""Numbers of one attention head where their count is not given."""

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Without cuDNN's attention, which makes a plan for every shape it meets; here they are many."""

Part = TypeVar("Part", bound=nn.Module)

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

WORD_HEAD = {
    "transform.dense.weight": "dense.weight",
    "transform.dense.bias": "dense.bias",
    "transform.LayerNorm.weight": "norm.weight",
    "transform.LayerNorm.bias": "norm.bias",
}
"""BERT's masked-word head without its output layer: names there and in our `WordHead`."""

HEAD = "cls.predictions."


@dataclass(frozen=True)
class Packing:
    """Sequences of unlike length one after another, [ΣL, D], and how they stand side by side.

    ``places`` [ΣL] are those of the tokens in a padded [n·L] grid, ``keys`` [n, 1, 1, L] says which
    of its places hold one; both are None where all sequences are equally long. ``starts`` [n] are
    the first tokens.
    """

    count: int
    longest: int
    starts: Tensor
    places: Tensor | None = None
    keys: Tensor | None = None

    @classmethod
    def of(cls, lengths: Tensor) -> Packing:
        """Of sequences of these lengths, of which none is empty."""
        shortest, longest = torch.stack(lengths.aminmax()).tolist()
        if shortest == longest:
            return cls.equal(len(lengths), longest, lengths.device)
        starts = lengths.cumsum(0) - lengths
        real = torch.arange(longest, device=lengths.device) < lengths[:, None]
        places = real.flatten().nonzero()[:, 0]
        return cls(len(lengths), longest, starts, places, real[:, None, None])

    @classmethod
    def equal(cls, count: int, length: int, device: torch.device) -> Packing:
        """Of sequences known to be equally long: nothing waits for what a GPU is doing."""
        return cls(count, length, torch.arange(count, device=device) * length)

    def spread(self, x: Tensor) -> Tensor:
        """[ΣL, D] as [n, L, D], zero at padding."""
        if self.places is not None:
            x = x.new_zeros(self.count * self.longest, x.shape[1]).index_copy(0, self.places, x)
        return x.view(self.count, self.longest, -1)

    def pack(self, x: Tensor) -> Tensor:
        """[n, L, D] as [ΣL, D]."""
        x = x.flatten(0, 1)
        return x if self.places is None else taken(x, self.places)


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.rows = len(x)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.rows, gradient.shape[1]).index_copy(0, places, gradient), None


def taken(x: Tensor, places: Tensor) -> Tensor:
    """Rows [m, D] of x [n, D] at places of which none occurs twice.

    Backwards they are put where they were: `index_select` would add them up there, one by one.
    """
    found: Tensor = _Taken.apply(x, places)
    return found


class TransformerLayer(nn.Module):
    """Attention and a feed-forward network, each with a residual and normalised after it."""

    def __init__(self, width: int, heads: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps=EPS)
        self.widen = nn.Linear(width, ffn)
        self.narrow = nn.Linear(ffn, width)
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.dropout = nn.Dropout(dropout)

    @torch.no_grad()
    def attend_alike(self) -> None:
        """Have tokens look at those that are like themselves, to begin with.

        Query and key of a token are then its own vector, but for the small weights that BERT begins
        with: a word looks at the regions that its embedding resembles, which a random layer has to
        find out before anything about the pair can be learned.
        """
        width = self.qkv.in_features
        for part in self.qkv.weight[: 2 * width].split(width):
            part.copy_(torch.eye(width) + SPREAD * torch.randn(width, width))

    def forward(self, x: Tensor, packing: Packing, first_only: bool = False) -> Tensor:
        """States [ΣL, D], or [n, D] of the first tokens, which is far less work."""
        seen = self.dropout(self.out(self._attend(x, packing, first_only)))
        if first_only:
            x = x.index_select(0, packing.starts)
        x = self.attention_norm(x + seen)
        changed: Tensor = self.norm(x + self.dropout(self.narrow(F.gelu(self.widen(x)))))
        return changed

    def _attend(self, x: Tensor, packing: Packing, first_only: bool) -> Tensor:
        width = x.shape[1]
        if first_only:
            first = x.index_select(0, packing.starts)
            q = F.linear(first, self.qkv.weight[:width], self.qkv.bias[:width])[:, None]
            both = F.linear(x, self.qkv.weight[width:], self.qkv.bias[width:])
            k, v = packing.spread(both).chunk(2, dim=-1)
        else:
            q, k, v = packing.spread(self.qkv(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        with sdpa_kernel(BACKENDS):
            attended = F.scaled_dot_product_attention(
                q, k, v, packing.keys, self.dropout.p if self.training else 0.0
            )
        attended = attended.transpose(1, 2).flatten(2)
        return attended[:, 0] if first_only else packing.pack(attended)


class Transformer(nn.Module):
    """Layers one after another; with ``checkpointing``, each is recomputed in the backward pass.

    ``heads=0`` takes one for every 64 numbers, ``ffn=0`` four times the width: BERT's proportions.
    """

    def __init__(
        self, width: int, layers: int, heads: int, ffn: int, dropout: float, checkpointing: bool
    ) -> None:
        super().__init__()
        heads = heads or max(1, width // HEAD_WIDTH)
        if layers < 1 or heads < 1 or width % heads:
            raise ConfigError(
                f"model.matcher: {layers} layers of {heads} heads: at least one of each, and "
                f"model.embed_size ({width}) a multiple of the heads"
            )
        self.heads, self.ffn = heads, ffn or 4 * width
        self.layers = nn.ModuleList(
            TransformerLayer(width, self.heads, self.ffn, dropout) for _ in range(layers)
        )
        self.checkpointing = checkpointing

    def attend_alike(self) -> None:
        """Begin with attention to what is alike, in the first layer."""
        first = self.layers[0]
        assert isinstance(first, TransformerLayer)  # noqa: S101 - nn.ModuleList forgets the type
        first.attend_alike()

    def forward(self, x: Tensor, packing: Packing, first_only: bool = False) -> Tensor:
        """States [ΣL, D] of all tokens, or [n, D] of the first of each sequence."""
        recompute = self.checkpointing and torch.is_grad_enabled()
        for number, layer in enumerate(self.layers, start=1):
            last = first_only and number == len(self.layers)
            if recompute:
                x = checkpoint(layer, x, packing, last, use_reentrant=False)
            else:
                x = layer(x, packing, last)
        return x


def in_precision(module: Part, dtype: torch.dtype) -> Part:
    """The same module with its weights cast once, for passes without gradients.

    The module itself stays as it is, so that other threads may go on using it.
    """
    cast = copy.copy(module)
    weights = {name: p if p is None else p.to(dtype) for name, p in module._parameters.items()}
    parts = {name: part and in_precision(part, dtype) for name, part in module._modules.items()}
    cast.__dict__.update(_parameters=weights, _modules=parts)
    return cast


def spread_for(inputs: int) -> float:
    """Standard deviation of the new weights of a layer with so many inputs.

    With few of them, sums of BERT's small weights are next to nothing, so is all that is not linear
    in a layer, and a small model from nothing learns no matching at all.
    """
    return SPREAD if inputs >= BASE else max(inputs, HEAD_WIDTH) ** -0.5


def initialize(module: nn.Module) -> None:
    """New weights as BERT draws them, wider in small models; biases zero, norms neutral."""
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            nn.init.normal_(part.weight, std=spread_for(part.weight.shape[1]))
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)


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
