"""A BERT-style transformer over packed sequences, without padding, that can load BERT's weights.

The checkpoints of UNITER and TAGS name their weights as BERT's do.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from counterfoil.core.errors import CheckpointError, ConfigError
from counterfoil.core.tensors.modes import attention_without_cudnn
from counterfoil.encoders.bert import (
    language_model_refusals,
    load_language_config,
    loaded_ids,
    not_loaded,
)
from counterfoil.features.pretrained import silent_loading
from counterfoil.kernels.packed_attention import packed_attention

EPS = 1e-12
"""Epsilon of every layer norm, as in BERT."""

SPREAD = 0.02
"""Standard deviation of new weights, as in BERT."""

BASE = 768
"""Width of BERT-base; narrower layers get a larger standard deviation (`spread_for`)."""

HEAD_WIDTH = 64
"""Width of an attention head if the number of heads is not given."""

Part = TypeVar("Part", bound=nn.Module)

LAYER_NAMES = {
    "attention.self.qkv.": "qkv.",
    "attention.output.dense.": "out.",
    "attention.output.LayerNorm.": "attention_norm.",
    "intermediate.dense.": "widen.",
    "output.dense.": "narrow.",
    "output.LayerNorm.": "norm.",
}
"""Prefixes of parameter names within a layer: BERT's (after `join_attention`) and ours."""

LAYERS = "encoder.layer."

WORD_HEAD = {
    "transform.dense.weight": "dense.weight",
    "transform.dense.bias": "dense.bias",
    "transform.LayerNorm.weight": "norm.weight",
    "transform.LayerNorm.bias": "norm.bias",
}
"""BERT's masked-word head without its output layer: its names and those of our `WordHead`."""

HEAD = "cls.predictions."


@dataclass(frozen=True)
class Packing:
    """Layout of ``count`` sequences packed to [ΣL, D], and of the padded grid [n, L, D].

    ``rows`` [ΣL] are the indices of the tokens in the flat grid [n·L], ``mask`` [n, 1, 1, L] is
    True at real tokens; both are None if all sequences have the same length. ``starts`` [n] are
    the indices of the first tokens.
    """

    count: int
    longest: int
    starts: Tensor
    rows: Tensor | None = None
    mask: Tensor | None = None

    @classmethod
    def of(cls, lengths: Tensor) -> Packing:
        """For sequences of these lengths, none of which is 0."""
        shortest, longest = torch.stack(lengths.aminmax()).tolist()
        if shortest == longest:
            return cls.equal(len(lengths), longest, lengths.device)
        starts = lengths.cumsum(0) - lengths
        real = torch.arange(longest, device=lengths.device) < lengths[:, None]
        rows = real.flatten().nonzero()[:, 0]
        return cls(len(lengths), longest, starts, rows, real[:, None, None])

    @classmethod
    def equal(cls, count: int, length: int, device: torch.device) -> Packing:
        """For sequences of one length, without a host sync."""
        return cls(count, length, torch.arange(count, device=device) * length)

    def spread(self, x: Tensor) -> Tensor:
        """[ΣL, D] as [n, L, D], zero at padding."""
        if self.rows is not None:
            x = x.new_zeros(self.count * self.longest, x.shape[1]).index_copy(0, self.rows, x)
        return x.view(self.count, self.longest, -1)

    def pack(self, x: Tensor) -> Tensor:
        """[n, L, D] as [ΣL, D]."""
        x = x.flatten(0, 1)
        return x if self.rows is None else select_rows(x, self.rows)


class _SelectRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.count, gradient.shape[1]).index_copy(0, rows, gradient), None


def select_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Rows [m, D] of x [n, D]; no row index may occur twice.

    The backward pass copies the gradient. That of `index_select` adds it, which is slower.
    """
    selected: Tensor = _SelectRows.apply(x, rows)
    return selected


class TransformerLayer(nn.Module):
    """A post-norm transformer layer: attention and a feed-forward network, each with a residual."""

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
        """Initialize queries and keys near the identity, so that tokens attend to similar ones.

        A word then attends to the regions that its embedding resembles, from the first step on.
        BERT's small random weights are added.
        """
        width = self.qkv.in_features
        for part in self.qkv.weight[: 2 * width].split(width):
            part.copy_(torch.eye(width) + SPREAD * torch.randn(width, width))

    def forward(self, x: Tensor, packing: Packing, first_only: bool = False) -> Tensor:
        """States [ΣL, D] or, with ``first_only``, [n, D] of the first tokens (cheaper)."""
        attended = self.dropout(self.out(self._attend(x, packing, first_only)))
        if first_only:
            x = x.index_select(0, packing.starts)
        x = self.attention_norm(x + attended)
        states: Tensor = self.norm(x + self.dropout(self.narrow(F.gelu(self.widen(x)))))
        return states

    def attention(self, x: Tensor, packing: Packing) -> Tensor:
        """Attention weights [n, heads, L, L] of every token to every other, for explanations."""
        q, k, _ = packing.spread(self.qkv(x)).chunk(3, dim=-1)
        q, k = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k))
        logits = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        if packing.mask is not None:
            logits = logits.masked_fill(~packing.mask, -torch.inf)
        return logits.softmax(-1)

    def _attend(self, x: Tensor, packing: Packing, first_only: bool) -> Tensor:
        width, dropout = x.shape[1], self.dropout.p if self.training else 0.0
        first: Tensor | None = None
        if first_only:
            first = x.index_select(0, packing.starts)
            first = F.linear(first, self.qkv.weight[:width], self.qkv.bias[:width])
            joined = F.linear(x, self.qkv.weight[width:], self.qkv.bias[width:])
        else:
            joined = self.qkv(x)
        if packing.rows is not None:  # equal lengths need no mask: PyTorch's fastest kernels run
            attended = packed_attention(
                joined, packing.starts, packing.longest, self.heads, dropout, first
            )
            if attended is not None:
                return attended
        return self._attend_padded(joined, first, packing, dropout)

    def _attend_padded(
        self, joined: Tensor, first: Tensor | None, packing: Packing, dropout: float
    ) -> Tensor:
        parts = packing.spread(joined).chunk(3 if first is None else 2, dim=-1)
        q, k, v = parts if first is None else (first[:, None], *parts)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        with attention_without_cudnn():
            attended = F.scaled_dot_product_attention(q, k, v, packing.mask, dropout)
        attended = attended.transpose(1, 2).flatten(2)
        return packing.pack(attended) if first is None else attended[:, 0]


class Transformer(nn.Module):
    """A stack of layers; with ``checkpointing``, each is recomputed in the backward pass.

    Defaults are BERT's proportions: ``heads=0`` is width / 64, ``ffn=0`` is 4 · width.
    """

    def __init__(
        self, width: int, layers: int, heads: int, ffn: int, dropout: float, checkpointing: bool
    ) -> None:
        super().__init__()
        heads = heads or max(1, width // HEAD_WIDTH)
        if layers < 1 or heads < 1 or width % heads:
            raise ConfigError(
                f"model.matcher: {layers} layers of {heads} heads: expected at least one of each, "
                f"and model.embed_size ({width}) must be a multiple of the heads"
            )
        self.heads, self.ffn = heads, ffn or 4 * width
        self.layers = nn.ModuleList(
            TransformerLayer(width, self.heads, self.ffn, dropout) for _ in range(layers)
        )
        self.checkpointing = checkpointing

    def attend_alike(self) -> None:
        """`TransformerLayer.attend_alike` in the first layer."""
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
    """A copy of a module with its weights cast, for passes without gradients.

    The module itself is unchanged, so other threads can keep using it.
    """
    cast = copy.copy(module)
    weights = {name: p if p is None else p.to(dtype) for name, p in module._parameters.items()}
    parts = {name: part and in_precision(part, dtype) for name, part in module._modules.items()}
    cast.__dict__.update(_parameters=weights, _modules=parts)
    return cast


def spread_for(inputs: int) -> float:
    """Standard deviation of the new weights of a layer with this number of inputs.

    BERT's 0.02 is too small for narrow layers: their outputs vanish, and a small model trained
    from scratch does not learn to match.
    """
    return SPREAD if inputs >= BASE else max(inputs, HEAD_WIDTH) ** -0.5


def initialize(module: nn.Module) -> None:
    """Draw new weights as BERT does, with `spread_for`; set biases to zero."""
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            nn.init.normal_(part.weight, std=spread_for(part.weight.shape[1]))
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)


def join_attention(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Concatenate the weights, and the biases, of queries, keys and values of each layer."""
    joined = dict(state)
    for key in state:
        start, separator, kind = key.partition("attention.self.query.")
        names = [f"{start}attention.self.{part}.{kind}" for part in ("query", "key", "value")]
        if separator and all(name in joined for name in names):
            parts = [joined.pop(name) for name in names]
            joined[f"{start}attention.self.qkv.{kind}"] = torch.cat(parts)
    return joined


def layer_name(key: str) -> str | None:
    """Our name of one of BERT's parameters; None if it is not part of a layer.

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
    """BERT's masked-word head: its weights by our names, and its output layer ``table`` [V, D].

    The output layer is BERT's word embedding, unless the checkpoint unties them.
    """

    state: Mapping[str, Tensor]
    table: Tensor


@dataclass(frozen=True)
class Bert:
    """A BERT of `transformers`: its sizes and its weights, with attention joined.

    ``state`` has only weights from the checkpoint, not those that `transformers` initializes.
    ``word_head`` is None unless the checkpoint has all of it. ``missing`` lists weights that the
    checkpoint lacks or has in another shape.
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
        """Load from a local folder or from the hub; its hidden size must be ``width``.

        Accepts `BertModel`, `BertForMaskedLM` and `BertForPreTraining`, also old files in which
        the parameters of layer norms are called gamma and beta.
        """
        config = load_language_config(name)
        if config.model_type != "bert" or config.hidden_act != "gelu":
            raise CheckpointError(
                f"'{name}': expected a BERT with exact GELU, got a model of type "
                f"'{config.model_type}' with '{getattr(config, 'hidden_act', '?')}'"
            )
        if config.hidden_size != width:
            raise ConfigError(
                f"'{name}' has a hidden size of {config.hidden_size}, but model.embed_size is "
                f"{width}: set model.embed_size={config.hidden_size}, or choose another BERT"
            )
        state, missing = _checkpoint(name)
        body = {k.removeprefix("bert."): v for k, v in state.items() if k.startswith("bert.")}
        lacking = [key for key in missing if key.startswith(("bert.embeddings.", "bert.encoder."))]
        if lacking:
            raise CheckpointError(
                f"'{name}': {len(lacking)} weights of BERT are missing or have another shape, "
                f"such as {lacking[0]}: give the folder of a complete BERT"
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
        """Copy the first layers into a transformer, which may have fewer."""
        ours = (len(transformer.layers), transformer.heads, transformer.ffn)
        if (self.heads, self.ffn) != ours[1:] or self.layers < ours[0]:
            raise ConfigError(
                f"'{self.name}' has {self.layers} layers of {self.heads} heads and an inner width "
                f"of {self.ffn}, model.matcher {ours[0]} of {ours[1]} and {ours[2]}: set "
                f"model.matcher.layers={self.layers}, heads={self.heads}, ffn={self.ffn}"
            )
        expected = transformer.state_dict()
        renamed = {layer_name(key): value for key, value in self.state.items()}
        transformer.load_state_dict(
            {key: value for key, value in renamed.items() if key is not None and key in expected}
        )


def _checkpoint(name: str) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The weights of a BERT checkpoint, and the names of those it lacks.

    Read as `BertForPreTraining`, which has both the pooler and the masked-word head.
    """
    from transformers import BertForPreTraining

    # transformers initializes missing weights randomly; keep our RNG state
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
    """The masked-word head of a checkpoint; None unless all of it is there."""
    table = state.get(f"{HEAD}decoder.weight")
    bias = state.get(f"{HEAD}decoder.bias", state.get(f"{HEAD}bias"))
    entries = {ours: state.get(HEAD + theirs) for theirs, ours in WORD_HEAD.items()}
    weights = {name: x for name, x in {**entries, "bias": bias}.items() if x is not None}
    if table is None or len(weights) < len(entries) + 1:
        return None
    return BertWordHead(weights, table)
