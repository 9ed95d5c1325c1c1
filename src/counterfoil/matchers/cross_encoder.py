"""The single-stream cross-encoder: one transformer over the words and regions of a pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from counterfoil.encoders.bert_weights import Bert
from counterfoil.encoders.encoded import Encoded
from counterfoil.encoders.transformer import Packing, Transformer, initialise
from counterfoil.kernels.tiles import plan_tiles
from counterfoil.matchers.base import matchers
from counterfoil.matchers.cross_heads import CrossHeads, Head
from counterfoil.matchers.local import LocalMatcher, fragments

MOST_PAIRS = 1 << 15
"""Pairs that go through the transformer together: CUDA's attention takes fewer than 65,536."""


@dataclass(frozen=True)
class CrossStates:
    """What the transformer makes of n pairs.

    ``words`` [n, W, D] stand where the texts' tokens do, ``regions`` [n, R, D] where the images'
    regions do, zero at padding; ``pooled`` [n, D] is what is read off the first token.
    """

    words: Tensor
    regions: Tensor
    pooled: Tensor


@dataclass(frozen=True)
class _Sequences:
    """Packed tokens [ΣL, D] of pairs, each its words, then its regions; ``real`` [n, W + R]."""

    tokens: Tensor
    real: Tensor
    packing: Packing

    @classmethod
    def of(cls, images: Encoded, texts: Encoded, rows: Tensor, columns: Tensor) -> _Sequences:
        """Of images ``rows`` with texts ``columns``.

        An empty text keeps an empty first token, so that there is one to be read.
        """
        words, regions = texts.mask.shape[1], images.mask.shape[1]
        present = texts.mask.clone()
        present[:, :1] = True
        of_texts = fragments(texts).masked_fill(~texts.mask[..., None], 0.0).flatten(0, 1)
        of_images = fragments(images).flatten(0, 1)
        source = torch.cat([of_texts, of_images.to(of_texts.dtype)])
        device = source.device
        places = torch.cat(
            [
                columns[:, None] * words + torch.arange(words, device=device),
                len(of_texts) + rows[:, None] * regions + torch.arange(regions, device=device),
            ],
            dim=1,
        )
        real = torch.cat([present[columns], images.mask[rows]], dim=1)
        tokens = source.index_select(0, places[real])
        return cls(tokens, real, Packing.of(real.sum(1)))


@matchers.register("uniter")
class CrossEncoder(LocalMatcher):
    """UNITER: one transformer over the words and regions of each pair (Chen et al. 2020).

    The score is a logit or, so that a margin of 0.2 means something, its sigmoid. ``heads=0`` takes
    one for every 64 numbers, ``ffn=0`` four times ``model.embed_size``. ``pretrained`` is a BERT of
    `transformers` whose layers it starts from. ``checkpointing`` trades time for memory.
    ``extras`` are heads besides the score's, ``vocabulary`` how many words they write with.
    """

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
        extras: list[Head] | None = None,
        vocabulary: int = 0,
    ) -> None:
        super().__init__(embed_size)
        self.output = output
        self.transformer = Transformer(embed_size, layers, heads, ffn, dropout, checkpointing)
        self.pooler = nn.Linear(embed_size, embed_size)
        initialise(self)
        if pretrained:
            bert = Bert.load(pretrained, embed_size)
            bert.fill(self.transformer)
            kinds = ("weight", "bias")
            self.pooler.load_state_dict({k: bert.state[f"pooler.dense.{k}"] for k in kinds})
        self.heads = CrossHeads(embed_size, extras or (), vocabulary)

    @property
    def portable_options(self) -> dict[str, Any]:
        """What replaces the options that name files once the weights are saved."""
        return {"pretrained": ""}

    def cells_per_pair(self, words: int, regions: int) -> int:
        """Numbers held for a pair: one layer's, or where gradients are wanted what all keep."""
        width, depth = self.embed_size, len(self.transformer.layers)
        layer = 12 * width + 3 * self.transformer.ffn
        if torch.is_grad_enabled():
            layer = layer + depth * width if self.transformer.checkpointing else depth * layer
        return (words + regions) * layer // self.floats_per_cell + 1

    def tile(self, images: Encoded, texts: Encoded) -> Tensor:
        device = images.mask.device
        rows = torch.arange(len(images), device=device).repeat_interleave(len(texts))
        columns = torch.arange(len(texts), device=device).repeat(len(images))
        return self._scores(images, texts, rows, columns).view(len(images), len(texts))

    def _tile(self, images: Encoded, texts: Encoded, recompute: bool) -> Tensor:
        if not recompute:
            return self.tile(images, texts)
        # unlike other matchers' tiles, this one must see the same dropout again
        scores: Tensor = checkpoint(self.tile, images, texts, use_reentrant=False)
        return scores

    def paired(self, images: Encoded, texts: Encoded) -> Tensor:
        """Scores [n] of image ``k`` with text ``k``, no other pair being looked at."""
        if not len(images):
            return fragments(texts).new_zeros(0)
        places = torch.arange(len(images), device=images.mask.device)
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
        sequences = _Sequences.of(images, texts, places, places)
        states = self.transformer(sequences.tokens, sequences.packing)
        where = sequences.real.flatten().nonzero()[:, 0]
        grid = states.new_zeros(sequences.real.numel(), self.embed_size)
        grid = grid.index_copy(0, where, states).view(*sequences.real.shape, -1)
        words, regions = grid.split([texts.mask.shape[1], images.mask.shape[1]], dim=1)
        first = states.index_select(0, sequences.packing.starts)
        return CrossStates(words, regions, self._pool(first))

    def _scores(self, images: Encoded, texts: Encoded, rows: Tensor, columns: Tensor) -> Tensor:
        firsts = []
        for some, others in zip(rows.split(MOST_PAIRS), columns.split(MOST_PAIRS), strict=True):
            sequences = _Sequences.of(images, texts, some, others)
            firsts.append(self.transformer(sequences.tokens, sequences.packing, first_only=True))
        return self.score(self._pool(torch.cat(firsts)))

    def _pool(self, first: Tensor) -> Tensor:
        with torch.autocast(first.device.type, enabled=False):
            return torch.tanh(self.pooler(first.to(self.pooler.weight.dtype)))

    def score(self, pooled: Tensor) -> Tensor:
        """Scores [n] of pooled pairs, in full precision: near 1 a sigmoid has few digits."""
        with torch.autocast(pooled.device.type, enabled=False):
            logits: Tensor = self.heads["rank"](pooled)[:, 0]
        return logits.sigmoid() if self.output == "sigmoid" else logits
