"""Images and texts changed at their most important places: exchanged with others, or masked."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from counterfoil.data.batches import ImageBatch, TextBatch
from counterfoil.data.texts import HuggingFaceText, TextProcessor, WordText
from counterfoil.data.vocabulary import END, MASK, PAD, START
from counterfoil.errors import ConfigError


@dataclass(frozen=True)
class Ranking:
    """The places [B, N] of each item, most important first, and how many of them count [B].

    What does not count (padding, special tokens) stands last.
    """

    order: Tensor
    size: Tensor

    @staticmethod
    def of(importance: Tensor, usable: Tensor) -> Ranking:
        ranked = importance.masked_fill(~usable, -torch.inf)
        return Ranking(ranked.argsort(dim=1, descending=True, stable=True), usable.sum(1))

    def top(self, count: Tensor) -> tuple[Tensor, Tensor]:
        """Items and places of the first ``count`` [B] of each item, item by item, best first."""
        places = torch.arange(self.order.shape[1], device=self.order.device)
        item, rank = (places < count[:, None]).nonzero(as_tuple=True)
        return item, self.order[item, rank]


def share(size: Tensor, rate: float) -> Tensor:
    """``rate`` of ``size`` rounded down, but at least 1."""
    return (size.double() * rate + 1e-9).long().clamp(min=1).minimum(size)


def exchange_images(
    own: ImageBatch, other: ImageBatch, mine: Ranking, theirs: Ranking, rate: float
) -> ImageBatch:
    """The top regions of each image replaced by the top ones of another, rank by rank."""
    count = share(mine.size, rate).minimum(theirs.size)
    to, source = mine.top(count), theirs.top(count)
    fragments = own.fragments.index_put(to, other.fragments[source])
    boxes = own.boxes
    if boxes is not None and other.boxes is not None:
        boxes = boxes.index_put(to, other.boxes[source])
    return replace(own, fragments=fragments, boxes=boxes)


def exchange_texts(
    own: TextBatch, other: TextBatch, mine: Ranking, theirs: Ranking, rate: float
) -> TextBatch:
    """The top words of each text replaced by the top ones of another, rank by rank."""
    count = share(mine.size, rate).minimum(theirs.size)
    return replace(own, ids=own.ids.index_put(mine.top(count), other.ids[theirs.top(count)]))


def mask_images(images: ImageBatch, ranking: Ranking, rate: float) -> ImageBatch:
    """The top regions of each image replaced by the mean of the rest; one region always stays."""
    chosen = ranking.top(share(ranking.size, rate).minimum(ranking.size - 1))
    rest = images.mask.clone()
    rest[chosen] = False
    total = (images.fragments * rest[..., None]).sum(1)
    mean = total / rest.sum(1, keepdim=True).clamp(min=1)
    return replace(images, fragments=images.fragments.index_put(chosen, mean[chosen[0]]))


def mask_texts(texts: TextBatch, ranking: Ranking, rate: float, token: int) -> TextBatch:
    """The top words of each text, at least one, replaced by the mask token."""
    chosen = ranking.top(share(ranking.size, rate))
    return replace(texts, ids=texts.ids.index_put(chosen, texts.ids.new_tensor(token)))


@dataclass(frozen=True)
class Tokens:
    """The token that hides a word, and those that are no words: padding, start and end."""

    mask: int
    special: tuple[int, ...]

    @staticmethod
    def of(text: TextProcessor) -> Tokens:
        if isinstance(text, WordText):
            index = text.vocabulary.index
            return Tokens(index[MASK], (index[PAD], index[START], index[END]))
        if isinstance(text, HuggingFaceText):
            known = text.tokenizer
            words = {known.unk_token_id, known.mask_token_id}
            hidden = known.mask_token_id if known.mask_token_id is not None else known.unk_token_id
            if hidden is not None:
                return Tokens(int(hidden), tuple(sorted(set(known.all_special_ids) - words)))
        raise ConfigError(
            "objective 'cfm' hides words behind a mask token, and the tokenizer of this model has "
            "none: use one that has, or another objective"
        )

    def words(self, texts: TextBatch) -> Tensor:
        """True [B, W] where a token is a word."""
        special = torch.tensor(self.special, device=texts.ids.device)
        return texts.mask & ~torch.isin(texts.ids, special)
