"""The single-stream cross-encoder: one transformer over a pair, and heads that read its states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from counterfoil.core.errors import ConfigError
from counterfoil.encoders.encoded import HALVES, Encoded
from counterfoil.encoders.transformer import EPS, HEAD, Bert, Transformer, in_precision, initialize
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
"""Heads in the order they are made, and which of them a new one is a copy of."""

MAX_PAIRS = 1 << 15
"""Pairs that go through the transformer together: CUDA's attention takes fewer than 65,536."""

MAX_TOKENS = 1 << 17
"""Tokens that go through it together without gradients: enough to keep a large GPU busy."""

TENSOR_CORES = (8, 0)
"""Compute capability from which GPUs multiply bfloat16 fast."""


class WordHead(nn.Module):
    """Logits over the vocabulary: a dense layer, GELU and a norm, then the table of word vectors.

    The table is the text encoder's own, given at each call, so that both stay one.
    """

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, states: Tensor, table: Tensor) -> Tensor:
        return F.linear(self.norm(F.gelu(self.dense(states))), table, self.bias)


class CrossHeads(nn.ModuleDict):
    """The heads by name, ``rank`` always, the others where asked for.

    ``rank`` (a logit) and ``itm`` (no, yes) read the pooled vector of a pair; ``mlm``,
    ``discrimination`` (replaced, original) and ``correction`` the state of each token.
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
        """Further heads, started as TAGS starts them where it says how.

        Discrimination begins as ``itm``, correction as ``mlm``, ``itm`` with ``rank`` as its "yes".
        """
        for name in sorted(set(extras) - set(self), key=list(ORDER).index):
            head = self._create(name, vocabulary)
            initialize(head)
            model = ORDER[name]
            if model is not None and model in self:
                head.load_state_dict(self[model].state_dict())
            if name == "itm":
                _set_row(head, 1, self["rank"])
            sample = next(self["rank"].parameters())
            self[name] = head.to(sample.device, sample.dtype)

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
    for mine, theirs in zip(head.parameters(), source.parameters(), strict=True):
        mine[row].copy_(theirs[0])


@dataclass(frozen=True)
class CrossStates:
    """What the transformer makes of n pairs.

    ``words`` [n, W, D] stand where the texts' tokens do, ``regions`` [n, R, D] where the images'
    regions do, zero at padding; ``pooled`` [n, D] is what is read off the first token.
    """

    words: Tensor
    regions: Tensor
    pooled: Tensor


@matchers.register("uniter")
class CrossEncoder(FragmentMatcher):
    """UNITER: one transformer over the words and regions of each pair (Chen et al. 2020).

    The score is a logit or, so that a margin of 0.2 means something, its sigmoid. ``heads=0`` takes
    one for every 64 numbers, ``ffn=0`` four times ``model.embed_size``. ``pretrained`` is a BERT of
    `transformers` whose layers, pooler and masked-word head it starts from; without one, ``alike``
    has the first layer begin with attention to what is alike, for embeddings that are aligned (the
    objective `alignment`). ``checkpointing`` trades time for memory.
    ``extras`` are heads besides the score's, ``vocabulary`` how many words they write with.
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
        """Start the heads that write words from BERT's masked-word head, if ``table`` fits it.

        ``table`` [V, D] are the word vectors of the text encoder. BERT's head writes with its own:
        with any other table its weights would mean nothing. The correction begins as ``mlm``.
        """
        bert, self._bert = self._bert, None  # to be read once, and not to be kept in memory
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
        """What replaces the options that name files once the weights are saved."""
        return {"pretrained": ""}

    def rounds(self, device: torch.device) -> bool:
        """Whether many pairs should be given in bfloat16, which this device is fast at.

        It keeps 8 bits of each number: scores are a little off (`benchmarks/cross_encoder.py` says
        how far), and those that are near each other may change places.
        """
        return device.type == "cuda" and torch.cuda.get_device_capability(device) >= TENSOR_CORES

    def cells_per_pair(self, words: int, regions: int) -> int:
        """Numbers held for a pair: one layer's, or where gradients are wanted what all keep."""
        width, depth = self.embed_size, len(self.transformer.layers)
        layer = 12 * width + 3 * self.transformer.ffn
        if torch.is_grad_enabled():
            layer = layer + depth * width if self.transformer.checkpointing else depth * layer
        return (words + regions) * layer // self.floats_per_cell + 1

    @property
    def _learning(self) -> bool:
        """Whether gradients are wanted, or dropout, whose draws depend on the order of pairs."""
        return self.training or torch.is_grad_enabled()

    def score_block(self, images: Encoded, texts: Encoded, job: ScoringJob) -> Tensor:
        if self._learning:
            return super().score_block(images, texts, job)
        scores = self._asked(images, texts, *_all_pairs(images, texts))
        return scores.view(len(images), len(texts))

    def tile(self, images: Encoded, texts: Encoded) -> Tensor:
        scores = self._scores(images, texts, *_all_pairs(images, texts))
        return scores.view(len(images), len(texts))

    def _recomputed_tile(self, images: Encoded, texts: Encoded) -> Tensor:
        # unlike other matchers' tiles, this one must see the same dropout again
        scores: Tensor = checkpoint(self.tile, images, texts, use_reentrant=False)
        return scores

    def paired(self, images: Encoded, texts: Encoded) -> Tensor:
        """Scores [n] of image ``k`` with text ``k``, no other pair being looked at."""
        if not len(images):
            return fragments(texts).new_zeros(0)
        places = torch.arange(len(images), device=images.mask.device)
        if not self._learning:
            return self._asked(images, texts, places, places)
        words, regions = (int(side.mask.sum(1).max()) for side in (texts, images))
        cells = self.cells_per_pair(words, regions)
        plan = plan_tiles(1, len(places), cells, self.floats_per_cell, places.device)
        blocks = places.split(plan.columns)
        if len(blocks) == 1 or not torch.is_grad_enabled():
            return torch.cat([self._scores(images, texts, at, at) for at in blocks])
        return torch.cat(
            [checkpoint(self._scores, images, texts, at, at, use_reentrant=False) for at in blocks]
        )

    def states(self, images: Encoded, texts: Encoded) -> CrossStates:
        """States of image ``k`` with text ``k``, all at once, for heads that read tokens."""
        places = torch.arange(len(images), device=images.mask.device)
        pairs = PairTokens.of(images, texts)
        tokens, packing = pairs.sequences(places, places)
        states = self.transformer(tokens, packing)
        real = torch.cat([pairs.present, images.mask], dim=1)
        grid = states.new_zeros(real.numel(), self.embed_size)
        grid = grid.index_copy(0, real.flatten().nonzero()[:, 0], states).view(*real.shape, -1)
        words, regions = grid.split([texts.mask.shape[1], images.mask.shape[1]], dim=1)
        first = states.index_select(0, packing.starts)
        return CrossStates(words, regions, self._pool(first))

    def _scores(self, images: Encoded, texts: Encoded, rows: Tensor, columns: Tensor) -> Tensor:
        """As in training, in the order given."""
        pairs, firsts = PairTokens.of(images, texts), []
        for some, others in zip(rows.split(MAX_PAIRS), columns.split(MAX_PAIRS), strict=True):
            firsts.append(self.transformer(*pairs.sequences(some, others), first_only=True))
        return self.score(self._pool(torch.cat(firsts)))

    def _asked(self, images: Encoded, texts: Encoded, rows: Tensor, columns: Tensor) -> Tensor:
        """Of a model that is asked: pairs of equal length together, weights cast once for all."""
        device, weight = rows.device, self.pooler.weight
        dtype = self._precision(texts)
        pairs = PairTokens.of(images, texts, dtype)
        transformer = in_precision(self.transformer, dtype)
        scores = weight.new_empty(len(rows))
        most = self._tokens_at_once(device)
        with torch.autocast(device.type, enabled=False):
            for chunk in chunks(pairs.lengths(rows, columns), most, MAX_PAIRS):
                inputs = pairs.sequences(rows[chunk.at], columns[chunk.at], chunk.length)
                first = transformer(*inputs, first_only=True)
                scores.index_copy_(0, chunk.at, self.score(self._pool(first)))
        return scores

    def _precision(self, texts: Encoded) -> torch.dtype:
        """That of the run, else of the fragments where they are given in half, else of the weights.

        Unlike under autocast, what passes from layer to layer is then in that precision, too.
        """
        device, given = texts.mask.device.type, fragments(texts).dtype
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return given if given in HALVES else self.pooler.weight.dtype

    def _tokens_at_once(self, device: torch.device) -> int:
        cells = self.cells_per_pair(1, 0)
        return plan_tiles(1, MAX_TOKENS, cells, self.floats_per_cell, device).columns

    def _pool(self, first: Tensor) -> Tensor:
        with torch.autocast(first.device.type, enabled=False):
            return torch.tanh(self.pooler(first.to(self.pooler.weight.dtype)))

    def score(self, pooled: Tensor) -> Tensor:
        """Scores [n] of pooled pairs, in full precision: near 1 a sigmoid has few digits."""
        with torch.autocast(pooled.device.type, enabled=False):
            logits: Tensor = self.heads["rank"](pooled)[:, 0]
        return logits.sigmoid() if self.output == "sigmoid" else logits


def _all_pairs(images: Encoded, texts: Encoded) -> tuple[Tensor, Tensor]:
    """Rows and columns of every image with every text."""
    device = images.mask.device
    rows = torch.arange(len(images), device=device).repeat_interleave(len(texts))
    return rows, torch.arange(len(texts), device=device).repeat(len(images))
