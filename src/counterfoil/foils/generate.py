"""Captions masked, refilled given their images, filtered, the hardest kept (TAGS §2.1).

The model comes in as two callables, so that any masked language model that sees images will do.
Everything is batched over captions, versions and samples; only masks are drawn caption by caption.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from counterfoil.errors import ConfigError
from counterfoil.foils.filtering import NONE, is_best_copy, is_new, select_foils
from counterfoil.foils.masking import RATE, UNMASKED, MaskTokens, Places, mask_versions

Filler = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Logits [P, V] of P asked tokens: of captions [n], masked ids [n, W], which are asked [n, W]."""

Scorer = Callable[[Tensor, Tensor], Tensor]
"""Scores [n] of sentences [n, W] with the images of captions [n]."""


@dataclass(frozen=True)
class MaskedCaptions:
    """K versions of B captions: ids [B, K, W], and the true token where one is asked, else −1."""

    ids: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> MaskedCaptions:
        return MaskedCaptions(self.ids.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Foils:
    """The selected foils [B, m, W], best first, where ``real`` [B, m], with their ``scores``.

    ``labels`` [B, m, W] are the true token where the generator had a mask, else −1.
    """

    ids: Tensor
    labels: Tensor
    scores: Tensor
    real: Tensor


def mask_captions(
    captions: Tensor,
    units: Sequence[Sequence[Places]],
    versions: int,
    tokens: MaskTokens,
    rng: np.random.Generator,
    rates: Sequence[float] | None = None,
) -> MaskedCaptions:
    """Masked versions of captions [B, W] by the units of each; one without any stays as it is.

    ``rates`` are those of each caption; the usual one if there are none.
    """
    true = captions.cpu().numpy()
    ids = np.repeat(true[:, None], versions, axis=1)
    labels = np.full_like(ids, UNMASKED)
    for row, places in enumerate(units):
        if places:
            rate = RATE if rates is None else rates[row]
            masked = mask_versions(true[row], places, versions, tokens, rng, rate)
            ids[row], labels[row] = masked.ids, masked.labels
    device = captions.device
    return MaskedCaptions(torch.from_numpy(ids).to(device), torch.from_numpy(labels).to(device))


def refill(
    masked: MaskedCaptions, fill: Filler, ordinary: Tensor, samples: int, temperature: float
) -> Tensor:
    """Candidates [B, K·L, W]: each asked token of each version drawn L times from the filler.

    Only ``ordinary`` tokens are drawn. Candidate ``k·L + l`` is sample ``l`` of version ``k``.
    """
    if not 0 < temperature < math.inf:
        raise ConfigError(f"foils: the temperature must be above 0, got {temperature}")
    batch, versions, length = masked.ids.shape
    ids, asked = masked.ids.flatten(0, 1), masked.labels.flatten(0, 1) != UNMASKED
    rows = torch.arange(batch, device=ids.device).repeat_interleave(versions)
    candidates = ids[:, None].repeat(1, samples, 1)  # [B·K, L, W]
    if asked.any():
        logits = fill(rows, ids, asked).float()
        chances = (logits[:, ordinary] / temperature).softmax(-1)
        drawn = ordinary[torch.multinomial(chances, samples, replacement=True)]  # [P, L]
        row, place = asked.nonzero(as_tuple=True)
        candidates[row, :, place] = drawn
    return candidates.view(batch, versions * samples, length)


def own_tokens(captions: Iterable[Iterable[int]], device: torch.device) -> Tensor:
    """Token sets [B, T] of the captions of B images, each given as one run of ids; padded by −1."""
    sets = [sorted(set(ids)) for ids in captions]
    own = torch.full((len(sets), max(map(len, sets), default=0)), NONE)
    for row, found in enumerate(sets):
        own[row, : len(found)] = torch.tensor(found, dtype=torch.long)
    return own.to(device)


def hardest_foils(
    captions: Tensor,
    masked: MaskedCaptions,
    candidates: Tensor,
    own: Tensor,
    score: Scorer,
    most: int,
) -> Foils:
    """The ``most`` best-scoring candidates that are no false negatives, copies or duplicates.

    Only what can be selected is scored.
    """
    useful = is_new(candidates, captions, own)
    useful &= is_best_copy(candidates, torch.zeros_like(useful, dtype=torch.float))
    scores = torch.full(useful.shape, -torch.inf, device=captions.device)
    if useful.any():
        scores[useful] = score(useful.nonzero()[:, 0], candidates[useful]).float()
    selected = select_foils(candidates, captions, scores, own, most)
    real = selected != NONE
    index = selected.clamp(min=0)
    length = captions.shape[1]
    wide = index[..., None].expand(-1, -1, length)
    samples = candidates.shape[1] // masked.labels.shape[1]
    version = (index // samples)[..., None].expand(-1, -1, length)
    return Foils(
        candidates.gather(1, wide),
        masked.labels.gather(1, version),
        scores.gather(1, index),
        real,
    )
