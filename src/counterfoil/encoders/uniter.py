"""UNITER's embeddings: regions with their boxes, tokens with their positions (Chen et al. 2020).

They are not contextual: the matcher's transformer reads the words and regions of each pair.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from counterfoil.core.errors import CheckpointError, ConfigError, DataError
from counterfoil.core.registry import refuse_unused
from counterfoil.data.batches.collate import ImageBatch, TextBatch
from counterfoil.data.text.tokenizers import HuggingFaceText, TextProcessor
from counterfoil.encoders.encoded import Encoded
from counterfoil.encoders.images import ImageEncoder, image_encoders
from counterfoil.encoders.texts import text_encoders
from counterfoil.encoders.transformer import EPS, SPREAD, Bert, initialize

BOX_NUMBERS = 7


def box_numbers(boxes: Tensor) -> Tensor:
    """x1, y1, x2, y2, width, height, area [..., 7] of boxes in 0…1."""
    size = boxes[..., 2:] - boxes[..., :2]
    return torch.cat([boxes, size, size.prod(-1, keepdim=True)], dim=-1)


@image_encoders.register("uniter")
class RegionEmbedder(ImageEncoder):
    """UNITER: feature and box of a region, each projected and normalized, then summed.

    ``boxes="none"`` uses zeros, for data without boxes.
    """

    def __init__(
        self,
        input_dim: int,
        embed_size: int,
        *,
        boxes: Literal["given", "none"] = "given",
        dropout: float = 0.1,
    ) -> None:
        super().__init__(input_dim, embed_size, "none", normalize=False, absolute=False)
        self.boxes = boxes
        self.feature = nn.Linear(input_dim, embed_size)
        self.feature_norm = nn.LayerNorm(embed_size, eps=EPS)
        self.place = nn.Linear(BOX_NUMBERS, embed_size)
        self.place_norm = nn.LayerNorm(embed_size, eps=EPS)
        self.kind = nn.Parameter(SPREAD * torch.randn(embed_size))
        self.norm = nn.LayerNorm(embed_size, eps=EPS)
        self.dropout = nn.Dropout(dropout)
        initialize(self)

    def forward(self, images: ImageBatch) -> Encoded:
        features = self.feature_norm(self.feature(images.fragments))
        boxes = self.place_norm(self.place(self._boxes(images)))
        regions = self.dropout(self.norm(features + boxes + self.kind))
        encoded: Encoded = self.joint(regions, images.mask)
        return encoded

    def _boxes(self, images: ImageBatch) -> Tensor:
        if self.boxes == "none":
            return images.fragments.new_zeros(*images.mask.shape, BOX_NUMBERS)
        if images.boxes is None:
            raise DataError(
                "this model reads the boxes of regions, but these images have none: use features "
                "with boxes, or train with model.image.boxes=none"
            )
        return box_numbers(images.boxes.to(images.fragments.dtype))


@text_encoders.register("uniter")
class TokenEmbedder(nn.Module):
    """UNITER: word, position and type embedding of a token, summed and normalized.

    Tokens beyond ``positions`` share the last position.
    """

    def __init__(
        self, text: TextProcessor, embed_size: int, *, positions: int = 512, dropout: float = 0.1
    ) -> None:
        super().__init__()
        if positions < 1:
            raise ConfigError(f"model.text.positions: at least 1, got {positions}")
        if isinstance(text, HuggingFaceText):
            text.max_length = min(text.max_length, positions)
        self.embed = nn.Embedding(len(text), embed_size)
        self.positions = nn.Embedding(positions, embed_size)
        self.kind = nn.Parameter(SPREAD * torch.randn(embed_size))
        self.norm = nn.LayerNorm(embed_size, eps=EPS)
        self.dropout = nn.Dropout(dropout)
        initialize(self)

    @property
    def word_table(self) -> nn.Embedding:
        """The embedding of token ids; masked-word heads share it."""
        return self.embed

    def forward(self, texts: TextBatch) -> Encoded:
        last = self.positions.num_embeddings - 1
        positions = torch.arange(texts.ids.shape[1], device=texts.ids.device).clamp(max=last)
        tokens = self.embed(texts.ids) + self.positions(positions) + self.kind
        tokens = self.dropout(self.norm(tokens))
        return Encoded(tokens.masked_fill(~texts.mask[..., None], 0.0), texts.mask)


@text_encoders.register("uniter-bert")
class BertTokenEmbedder(TokenEmbedder):
    """UNITER's embeddings loaded from a BERT of `transformers`, with its tokenizer.

    ``model.matcher.pretrained`` loads the layers above; ``weights=False`` starts from random
    weights. Loaded parameters learn at ``train.optimizer.pretrained_lr_factor`` times the rate.
    """

    pretrained: frozenset[str] = frozenset()

    def __init__(
        self,
        text: TextProcessor,
        embed_size: int,
        *,
        pretrained: str = "bert-base-cased",
        weights: bool = True,
        positions: int = 512,
        dropout: float = 0.1,
    ) -> None:
        if weights:
            mode = "weights=true (BERT brings its own)"
            refuse_unused(BertTokenEmbedder, "model.text", mode, positions=positions)
        bert = Bert.load(pretrained, embed_size) if weights else None
        positions = bert.positions if bert is not None else positions
        super().__init__(text, embed_size, positions=positions, dropout=dropout)
        if bert is not None:
            self._fill(bert)

    @property
    def portable_options(self) -> dict[str, Any]:
        """Replacements for options that name files, for a model saved with its weights."""
        return {"weights": False, "positions": self.positions.num_embeddings}

    def _fill(self, bert: Bert) -> None:
        table = bert.state["embeddings.word_embeddings.weight"]
        words = self.embed.num_embeddings
        if len(table) < words:
            raise CheckpointError(
                f"'{bert.name}': {len(table):,} word vectors, but its tokenizer has {words:,} words"
            )
        types = bert.state["embeddings.token_type_embeddings.weight"]
        self.load_state_dict(
            {
                "embed.weight": table[:words],  # some tables are padded to a round number
                "positions.weight": bert.state["embeddings.position_embeddings.weight"],
                "kind": types[0],
                "norm.weight": bert.state["embeddings.LayerNorm.weight"],
                "norm.bias": bert.state["embeddings.LayerNorm.bias"],
            }
        )
        self.pretrained = frozenset(name for name, _ in self.named_parameters())
