"""UNITER, a single-stream cross-encoder: one transformer over a pair, and heads on its states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from counterfoil.core.errors import ConfigError
from counterfoil.encoders.encoded import HALVES, Encoded
from counterfoil.encoders.transformer import (
    EPS,
    HEAD,
    Bert,
    Transformer,
    TransformerLayer,
    in_precision,
    initialize,
)
from counterfoil.kernels.spec import ScoringJob
from counterfoil.kernels.tiled import plan_tiles
from counterfoil.matchers.base import matchers
from counterfoil.matchers.cross_pairs import PairTokens, chunks
from counterfoil.matchers.fragment_matcher import FragmentMatcher, fragments

Head = Literal["itm", "mlm", "discrimination", "correction"]

ORDER: dict[str, str | None] = {
    "itm": None,
    "mlm": None,
    "discrimination": "itm",
    "correction": "mlm",
}
"""Heads in their order of creation, and the head that each is copied from."""

MAX_PAIRS = 1 << 15
"""Pairs per pass of the transformer: CUDA's attention takes fewer than 65,536."""

MAX_TOKENS = 1 << 17
"""Tokens per pass without gradients: enough to keep a large GPU busy."""

TENSOR_CORES = (8, 0)
"""Compute capability from which on GPUs multiply bfloat16 fast."""


class WordHead(nn.Module):
    """Logits over the vocabulary: a dense layer, GELU and a norm, then the table of word vectors.

    The table is passed at each call, so that the head shares it with the text encoder.
    """

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, states: Tensor, table: Tensor) -> Tensor:
        return F.linear(self.norm(F.gelu(self.dense(states))), table, self.bias)


class CrossHeads(nn.ModuleDict):
    """The heads by name: always ``rank``, and those in ``extras``.

    ``rank`` (a logit) and ``itm`` (no, yes) read the pooled vector of a pair. ``mlm``,
    ``discrimination`` (replaced, original) and ``correction`` read the state of each token.
    """

    def __init__(self, width: int, extras: Sequence[Head] = (), vocabulary: int = 0) -> None:
        super().__init__()
        self.width = width
        self["rank"] = nn.Linear(width, 1)
        initialize(self)
        self.add(extras, vocabulary)

    def __getitem__(self, name: str) -> nn.Module:
        if name not in self:
            raise ConfigError(
                f"this cross-encoder has no head '{name}', only {', '.join(self)}: "
                f"name it in model.matcher.extras"
            )
        return super().__getitem__(name)

    def add(self, extras: Sequence[Head], vocabulary: int) -> None:
        """Add heads, initialized as in TAGS.

        ``discrimination`` starts as a copy of ``itm``, ``correction`` as a copy of ``mlm``; the
        "yes" row of ``itm`` is a copy of ``rank``.
        """
        for name in sorted(set(extras) - set(self), key=list(ORDER).index):
            head = self._create(name, vocabulary)
            initialize(head)
            source = ORDER[name]
            if source is not None and source in self:
                head.load_state_dict(self[source].state_dict())
            if name == "itm":
                _set_row(head, 1, self["rank"])
            weight = next(self["rank"].parameters())
            self[name] = head.to(weight.device, weight.dtype)

    def _create(self, name: str, vocabulary: int) -> nn.Module:
        if name in ("itm", "discrimination"):
            return nn.Linear(self.width, 2)
        if vocabulary < 1:
            raise ConfigError(
                f"model.matcher.extras: '{name}' writes words, so model.matcher.vocabulary must "
                "say how many there are"
            )
        return WordHead(self.width, vocabulary)


@torch.no_grad()
def _set_row(head: nn.Module, row: int, source: nn.Module) -> None:
    for target, values in zip(head.parameters(), source.parameters(), strict=True):
        target[row].copy_(values[0])


@dataclass(frozen=True)
class CrossStates:
    """States of n pairs after the transformer.

    ``words`` [n, W, D] and ``regions`` [n, R, D] are aligned with the tokens of the texts and the
    regions of the images, zero at padding; ``pooled`` [n, D] comes from the first token.
    """

    words: Tensor
    regions: Tensor
    pooled: Tensor


@matchers.register("uniter")
class CrossEncoder(FragmentMatcher):
    """UNITER: one transformer over the words and regions of each pair (Chen et al. 2020).

    The score is the sigmoid of a logit, on the scale of a margin of 0.2, or the logit itself
    (``output``). ``heads=0``: one attention head per 64 channels. ``ffn=0``: four times
    ``model.embed_size``. ``pretrained``: a BERT of `transformers` that initializes the layers, the
    pooler and the masked-word head. ``alike``: without a BERT, the first layer initially attends to
    similar tokens, for aligned embeddings (the objective `alignment`). ``checkpointing`` trades
    time for memory. ``extras``: further heads; ``vocabulary``: the number of words they predict.
    """

    pretrained: frozenset[str] = frozenset()

    embed_size: int

    def __init__(
        self,
        embed_size: int,
        *,
        layers: int = 12,
        heads: int = 0,
        ffn: int = 0,
        dropout: float = 0.1,
        output: Literal["sigmoid", "logit"] = "sigmoid",
        checkpointing: bool = False,
        pretrained: str = "",
        alike: bool = False,
        extras: list[Head] | None = None,
        vocabulary: int = 0,
    ) -> None:
        super().__init__(embed_size)
        self.output = output
        self.transformer = Transformer(embed_size, layers, heads, ffn, dropout, checkpointing)
        self.pooler = nn.Linear(embed_size, embed_size)
        initialize(self)
        if alike:
            self.transformer.attend_alike()
        self.heads = CrossHeads(embed_size, extras or (), vocabulary)
        self.loading_notes: list[str] = []
        self._bert = Bert.load(pretrained, embed_size) if pretrained else None
        if self._bert is not None:
            self._fill(self._bert)

    def _fill(self, bert: Bert) -> None:
        bert.fill(self.transformer)
        loaded = [f"transformer.{name}" for name, _ in self.transformer.named_parameters()]
        prefix = "pooler.dense."
        pooler = {k.removeprefix(prefix): v for k, v in bert.state.items() if k.startswith(prefix)}
        if pooler.keys() == dict(self.pooler.named_parameters()).keys():
            self.pooler.load_state_dict(pooler)
            loaded += [f"pooler.{kind}" for kind in pooler]
        else:
            self.loading_notes.append(f"'{bert.name}' has no pooler: it starts from random numbers")
        self.pretrained = frozenset(loaded)

    def fill_word_heads(self, table: Tensor | None) -> None:
        """Initialize the heads that predict words from BERT's masked-word head.

        ``table`` [V, D] are the word vectors of the text encoder. BERT's head is used only if they
        equal BERT's own, which its weights were trained with.
        """
        bert, self._bert = self._bert, None  # needed once; frees its memory
        heads = [name for name in ("mlm", "correction") if name in self.heads]
        if bert is None or not heads:
            return
        head, count = bert.word_head, 0 if table is None else len(table)
        if head is None:
            lacking = [key for key in bert.missing if key.startswith(HEAD)]
            self.loading_notes.append(
                f"'{bert.name}' has no whole masked-word head (missing, or of another shape: "
                f"{', '.join(lacking)}): {' and '.join(heads)} start from random numbers"
            )
            return
        if table is None or not head.table[:count].equal(table.detach().cpu()):
            self.loading_notes.append(
                f"the masked-word head of '{bert.name}' ({HEAD}*) is not used: it writes with word "
                "vectors of its own, which are not those of the text encoder (model.text)"
            )
            return
        state = {**head.state, "bias": head.state["bias"][:count]}
        for name in heads:
            self.heads[name].load_state_dict(state)
            self.pretrained |= {f"heads.{name}.{key}" for key in state}

    @property
    def portable_options(self) -> dict[str, Any]:
        """Replacements for options that name files, for a saved model."""
        return {"pretrained": ""}

    def rounds(self, device: torch.device) -> bool:
        """Whether large jobs should use bfloat16, because this device is fast at it.

        bfloat16 has 8 significant bits: scores change slightly (measured by
        `benchmarks/cross_encoder.py`), so that nearly equal ones may swap ranks.
        """
        return device.type == "cuda" and torch.cuda.get_device_capability(device) >= TENSOR_CORES

    def cells_per_pair(self, words: int, regions: int) -> int:
        """Memory of a pair: that of one layer, or with gradients that of all layers."""
        width, depth = self.embed_size, len(self.transformer.layers)
        layer = 12 * width + 3 * self.transformer.ffn
        if torch.is_grad_enabled():
            layer = layer + depth * width if self.transformer.checkpointing else depth * layer
        return (words + regions) * layer // self.floats_per_cell + 1

    @property
    def _fixed_order(self) -> bool:
        """Whether pairs must stay in order: for gradients, or for the random draws of dropout."""
        return self.training or torch.is_grad_enabled()

    def _in_weights_dtype(self, encoded: Encoded) -> Encoded:
        # without gradients, the weights are cast to the precision of the fragments instead
        return super()._in_weights_dtype(encoded) if self._fixed_order else encoded

    def score_block(self, images: Encoded, texts: Encoded, job: ScoringJob) -> Tensor:
        if self._fixed_order:
            return super().score_block(images, texts, job)
        scores = self._inference_scores(images, texts, *_all_pairs(images, texts))
        return scores.view(len(images), len(texts))

    def tile(self, images: Encoded, texts: Encoded) -> Tensor:
        scores = self._scores(images, texts, *_all_pairs(images, texts))
        return scores.view(len(images), len(texts))

    def _recomputed_tile(self, images: Encoded, texts: Encoded) -> Tensor:
        # unlike in other matchers, recomputing must repeat the same dropout
        scores: Tensor = checkpoint(self.tile, images, texts, use_reentrant=False)
        return scores

    def paired(self, images: Encoded, texts: Encoded) -> Tensor:
        """Scores [n] of image ``k`` with text ``k``; no other pair is computed."""
        if not len(images):
            return fragments(texts).new_zeros(0)
        index = torch.arange(len(images), device=images.mask.device)
        if not self._fixed_order:
            return self._inference_scores(images, texts, index, index)
        words, regions = (int(side.mask.sum(1).max()) for side in (texts, images))
        cells = self.cells_per_pair(words, regions)
        plan = plan_tiles(1, len(index), cells, self.floats_per_cell, index.device)
        blocks = index.split(plan.columns)
        if len(blocks) == 1 or not torch.is_grad_enabled():
            return torch.cat([self._scores(images, texts, block, block) for block in blocks])
        recomputed = partial(checkpoint, self._scores, images, texts, use_reentrant=False)
        return torch.cat([recomputed(block, block) for block in blocks])

    def states(self, images: Encoded, texts: Encoded) -> CrossStates:
        """States of image ``k`` with text ``k``, in one pass, for heads that read tokens."""
        index = torch.arange(len(images), device=images.mask.device)
        pairs = PairTokens.of(images, texts)
        tokens, packing = pairs.sequences(index, index)
        states = self.transformer(tokens, packing)
        real = torch.cat([pairs.present, images.mask], dim=1)
        grid = states.new_zeros(real.numel(), self.embed_size)
        grid = grid.index_copy(0, real.flatten().nonzero()[:, 0], states).view(*real.shape, -1)
        words, regions = grid.split([texts.mask.shape[1], images.mask.shape[1]], dim=1)
        first = states.index_select(0, packing.starts)
        return CrossStates(words, regions, self._pool(first))

    def rollout(self, images: Encoded, texts: Encoded) -> Tensor:
        """Attention rollout [n, W] from the first token to the words; image ``k`` with text ``k``.

        The attention of each layer is averaged over its heads and mixed in equal shares with the
        residual connection; the product over the layers says how much of each input token reaches
        the state that is scored (Abnar and Zuidema 2020). It is 0 at padding and never negative.
        """
        index = torch.arange(len(images), device=images.mask.device)
        states, packing = PairTokens.of(images, texts).sequences(index, index)
        flow: Tensor | None = None
        for layer in self.transformer.layers:
            assert isinstance(layer, TransformerLayer)  # noqa: S101 - nn.ModuleList forgets it
            attention = layer.attention(states, packing).mean(1)
            mixed = (attention + torch.eye(packing.longest, device=attention.device)) / 2
            flow = mixed if flow is None else mixed @ flow
            states = layer(states, packing)
        assert flow is not None  # noqa: S101 - a transformer has at least one layer
        width = min(texts.mask.shape[1], packing.longest)
        words = flow.new_zeros(texts.mask.shape)
        words[:, :width] = flow[:, 0, :width]
        return words.masked_fill(~texts.mask, 0.0)

    def _scores(self, images: Encoded, texts: Encoded, rows: Tensor, columns: Tensor) -> Tensor:
        """Scores of pairs in the given order, as in training."""
        pairs = PairTokens.of(images, texts)
        parts = zip(rows.split(MAX_PAIRS), columns.split(MAX_PAIRS), strict=True)
        firsts = [self.transformer(*pairs.sequences(*part), first_only=True) for part in parts]
        return self.score(self._pool(torch.cat(firsts)))

    def _inference_scores(
        self, images: Encoded, texts: Encoded, rows: Tensor, columns: Tensor
    ) -> Tensor:
        """Scores of pairs, batched by length, with the weights cast once."""
        device, weight = rows.device, self.pooler.weight
        dtype = self._precision(texts)
        pairs = PairTokens.of(images, texts, dtype)
        transformer = in_precision(self.transformer, dtype)
        scores = weight.new_empty(len(rows))
        cells = self.cells_per_pair(1, 0)
        tokens = plan_tiles(1, MAX_TOKENS, cells, self.floats_per_cell, device).columns
        with torch.autocast(device.type, enabled=False):
            for chunk in chunks(pairs.lengths(rows, columns), tokens, MAX_PAIRS):
                index = chunk.index
                inputs = pairs.sequences(rows[index], columns[index], chunk.length)
                first = transformer(*inputs, first_only=True)
                scores.index_copy_(0, index, self.score(self._pool(first)))
        return scores

    def _precision(self, texts: Encoded) -> torch.dtype:
        """The precision of autocast, else of half-precision fragments, else of the weights.

        Unlike under autocast, activations between layers are in that precision as well.
        """
        device, dtype = texts.mask.device.type, fragments(texts).dtype
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return dtype if dtype in HALVES else self.pooler.weight.dtype

    def _pool(self, first: Tensor) -> Tensor:
        with torch.autocast(first.device.type, enabled=False):
            return torch.tanh(self.pooler(first.to(self.pooler.weight.dtype)))

    def score(self, pooled: Tensor) -> Tensor:
        """Scores [n] of pooled pairs, in full precision: half has too few digits near 1."""
        with torch.autocast(pooled.device.type, enabled=False):
            logits: Tensor = self.heads["rank"](pooled)[:, 0]
        return logits.sigmoid() if self.output == "sigmoid" else logits


def _all_pairs(images: Encoded, texts: Encoded) -> tuple[Tensor, Tensor]:
    """Rows and columns of every image with every text."""
    device = images.mask.device
    rows = torch.arange(len(images), device=device).repeat_interleave(len(texts))
    return rows, torch.arange(len(texts), device=device).repeat(len(images))
