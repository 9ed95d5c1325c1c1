"""Caption generation (VSRN, Li et al. 2019): regions must also tell the words of their caption."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from counterfoil.core.distributed import gather_counts, sum_over_processes
from counterfoil.core.errors import ConfigError
from counterfoil.data.batches.collate import PairBatch
from counterfoil.encoders.encoded import Encoded
from counterfoil.encoders.texts import run_rnn
from counterfoil.objectives.base import Context, LossReport, Objective, objectives
from counterfoil.objectives.services import RunSetup


class AdditiveAttention(nn.Module):
    """Regions weighed by a two-layer score of region state and decoder state."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.of_regions = nn.Linear(hidden, hidden)
        self.of_state = nn.Linear(hidden, hidden, bias=False)
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(self, regions: Tensor, keys: Tensor, mask: Tensor, state: Tensor) -> Tensor:
        """Context [B, H] of a state; ``keys`` are ``of_regions(regions)``, the same each step."""
        scores = self.score(torch.tanh(keys + self.of_state(state)[:, None])).squeeze(-1)
        weights = scores.masked_fill(~mask, -1e4).softmax(1).masked_fill(~mask, 0.0)
        return torch.einsum("bn,bnh->bh", weights, regions)


class CaptionGenerator(nn.Module):
    """A GRU reads the regions; another, attending to them, writes the caption word by word."""

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
        """Decoder states [B, W, H], each after one more of the words ``ids`` [B, W] was given.

        Caption ``k`` is of image ``of_image[k]``; an image is read once for all its captions.
        """
        entered = self.dropout(self.enter(regions.to(self.enter.weight.dtype)))
        read = run_rnn(self.reader, entered, mask)
        last = mask.sum(1).clamp(min=1) - 1
        state = read[torch.arange(len(last), device=last.device), last][of_image]
        keys, read, mask = self.attention.of_regions(read)[of_image], read[of_image], mask[of_image]
        states = []
        for words in self.embed(ids).unbind(1):  # one step a word; all captions at once
            context = self.attention(read, keys, mask, state)
            state = self.writer(self.dropout(torch.cat([words, context], dim=1)), state)
            states.append(state)
        return torch.stack(states, dim=1)


@objectives.register("captioning")
class Captioning(Objective):
    """Negative log-likelihood of each caption, generated from its image's regions (VSRN).

    A sum over words and a mean over captions, teacher-forced; to be added to a matching objective:
    ``{hardest: 1, captioning: 1}``. The generator serves training only. Words are the token ids of
    the batch, so that where words are disturbed, the disturbed caption is what is told; tokens
    beyond ``max_len`` are not told.
    """

    requires = "the regions of the images and the words of their captions"
    needs = "both"

    def __init__(
        self, *, hidden: int = 512, word_dim: int = 300, dropout: float = 0.2, max_len: int = 60
    ) -> None:
        super().__init__()
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
        costs = self.costs(images, images_of_captions(batch), ids, real)
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
        told = real[:, 1:]
        return F.cross_entropy(self.generator.out(states[told]), ids[:, 1:][told], reduction="none")


def images_of_captions(batch: PairBatch) -> Tensor:
    """The row of each caption's image; in a batch of pairs, however often repeated, its own."""
    if len(batch.image_ids) == len(batch.owners):
        return torch.arange(len(batch.owners), device=batch.owners.device)
    return (batch.owners[:, None] == batch.image_ids[None, :]).int().argmax(1)
