"""Text encoders over word ids: word embedding, unidirectional GRU, averaged bidirectional GRU."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from counterfoil.core.errors import ConfigError
from counterfoil.core.registry import Registry
from counterfoil.core.tensors.host_mirror import host_mask
from counterfoil.core.tensors.modes import is_exporting
from counterfoil.data.batches.collate import TextBatch
from counterfoil.data.text.tokenizers import TextProcessor, WordText
from counterfoil.data.text.vocabulary import load_vectors
from counterfoil.encoders.encoded import Encoded
from counterfoil.encoders.layers import JointSpace
from counterfoil.encoders.pooling import Pooling
from counterfoil.encoders.recurrent import run_gru, run_padded

text_encoders: Registry[type[nn.Module]] = Registry("text encoder")

WordInit = Literal["uniform", "normal"]


def run_rnn(rnn: nn.GRU, inputs: Tensor, mask: Tensor) -> Tensor:
    """States [B, W, directions·H] of a GRU over the real words; zero at padding."""
    if is_exporting():
        return run_padded(rnn.all_weights, rnn.bidirectional, inputs, mask.sum(1).clamp(min=1))
    return run_gru(rnn, inputs, host_mask(mask).sum(1))


def states_at_end(states: Tensor, mask: Tensor) -> Tensor:
    """The state [B, H] at the last real token of each row of states [B, W, H]."""
    last = mask.sum(1).clamp(min=1) - 1
    return states[torch.arange(last.shape[0], device=last.device), last]


class WordEmbedding(nn.Embedding):
    """Word vectors: random, or GloVe from the file ``glove``; trained unless ``frozen``.

    Random vectors are uniform in ±0.1, as in the public code, or standard normal, as in PyTorch.
    The latter make the states of different captions differ from the first step.
    """

    def __init__(
        self, text: TextProcessor, word_dim: int, glove: str, frozen: bool, init: WordInit
    ) -> None:
        table: Tensor | None = None
        if glove:
            if not isinstance(text, WordText):
                raise ConfigError(
                    "model.text.glove: word vectors need a text encoder with a word vocabulary, "
                    "such as gru or bigru"
                )
            table = torch.from_numpy(load_vectors(glove, text.vocabulary).table)
            word_dim = table.shape[1]
        super().__init__(len(text), word_dim)
        if init == "uniform":
            nn.init.uniform_(self.weight, -0.1, 0.1)
        if table is not None:
            self.weight.data.copy_(table)
        self.weight.requires_grad_(not frozen)


class RecurrentEncoder(nn.Module):
    """A GRU over word vectors: the parts that `GRUEncoder` and `BiGRUEncoder` share."""

    bidirectional: bool

    def __init__(
        self,
        text: TextProcessor,
        embed_size: int,
        joint: JointSpace,
        word_dim: int,
        layers: int,
        dropout: float,
        glove: str,
        frozen: bool,
        word_init: WordInit = "uniform",
    ) -> None:
        super().__init__()
        self.embed = WordEmbedding(text, word_dim, glove, frozen, word_init)
        self.dropout = nn.Dropout(dropout)
        self.rnn = nn.GRU(
            self.embed.embedding_dim,
            embed_size,
            layers,
            batch_first=True,
            bidirectional=self.bidirectional,
        )
        self.joint = joint

    @property
    def portable_options(self) -> dict[str, Any]:
        """Replacements for options that name files, for a model saved with its weights."""
        return {"glove": "", "word_dim": self.embed.embedding_dim}

    @property
    def word_table(self) -> nn.Embedding:
        """The embedding of word ids; word attributions read it."""
        return self.embed

    def states(self, texts: TextBatch) -> Tensor:
        return run_rnn(self.rnn, self.dropout(self.embed(texts.ids)), texts.mask)


@text_encoders.register("gru")
class GRUEncoder(RecurrentEncoder):
    """Unidirectional GRU; the pooled vector is the state after the last word (VSE++)."""

    bidirectional = False

    def __init__(
        self,
        text: TextProcessor,
        embed_size: int,
        *,
        word_dim: int = 300,
        layers: int = 1,
        dropout: float = 0.0,
        pooling: Pooling = "last",
        normalize: bool = True,
        absolute: bool = False,
        glove: str = "",
        frozen: bool = False,
        word_init: WordInit = "uniform",
    ) -> None:
        joint = JointSpace(
            embed_size, "none" if pooling == "last" else pooling, normalize, absolute
        )
        super().__init__(
            text, embed_size, joint, word_dim, layers, dropout, glove, frozen, word_init
        )
        self.last = pooling == "last"

    def forward(self, texts: TextBatch) -> Encoded:
        states = self.states(texts)
        encoded: Encoded = self.joint(states, texts.mask)
        if not self.last:
            return encoded
        last = self.joint.finish(states_at_end(states, texts.mask))
        return Encoded(encoded.fragments, encoded.mask, last)


@text_encoders.register("bigru")
class BiGRUEncoder(RecurrentEncoder):
    """Bidirectional GRU; the directions are averaged per word, then pooled (or not)."""

    bidirectional = True

    def __init__(
        self,
        text: TextProcessor,
        embed_size: int,
        *,
        word_dim: int = 300,
        layers: int = 1,
        dropout: float = 0.0,
        pooling: Pooling = "gpo",
        normalize: bool = True,
        absolute: bool = False,
        glove: str = "",
        frozen: bool = False,
        word_init: WordInit = "uniform",
    ) -> None:
        joint = JointSpace(embed_size, pooling, normalize, absolute)
        super().__init__(
            text, embed_size, joint, word_dim, layers, dropout, glove, frozen, word_init
        )

    def forward(self, texts: TextBatch) -> Encoded:
        forward, backward = self.states(texts).chunk(2, dim=-1)
        encoded: Encoded = self.joint((forward + backward) / 2, texts.mask)
        return encoded
