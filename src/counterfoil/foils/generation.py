"""Model-made foils (TAGS §2.1): captions masked, refilled given their image, filtered, ranked.

Masks are drawn by unit of the scene graph (TAGS) or token by token (UNITER). The model comes in as
two callables, so that any masked language model that sees images will do. Everything is batched
over captions, versions and samples; only masks are drawn caption by caption.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from counterfoil.core.errors import ConfigError
from counterfoil.data.text.tokenizers import HuggingFaceText, TextProcessor, WordText
from counterfoil.data.text.vocabulary import MASK, SPECIALS
from counterfoil.foils.scene_graph import SceneGraph

RATE = 0.15
UNMASKED = -1
_MASKED, _EXCHANGED = 0.8, 0.1  # shares of the chosen tokens; the rest stay as they are

BISECTIONS = 12
"""Halvings of the interval in which a rate is sought; interpolation then does the rest."""

Places = tuple[int, ...]
Ids = NDArray[np.int64]

Form = Literal["paper", "reference"]
NONE = -1
_IDENTICAL, _DUPLICATED = 3.0, 2.0

Filler = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Logits [P, V] of P asked tokens: of captions [n], masked ids [n, W], which are asked [n, W]."""

Scorer = Callable[[Tensor, Tensor], Tensor]
"""Scores [n] of sentences [n, W] with the images of captions [n]."""


@dataclass(frozen=True)
class MaskTokens:
    """What masking may write: the mask, or one of the ``ordinary`` tokens."""

    mask: int
    ordinary: Ids

    @classmethod
    def of(cls, text: TextProcessor) -> MaskTokens:
        """Those of a text processor: every token but the special and the unused ones."""
        if isinstance(text, WordText):
            index = text.vocabulary.index
            special = {index[word] for word in SPECIALS}
            return cls(index[MASK], _all_but(special, len(text)))
        if not isinstance(text, HuggingFaceText) or text.tokenizer.mask_token_id is None:
            raise ConfigError("masking needs a tokenizer that has a mask token")
        tokenizer = text.tokenizer
        special = set(tokenizer.all_special_ids)
        special |= {i for token, i in tokenizer.get_vocab().items() if token.startswith("[unused")}
        return cls(int(tokenizer.mask_token_id), _all_but(special, len(text)))


def _all_but(special: set[int], size: int) -> Ids:
    return np.array([i for i in range(size) if i not in special], dtype=np.int64)


@dataclass(frozen=True)
class Masked:
    """Versions of a caption; ``labels`` has the true token where one was chosen, elsewhere −1."""

    ids: Ids  # [versions, tokens]
    labels: Ids  # [versions, tokens]


def graph_units(graph: SceneGraph, word_of: Sequence[int | None]) -> list[Places]:
    """Token places of each unit of a scene graph; of each single word's token where it has none.

    ``word_of`` is the word behind each token, None for special ones.

    >>> from counterfoil.foils.scene_graph import Unit
    >>> graph_units(SceneGraph.of([Unit((1, 2), "object")]), [None, 0, 1, 1, 2, None])
    [(2, 3, 4)]
    """
    places: dict[int, list[int]] = {}
    for place, word in enumerate(word_of):
        if word is not None:
            places.setdefault(word, []).append(place)
    # Words that the tokenizer cut off have no tokens.
    units = [tuple(p for w in unit.positions for p in places.get(w, ())) for unit in graph.units()]
    return [unit for unit in units if unit] or token_units(word_of)


def token_units(word_of: Sequence[int | None]) -> list[Places]:
    """Each token by itself, special ones left out: plain masking."""
    return [(place,) for place, word in enumerate(word_of) if word is not None]


@dataclass(frozen=True)
class UnitCoverage:
    """How often each of U units covers each of P places; ``chances`` of the units at a rate of 1.

    A place that is in f units has the chance 1/f, so that it is not chosen more often than others;
    a unit has the mean of its places'.
    """

    counts: Ids  # [U, P]
    chances: NDArray[np.float64]  # [U]

    @classmethod
    def of(cls, units: Sequence[Places]) -> UnitCoverage:
        columns = {place: n for n, place in enumerate({p for unit in units for p in unit})}
        counts = np.zeros((len(units), len(columns)), dtype=np.int64)
        for number, unit in enumerate(units):
            for place in unit:
                counts[number, columns[place]] += 1
        chances = (counts / counts.sum(0)).sum(1) / counts.sum(1)
        return cls(counts, chances)

    def expected_tokens(self, rate: float) -> float:
        """Tokens that `mask_versions` chooses on average, in closed form.

        A token is chosen with any unit it is in, or with the unit that is drawn if none was chosen.
        """
        missed = 1 - (rate * self.chances).clip(0, 1)
        chosen = self.counts.shape[1] - np.prod(missed[:, None] ** self.counts, axis=0).sum()
        return float(chosen + np.prod(missed) * self.counts.sum() / len(self.counts))


def unit_chances(units: Sequence[Places], rate: float = RATE) -> NDArray[np.float64]:
    """How likely each unit is chosen: see `UnitCoverage`."""
    return rate * UnitCoverage.of(units).chances


def expected_share(units: Sequence[Places], words: int, rate: float = RATE) -> float:
    """The share of ``words`` tokens that `mask_versions` chooses on average.

    >>> round(expected_share([(0,), (1,)], 4), 3)  # (2 · 0.15 + 0.85²) / 4
    0.256
    """
    return UnitCoverage.of(units).expected_tokens(rate) / words


def sentence_rate(units: Sequence[Places], words: int, share: float = RATE) -> float:
    """The rate with which ``share`` of all ``words`` of a sentence are chosen on average.

    Few units cover a sentence, so it is above the share. The least and the most that units allow
    are taken where the share cannot be reached: one unit at least, and no more than all of them.
    """
    coverage, wanted = UnitCoverage.of(units), share * words
    low, high = 0.0, float(coverage.counts.sum(0).max())
    least, most = coverage.expected_tokens(low), coverage.expected_tokens(high)
    if least >= wanted:
        return low
    if most <= wanted:
        return high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        tokens = coverage.expected_tokens(middle)
        if tokens < wanted:
            low, least = middle, tokens
        else:
            high, most = middle, tokens
    return low + (high - low) * (wanted - least) / (most - least)  # nearly linear in between


def mask_versions(
    ids: Sequence[int],
    units: Sequence[Places],
    versions: int,
    tokens: MaskTokens,
    rng: np.random.Generator,
    rate: float = RATE,
) -> Masked:
    """``versions`` maskings of a caption's ids, each with one unit chosen at least.

    Of the tokens of chosen units 80 % become the mask, 10 % any ordinary token, 10 % stay; all of
    them are to be predicted. A caption with nothing to mask has no version.
    """
    true = np.asarray(ids, dtype=np.int64)
    if not units:
        empty = np.zeros((0, len(true)), dtype=np.int64)
        return Masked(empty, empty.copy())
    chosen = rng.random((versions, len(units))) < unit_chances(units, rate)
    instead = rng.integers(len(units), size=versions)
    none = ~chosen.any(axis=1)
    chosen[none, instead[none]] = True
    belongs = np.zeros((len(units), len(true)), dtype=np.int64)
    for number, unit in enumerate(units):
        belongs[number, list(unit)] = 1
    labeled = chosen @ belongs > 0  # [versions, tokens]
    fate = rng.random(labeled.shape)
    others = tokens.ordinary[rng.integers(len(tokens.ordinary), size=labeled.shape)]
    changed = np.where(fate < _MASKED, tokens.mask, others)
    stays = ~labeled | (fate >= _MASKED + _EXCHANGED)
    return Masked(np.where(stays, true, changed), np.where(labeled, true, UNMASKED))


# A sentence is taken to be true of an image, and dropped, if all the tokens that were put in
# occur in the image's own captions (TAGS §2.1); so are copies of the caption and duplicates. The
# public code only lowers the scores of copies and duplicates, so that they may still be chosen:
# ``form="reference"``.
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
        scores = penalized_scores(candidates, captions, scores)
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


def penalized_scores(
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
