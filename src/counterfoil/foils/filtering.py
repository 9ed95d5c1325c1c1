"""Which synthetic captions become negatives: false negatives out, then the hardest ones.

A sentence is taken to be true of an image, and dropped, if all the tokens that were put in occur in
the image's own captions (TAGS §2.1); so are copies of the caption and duplicates. The public code
only lowers the scores of copies and duplicates, so that they may still be chosen:
``form="reference"``.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from counterfoil.errors import ConfigError

Form = Literal["paper", "reference"]
NONE = -1
_IDENTICAL, _DUPLICATED = 3.0, 2.0


def select_foils(
    candidates: Tensor,
    captions: Tensor,
    scores: Tensor,
    own: Tensor,
    most: int,
    form: Form = "paper",
) -> Tensor:
    """Indices of the ``most`` highest-scoring candidates that are kept, −1 where there are fewer.

    ``candidates`` [B, N, W] were made from ``captions`` [B, W] and score ``scores`` [B, N] with
    their images, whose own captions have the tokens ``own`` [B, T], padded with −1. The result is
    [B, most], best first; of equal scores the earlier candidate wins.
    """
    if most < 1:
        raise ConfigError(f"foils: expected at least 1 to select, got {most}")
    if form == "reference":
        kept = torch.ones_like(scores, dtype=torch.bool)
        scores = penalised_scores(candidates, captions, scores)
    elif form == "paper":
        kept = is_new(candidates, captions, own) & is_best_copy(candidates, scores)
    else:
        raise ConfigError(f"foils: unknown form '{form}' of the filter (known: paper, reference)")
    ranked = scores.masked_fill(~kept, float("-inf"))
    order = ranked.argsort(dim=1, descending=True, stable=True)[:, :most]
    selected = order.masked_fill(~kept.gather(1, order), NONE)
    return torch.nn.functional.pad(selected, (0, most - selected.shape[1]), value=NONE)


def is_new(candidates: Tensor, captions: Tensor, own: Tensor) -> Tensor:
    """Whether a candidate brings in a token that none of the image's captions has [B, N]."""
    replaced = candidates != captions[:, None]
    return (replaced & ~_is_among(candidates, own)).any(-1)


def _is_among(tokens: Tensor, own: Tensor) -> Tensor:
    """Of each token [B, …], whether it is among its row of ``own`` [B, T]."""
    known = torch.nn.functional.pad(own, (0, 1), value=NONE).sort(dim=1).values
    flat = tokens.flatten(1).contiguous()
    place = torch.searchsorted(known, flat).clamp_(max=known.shape[1] - 1)
    return (known.gather(1, place) == flat).view_as(tokens)


def is_best_copy(candidates: Tensor, scores: Tensor) -> Tensor:
    """One of each set of equal candidates [B, N]: the best score, then the earliest."""
    order = scores.argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(dim=1)
    group = _groups(candidates)
    first = torch.full_like(rank.view(-1), rank.shape[1])
    first.scatter_reduce_(0, group.view(-1), rank.view(-1), "amin")
    return rank == first[group]


def penalised_scores(
    candidates: Tensor,
    captions: Tensor,
    scores: Tensor,
    identical: float = _IDENTICAL,
    duplicated: float = _DUPLICATED,
) -> Tensor:
    """Scores lowered for copies of the caption and for candidates that come again later on."""
    group = _groups(candidates)
    place = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    last = torch.full_like(group.view(-1), NONE)
    last.scatter_reduce_(0, group.view(-1), place.reshape(-1), "amax")
    is_copy = (candidates == captions[:, None]).all(-1)
    return scores - identical * is_copy - duplicated * (place != last[group])


def _groups(candidates: Tensor) -> Tensor:
    """A number for each candidate [B, N], the same for equal ones of one caption and for no others.

    There are at most B·N of them, so they index a vector of that size.
    """
    batch, count, _ = candidates.shape
    image = torch.arange(batch, device=candidates.device).view(-1, 1, 1).expand(-1, count, 1)
    rows = torch.cat([image, candidates], dim=2).flatten(0, 1)
    if not len(rows):
        return rows.new_zeros(batch, count)
    return torch.unique(rows, dim=0, return_inverse=True)[1].view(batch, count)
