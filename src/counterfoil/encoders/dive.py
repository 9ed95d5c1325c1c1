"""DivE's encoders: an image or a text as a small set of vectors (Kim, Kim, Kwak 2023)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from counterfoil.data.batches import ImageBatch, TextBatch
from counterfoil.data.texts import TextProcessor
from counterfoil.encoders.bert import BertEncoder
from counterfoil.encoders.encoded import Encoded
from counterfoil.encoders.images import MLPEncoder, image_encoders
from counterfoil.encoders.joint import JointSpace
from counterfoil.encoders.pooling import MaxPooling
from counterfoil.encoders.slots import Form, SetPrediction
from counterfoil.encoders.texts import RecurrentEncoder, WordInit, run_rnn, text_encoders


@image_encoders.register("dive")
class SetImageEncoder(MLPEncoder):
    """A set per image: slots over fc(x) + MLP(fc(x)), around its maximum over regions (DivE).

    ``form="reference"`` lets padding enter batch statistics and leak into the slots, as the public
    code does.
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
            embed_size,
            embed_size,
            slots=slots,
            depth=depth,
            heads=heads,
            head_dim=head_dim,
            dropout=dropout,
            form=form,
        )

    def forward(self, images: ImageBatch) -> Encoded:
        regions = self.dropout(self.project(images.fragments, images.mask))
        encoded: Encoded = self.set(regions, images.mask, self.pool(regions, images.mask))
        return encoded


@text_encoders.register("dive-gru")
class SetGRUEncoder(RecurrentEncoder):
    """A set per text: slots over the word vectors, around the last states of a BiGRU (DivE).

    ``form="reference"`` counts positions by the padded length and lets padding leak, as the public
    code does.
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
        self.set = SetPrediction(
            embed_size,
            self.embed.embedding_dim,
            slots=slots,
            depth=depth,
            heads=heads,
            head_dim=head_dim,
            dropout=dropout,
            sine=True,
            form=form,
        )

    def forward(self, texts: TextBatch) -> Encoded:
        words = self.dropout(self.embed(texts.ids))
        whole = last_states(run_rnn(self.rnn, words, texts.mask), texts.mask)
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
            embed_size,
            embed_size,
            slots=slots,
            depth=depth,
            heads=heads,
            head_dim=head_dim,
            dropout=dropout,
            sine=True,
            form=form,
        )

    def forward(self, texts: TextBatch) -> Encoded:
        hidden = self.bert.model(
            input_ids=texts.ids, attention_mask=texts.mask.long()
        ).last_hidden_state
        words: Tensor = self.fc(hidden)
        encoded: Encoded = self.set(words, texts.mask, self.pool(words, texts.mask))
        return encoded


def last_states(states: Tensor, mask: Tensor) -> Tensor:
    """Mean [B, H] of what each direction knows after its last word, which is the first backward."""
    forward, backward = states.chunk(2, dim=-1)
    final = mask.sum(1).clamp(min=1) - 1
    at_end = forward[torch.arange(len(final), device=final.device), final]
    return (at_end + backward[:, 0]) / 2
