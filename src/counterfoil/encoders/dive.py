"""DivE's set encoders: slot attention turns an item into a few vectors (Kim, Kim, Kwak 2023)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from counterfoil.data.batches.collate import ImageBatch, TextBatch
from counterfoil.data.text.tokenizers import TextProcessor
from counterfoil.encoders.bert import BertEncoder
from counterfoil.encoders.encoded import Encoded, l2_normalize
from counterfoil.encoders.images import Form, MLPEncoder, image_encoders
from counterfoil.encoders.layers import JointSpace
from counterfoil.encoders.pooling import MaxPooling
from counterfoil.encoders.texts import (
    RecurrentEncoder,
    WordInit,
    run_rnn,
    states_at_end,
    text_encoders,
)

EPS = 1e-7


class SlotAttention(nn.Module):
    """Attention of slots (queries) over fragments, with the softmax over slots, so slots compete.

    Each slot is the weighted mean of its values. ``form="reference"`` gives a padded key the same
    logit in every slot, as the public code does: padding then counts with weight 1 / slots.
    """

    def __init__(
        self, dim: int, context_dim: int, heads: int, head_dim: int, dropout: float, form: Form
    ) -> None:
        super().__init__()
        self.heads, self.form = heads, form
        inner = heads * head_dim
        self.to_q = nn.Linear(dim, inner, bias=False)
        self.to_k = nn.Linear(context_dim, inner, bias=False)
        self.to_v = nn.Linear(context_dim, inner, bias=False)
        self.to_out = nn.Linear(inner, dim)
        self.dropout = nn.Dropout(dropout)

    def context(self, fragments: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values, which all repetitions of the block share; positions are in keys only."""
        keys = fragments if positions is None else fragments + positions
        return self._heads(self.to_k(keys)), self._heads(self.to_v(fragments))

    def forward(self, slots: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        queries = self._heads(self.to_q(slots))  # [B, H, K, d]
        logits = queries @ keys.transpose(-1, -2) * queries.shape[-1] ** -0.5  # [B, H, K, N]
        padded = ~mask[:, None, None]
        if self.form == "reference":
            shares = logits.masked_fill(padded, torch.finfo(logits.dtype).min).softmax(2)
        else:
            shares = logits.softmax(2).masked_fill(padded, 0.0)
        weights = shares / (shares.sum(-1, keepdim=True) + EPS)
        means = self.dropout(weights).to(values.dtype) @ values
        out: Tensor = self.to_out(means.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class SlotAggregation(nn.Module):
    """Learned slots, refined ``depth`` times by one pre-norm block with shared weights."""

    def __init__(
        self,
        dim: int,
        context_dim: int,
        slots: int,
        depth: int,
        heads: int,
        head_dim: int,
        dropout: float,
        form: Form,
    ) -> None:
        super().__init__()
        self.depth = depth
        self.latents = nn.Parameter(torch.randn(slots, dim))
        self.norm, self.context_norm = nn.LayerNorm(dim), nn.LayerNorm(context_dim)
        self.attention = SlotAttention(dim, context_dim, heads, head_dim, dropout, form)
        self.feed_norm = nn.LayerNorm(dim)
        self.feed = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * dim, dim)
        )
        self.last_norm = nn.LayerNorm(dim)

    def forward(self, fragments: Tensor, mask: Tensor, positions: Tensor | None) -> Tensor:
        normed = self.context_norm(fragments)
        keys, values = self.attention.context(normed, positions)
        x = self.latents.expand(fragments.shape[0], -1, -1)
        for _ in range(self.depth):
            x = x + self.attention(self.norm(x), keys, values, mask)
            x = x + self.feed(self.feed_norm(x))
        out: Tensor = self.last_norm(x)
        return out


class SetPrediction(nn.Module):
    """A set of unit vectors per item: its normalized global vector plus one residual per slot.

    ``sine`` adds positions to the keys (words have an order, regions none), from 0 to 2π over the
    item's own length. ``form="reference"`` uses the padded length, so an encoding depends on the
    longest item of its batch, and counts padded keys (`SlotAttention`).
    """

    def __init__(
        self,
        dim: int,
        context_dim: int,
        slots: int = 4,
        depth: int = 4,
        heads: int = 4,
        head_dim: int = 512,
        dropout: float = 0.1,
        *,
        sine: bool = False,
        form: Form = "paper",
    ) -> None:
        super().__init__()
        self.sine, self.form = sine, form
        self.aggregate = SlotAggregation(
            dim, context_dim, slots, depth, heads, head_dim, dropout, form
        )
        self.global_norm = nn.LayerNorm(dim)

    def forward(self, fragments: Tensor, mask: Tensor, whole: Tensor) -> Encoded:
        residuals = self.aggregate(fragments, mask, self._positions(fragments, mask))
        vectors = l2_normalize(self.global_norm(whole)[:, None] + residuals)
        real = torch.ones(vectors.shape[:2], dtype=torch.bool, device=vectors.device)
        return Encoded(vectors, real, residuals=residuals)

    def _positions(self, fragments: Tensor, mask: Tensor) -> Tensor | None:
        if not self.sine:
            return None
        longest = torch.full_like(mask[:, :1], mask.shape[1], dtype=torch.long)
        lengths = longest if self.form == "reference" else mask.sum(1, keepdim=True)
        return sine_code(lengths, mask.shape[1], fragments.shape[-1]).to(fragments.dtype)


def sine_code(lengths: Tensor, width: int, dim: int) -> Tensor:
    """Positional code [B, width, dim] of items of the given lengths [B, 1], scaled to 2π.

    Sine on even channels, cosine on odd ones, wavelengths growing by powers of 10000.
    """
    position = torch.arange(1, width + 1, device=lengths.device, dtype=torch.float32)
    phase = position / (lengths + 1e-6) * 2 * math.pi  # [B, width]
    pairs = torch.arange((dim + 1) // 2, device=lengths.device, dtype=torch.float32)
    angle = phase[..., None] / 10000.0 ** (2 * pairs / dim)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)[..., :dim]


def makes_sets(encoder: nn.Module) -> bool:
    """Whether an encoder's fragments are vectors of a set, not the tokens or regions of an item."""
    return any(isinstance(part, SetPrediction) for part in encoder.modules())


@image_encoders.register("dive")
class SetImageEncoder(MLPEncoder):
    """A set per image: slots over fc(x) + MLP(fc(x)), around its maximum over regions (DivE).

    ``form="reference"`` counts padding in batch statistics and in the slots, as the public code
    does.
    """

    def __init__(
        self,
        input_dim: int,
        embed_size: int,
        *,
        slots: int = 4,
        depth: int = 4,
        heads: int = 4,
        head_dim: int = 512,
        hidden: int = 0,
        dropout: float = 0.1,
        form: Form = "paper",
    ) -> None:
        super().__init__(
            input_dim, embed_size, pooling="none", residual="projected", hidden=hidden, form=form
        )
        self.dropout, self.pool = nn.Dropout(dropout), MaxPooling(embed_size)
        self.set = SetPrediction(
            embed_size, embed_size, slots, depth, heads, head_dim, dropout, form=form
        )

    def forward(self, images: ImageBatch) -> Encoded:
        regions = self.dropout(self.project(images.fragments, images.mask))
        encoded: Encoded = self.set(regions, images.mask, self.pool(regions, images.mask))
        return encoded


@text_encoders.register("dive-gru")
class SetGRUEncoder(RecurrentEncoder):
    """A set per text: slots over the word vectors, around the last states of a BiGRU (DivE).

    ``form="reference"`` scales positions by the padded length and counts padding in the slots, as
    the public code does.
    """

    bidirectional = True

    def __init__(
        self,
        text: TextProcessor,
        embed_size: int,
        *,
        word_dim: int = 300,
        layers: int = 1,
        dropout: float = 0.1,
        slots: int = 4,
        depth: int = 4,
        heads: int = 4,
        head_dim: int = 512,
        glove: str = "",
        frozen: bool = False,
        word_init: WordInit = "uniform",
        form: Form = "paper",
    ) -> None:
        joint = JointSpace(embed_size, "none")
        super().__init__(
            text, embed_size, joint, word_dim, layers, dropout, glove, frozen, word_init
        )
        words = self.embed.embedding_dim
        self.set = SetPrediction(
            embed_size, words, slots, depth, heads, head_dim, dropout, sine=True, form=form
        )

    def forward(self, texts: TextBatch) -> Encoded:
        words = self.dropout(self.embed(texts.ids))
        forward, backward = run_rnn(self.rnn, words, texts.mask).chunk(2, dim=-1)
        # the backward direction ends at the first word
        whole = (states_at_end(forward, texts.mask) + backward[:, 0]) / 2
        encoded: Encoded = self.set(words, texts.mask, self.dropout(whole))
        return encoded


@text_encoders.register("dive-bert")
class SetBertEncoder(BertEncoder):
    """A set per text: slots over projected BERT states, around their maximum (DivE)."""

    def __init__(
        self,
        text: TextProcessor,
        embed_size: int,
        *,
        pretrained: str = "bert-base-uncased",
        weights: bool = True,
        dropout: float = 0.1,
        slots: int = 4,
        depth: int = 4,
        heads: int = 4,
        head_dim: int = 512,
        form: Form = "paper",
    ) -> None:
        super().__init__(text, embed_size, pretrained=pretrained, weights=weights, pooling="none")
        self.pool = MaxPooling(embed_size)
        self.set = SetPrediction(
            embed_size, embed_size, slots, depth, heads, head_dim, dropout, sine=True, form=form
        )

    def forward(self, texts: TextBatch) -> Encoded:
        words = self.words(texts)
        encoded: Encoded = self.set(words, texts.mask, self.pool(words, texts.mask))
        return encoded
