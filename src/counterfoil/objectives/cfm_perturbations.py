"""CFM's perturbations: importance of regions and words by gradients, exchange and masking."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from counterfoil.core.distributed import gather_counts, gather_rows, world_size
from counterfoil.core.errors import ConfigError, TrainingError
from counterfoil.data.batches.collate import ImageBatch, TextBatch
from counterfoil.data.text.tokenizers import HuggingFaceText, TextProcessor, WordText
from counterfoil.data.text.vocabulary import END, MASK, PAD, START
from counterfoil.encoders.encoded import Encoded
from counterfoil.matchers.ensemble import EnsembleEncoder
from counterfoil.objectives.base import at_least_float32
from counterfoil.objectives.services import BatchServices

B = TypeVar("B", ImageBatch, TextBatch)


def gather_images(images: ImageBatch) -> ImageBatch:
    """The images of all processes, before encoding."""
    if world_size() == 1:
        return images
    missing = _missing(images.mask)
    fragments = gather_rows(pad(images.fragments, (0, 0, 0, missing)))
    mask, boxes = gather_rows(pad(images.mask, (0, missing))), images.boxes
    if boxes is not None:
        boxes = gather_rows(pad(boxes, (0, 0, 0, missing)))
    return ImageBatch(fragments, mask, boxes)


def gather_texts(texts: TextBatch) -> TextBatch:
    """The texts of all processes, before encoding; the mask tells padding, whatever its ids."""
    if world_size() == 1:
        return texts
    missing = _missing(texts.mask)
    ids, mask = (gather_rows(pad(x, (0, missing))) for x in (texts.ids, texts.mask))
    graph = texts.graph
    if graph is not None:
        graph = gather_rows(pad(graph, (0, missing, 0, missing)))
    return TextBatch(ids, mask, graph)


def _missing(mask: Tensor) -> int:
    """Padding that this process lacks to be as long as the longest of all."""
    return max(gather_counts(mask.shape[1], mask.device)) - mask.shape[1]


@dataclass(frozen=True)
class Ranking:
    """Positions [B, N] of each item, most important first, and how many are usable [B].

    Unusable positions (padding, special tokens) are last.
    """

    order: Tensor
    size: Tensor

    @staticmethod
    def of(importance: Tensor, usable: Tensor) -> Ranking:
        ranked = importance.masked_fill(~usable, -torch.inf)
        return Ranking(ranked.argsort(dim=1, descending=True, stable=True), usable.sum(1))

    def top(self, count: Tensor) -> tuple[Tensor, Tensor]:
        """Indices (item, position) of the ``count`` [B] most important positions of each item."""
        ranks = torch.arange(self.order.shape[1], device=self.order.device)
        item, rank = (ranks < count[:, None]).nonzero(as_tuple=True)
        return item, self.order[item, rank]


def share(size: Tensor, rate: float) -> Tensor:
    """``rate`` times ``size``, rounded down, but at least 1."""
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
    top = ranking.top(share(ranking.size, rate).minimum(ranking.size - 1))
    rest = images.mask.clone()
    rest[top] = False
    total = (images.fragments * rest[..., None]).sum(1)
    mean = total / rest.sum(1, keepdim=True).clamp(min=1)
    return replace(images, fragments=images.fragments.index_put(top, mean[top[0]]))


def mask_texts(texts: TextBatch, ranking: Ranking, rate: float, token: int) -> TextBatch:
    """The top words of each text, at least one, replaced by the mask token."""
    top = ranking.top(share(ranking.size, rate))
    return replace(texts, ids=texts.ids.index_put(top, texts.ids.new_tensor(token)))


@dataclass(frozen=True)
class Tokens:
    """The mask token, and the special tokens that are not words: padding, start and end."""

    mask: int
    special: tuple[int, ...]

    @staticmethod
    def of(text: TextProcessor) -> Tokens:
        if isinstance(text, WordText):
            index = text.vocabulary.index
            return Tokens(index[MASK], (index[PAD], index[START], index[END]))
        if isinstance(text, HuggingFaceText):
            tokenizer = text.tokenizer
            unknown, mask = tokenizer.unk_token_id, tokenizer.mask_token_id
            token = mask if mask is not None else unknown
            if token is not None:
                special = set(tokenizer.all_special_ids) - {unknown, mask}
                return Tokens(int(token), tuple(sorted(special)))
        raise ConfigError(
            "objective 'cfm' needs a mask token, and the tokenizer of this model has none: use a "
            "tokenizer with one, or another objective"
        )

    def words(self, texts: TextBatch) -> Tensor:
        """Mask [B, W] of the tokens that are words."""
        special = torch.tensor(self.special, device=texts.ids.device)
        return texts.mask & ~torch.isin(texts.ids, special)


class Side(Generic[B]):
    """The candidates of one direction of retrieval, with anchors on the other side.

    Candidates are rows of the global batch, anchors those of this process's share. Scores are
    gathered from all processes in order; all other tensors are this process's own. ``exchanged``
    and ``masked`` are the shares of a candidate's positions that are changed.
    """

    def __init__(
        self, services: BatchServices, tokens: Tokens, exchanged: float, masked: float
    ) -> None:
        self.services, self.tokens = services, tokens
        self.exchanged, self.masked = exchanged, masked

    def take(self, rows: Tensor) -> B:
        """The candidates ``rows`` of the global batch, before encoding."""
        raise NotImplementedError

    def score(self, candidates: B, anchors: Tensor, detached: bool = False) -> Tensor:
        """Score of each candidate, newly encoded, with its anchor from the encoded batch."""
        raise NotImplementedError

    def gradients(self, candidates: B, anchors: Tensor, signs: Tensor) -> Tensor:
        """Gradient norm [n, N] of the signed sum of scores at each position of each candidate."""
        raise NotImplementedError

    def rank(self, candidates: B, importance: Tensor) -> Ranking:
        raise NotImplementedError

    def exchange(self, own: B, other: B, mine: Ranking, theirs: Ranking) -> B:
        raise NotImplementedError

    def mask(self, candidates: B, ranking: Ranking) -> B:
        raise NotImplementedError

    def rankings(self, positive: Tensor, negative: Tensor, anchors: Tensor) -> list[Ranking]:
        """Rankings of positives and negatives, by the gradient of their difference of scores."""
        rows = torch.cat([positive, negative])
        signs = torch.ones(len(rows), device=rows.device)
        signs[len(positive) :] = -1
        importance = self.gradients(self.take(rows), anchors.repeat(2), gather_rows(signs))
        halves = zip((positive, negative), importance.chunk(2), strict=True)
        return [self.rank(self.take(rows), half) for rows, half in halves]


class ImageSide(Side[ImageBatch]):
    """Images as candidates of texts."""

    @cached_property
    def images(self) -> ImageBatch:
        return gather_images(self.services.batch.images)

    def take(self, rows: Tensor) -> ImageBatch:
        images = self.images
        boxes = images.boxes[rows] if images.boxes is not None else None
        return ImageBatch(images.fragments[rows], images.mask[rows], boxes)

    def score(self, candidates: ImageBatch, anchors: Tensor, detached: bool = False) -> Tensor:
        texts = self.services.texts[anchors]
        texts = without_gradient(texts) if detached else texts
        return self.services.paired(self.services.encode_images(candidates), texts)

    def gradients(self, candidates: ImageBatch, anchors: Tensor, signs: Tensor) -> Tensor:
        fragments = candidates.fragments.detach().clone().requires_grad_()
        leaves = replace(candidates, fragments=fragments)
        scores = self.score(leaves, anchors, detached=True)
        return gradient_norm((signs * scores).sum(), [fragments])

    def rank(self, candidates: ImageBatch, importance: Tensor) -> Ranking:
        return Ranking.of(importance, candidates.mask)

    def exchange(
        self, own: ImageBatch, other: ImageBatch, mine: Ranking, theirs: Ranking
    ) -> ImageBatch:
        return exchange_images(own, other, mine, theirs, self.exchanged)

    def mask(self, candidates: ImageBatch, ranking: Ranking) -> ImageBatch:
        return mask_images(candidates, ranking, self.masked)


class TextSide(Side[TextBatch]):
    """Texts as candidates of images; special tokens are neither ranked nor changed."""

    @cached_property
    def texts(self) -> TextBatch:
        return gather_texts(self.services.batch.texts)

    def take(self, rows: Tensor) -> TextBatch:
        texts = self.texts
        graph = texts.graph[rows] if texts.graph is not None else None
        return TextBatch(texts.ids[rows], texts.mask[rows], graph)

    def score(self, candidates: TextBatch, anchors: Tensor, detached: bool = False) -> Tensor:
        images = self.services.images[anchors]
        images = without_gradient(images) if detached else images
        return self.services.paired(images, self.services.encode_texts(candidates))

    def gradients(self, candidates: TextBatch, anchors: Tensor, signs: Tensor) -> Tensor:
        with word_vector_leaves(self.services.text_encoder) as vectors:
            scores = self.score(candidates, anchors, detached=True)
        if not vectors:
            raise TrainingError(
                "objective 'cfm' needs gradients inside the text encoder: set train.compile=false"
            )
        tables = len(word_tables(self.services.text_encoder))
        return gradient_norm((signs * scores).sum(), vectors, tables)

    def rank(self, candidates: TextBatch, importance: Tensor) -> Ranking:
        return Ranking.of(importance, self.tokens.words(candidates))

    def exchange(
        self, own: TextBatch, other: TextBatch, mine: Ranking, theirs: Ranking
    ) -> TextBatch:
        return exchange_texts(own, other, mine, theirs, self.exchanged)

    def mask(self, candidates: TextBatch, ranking: Ranking) -> TextBatch:
        return mask_texts(candidates, ranking, self.masked, self.tokens.mask)


def gradient_norm(score: Tensor, inputs: list[Tensor], members: int = 1) -> Tensor:
    """L2 norm [B, N] of the gradient with respect to inputs [B, N, D], taken together.

    Of several ``members``, each has an input in turn. More inputs than members are chunks of the
    batch, one after the other.
    """
    grads = [at_least_float32(grad) for grad in torch.autograd.grad(score, inputs)]
    whole = [torch.cat(grads[member::members]) for member in range(members)]
    return torch.linalg.vector_norm(torch.cat(whole, dim=-1), dim=-1)


def without_gradient(encoded: Encoded) -> Encoded:
    fragments, pooled = encoded.fragments, encoded.pooled
    return replace(
        encoded,
        fragments=fragments.detach() if fragments is not None else None,
        pooled=pooled.detach() if pooled is not None else None,
    )


@contextmanager
def word_vector_leaves(encoder: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the word vectors that the encoder looks up, as leaf tensors, one per occurrence.

    They are detached from the embedding table, so that it may be frozen.
    """
    leaves: list[Tensor] = []

    def detach(table: nn.Module, args: Any, vectors: Tensor) -> Tensor:
        leaves.append(vectors.detach().requires_grad_())
        return leaves[-1]

    handles = [table.register_forward_hook(detach) for table in word_tables(encoder)]
    try:
        yield leaves
    finally:
        for handle in handles:
            handle.remove()


def word_tables(encoder: nn.Module) -> list[nn.Module]:
    """The embedding table of a text encoder, or of each member of an ensemble."""
    if isinstance(encoder, EnsembleEncoder):
        return [table for member in encoder.members for table in word_tables(member)]
    table = getattr(encoder, "word_table", None)
    if not isinstance(table, nn.Module):
        raise ConfigError(
            "CFM, and effects by gradients, need the word vectors of the text encoder; "
            f"{type(encoder).__name__} has no attribute word_table"
        )
    return [table]
