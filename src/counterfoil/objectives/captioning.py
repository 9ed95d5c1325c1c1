"""Caption generation from regions, as an auxiliary loss (VSRN, Li et al. 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from counterfoil.core.distributed import gather_counts, sum_over_processes
from counterfoil.core.errors import ConfigError
from counterfoil.encoders.encoded import Encoded
from counterfoil.encoders.texts import run_rnn
from counterfoil.objectives.base import Context, LossReport, Objective, objectives
from counterfoil.objectives.foils import pair_images
from counterfoil.objectives.services import RunSetup


class AdditiveAttention(nn.Module):
    """Attention to regions by a two-layer score of region state and decoder state."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.of_regions = nn.Linear(hidden, hidden)
        self.of_state = nn.Linear(hidden, hidden, bias=False)
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(self, regions: Tensor, keys: Tensor, mask: Tensor, state: Tensor) -> Tensor:
        """Context [B, H] of a state; ``keys`` are ``of_regions(regions)``, equal in each step."""
        scores = self.score(torch.tanh(keys + self.of_state(state)[:, None])).squeeze(-1)
        weights = scores.masked_fill(~mask, -1e4).softmax(1).masked_fill(~mask, 0.0)
        return torch.einsum("bn,bnh->bh", weights, regions)


class CaptionGenerator(nn.Module):
    """A GRU encodes the regions; another attends to them and generates the caption."""

    def __init__(
        self, regions: int, vocabulary: int, hidden: int, word_dim: int, dropout: float
    ) -> None:
        super().__init__()
        self.width = regions
        self.enter = nn.Linear(regions, hidden)
        self.reader = nn.GRU(hidden, hidden, batch_first=True)
        self.embed = nn.Embedding(vocabulary, word_dim)
        self.attention = AdditiveAttention(hidden)
        self.writer = nn.GRUCell(word_dim + hidden, hidden)
        self.out = nn.Linear(hidden, vocabulary)
        nn.init.xavier_normal_(self.out.weight)
        self.dropout = nn.Dropout(dropout)

    def forward(self, regions: Tensor, mask: Tensor, of_image: Tensor, ids: Tensor) -> Tensor:
        """Decoder states [B, W, H] after each of the words ``ids`` [B, W] (teacher forcing).

        Caption ``k`` belongs to image ``of_image[k]``; an image is encoded once for all captions.
        """
        inputs = self.dropout(self.enter(regions.to(self.enter.weight.dtype)))
        encoded = run_rnn(self.reader, inputs, mask)
        last = mask.sum(1).clamp(min=1) - 1
        state = encoded[torch.arange(len(last), device=last.device), last][of_image]
        keys = self.attention.of_regions(encoded)[of_image]
        encoded, mask = encoded[of_image], mask[of_image]
        states = []
        for words in self.embed(ids).unbind(1):  # one step per word, for all captions at once
            context = self.attention(encoded, keys, mask, state)
            state = self.writer(self.dropout(torch.cat([words, context], dim=1)), state)
            states.append(state)
        return torch.stack(states, dim=1)


@objectives.register("captioning")
class Captioning(Objective):
    """Negative log-likelihood of each caption, generated from its image's regions (VSRN).

    Sum over words and mean over captions, with teacher forcing. Add it to a matching objective:
    ``{hardest: 1, captioning: 1}``. The generator is used in training only. Its targets are the
    token ids of the batch, after any augmentation of words, up to ``max_len`` tokens.
    """

    requires = "the regions of the images and the words of their captions"
    needs = "both"

    def __init__(
        self, *, hidden: int = 512, word_dim: int = 300, dropout: float = 0.2, max_len: int = 60
    ) -> None:
        super().__init__()
        self._require_positive(hidden=hidden, word_dim=word_dim, max_len=max_len)
        self.hidden, self.word_dim, self.dropout, self.max_len = hidden, word_dim, dropout, max_len
        self.generator: CaptionGenerator | None = None

    def prepare(self, training: RunSetup) -> None:
        self.generator = CaptionGenerator(
            training.embed_size, len(training.text), self.hidden, self.word_dim, self.dropout
        )

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        assert context.services is not None  # noqa: S101 - training sets it
        batch, images = context.services.batch, context.services.images
        ids, real = batch.texts.ids[:, : self.max_len], batch.texts.mask[:, : self.max_len]
        costs = self.costs(images, pair_images(batch), ids, real)
        total = sum_over_processes(costs.sum())
        captions = sum(gather_counts(len(ids), ids.device))
        if not context.logging:
            return LossReport(total / captions)
        words = sum(gather_counts(len(costs), ids.device))
        perplexity = (total.detach() / max(1, words)).exp()
        return LossReport(total / captions, {"captioning/perplexity": perplexity})

    def costs(self, images: Encoded, of_image: Tensor, ids: Tensor, real: Tensor) -> Tensor:
        """Negative log-likelihood of every real word after the first of each caption."""
        assert self.generator is not None  # noqa: S101 - training calls 'prepare' first
        regions = images.fragments
        if regions is None or regions.shape[-1] != self.generator.width:
            raise ConfigError(
                "objective.captioning: it reads the regions of one image encoder, of "
                f"{self.generator.width} numbers each; use it with model.ensemble_size=1"
            )
        if ids.shape[1] < 2:
            return regions.flatten()[:0]
        states = self.generator(regions, images.mask, of_image, ids[:, :-1])
        mask, targets = real[:, 1:], ids[:, 1:]
        return F.cross_entropy(self.generator.out(states[mask]), targets[mask], reduction="none")
