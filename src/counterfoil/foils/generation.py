"""Model-made foils (TAGS §2.1): mask captions, refill them given the image, filter and rank.

Masks are drawn per unit of the scene graph (TAGS) or per token (UNITER). The model is passed as two
callables, so any masked language model that sees images can be used. Everything but the drawing of
masks is batched over captions, versions and samples.
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

from counterfoil.core.errors import ConfigError, TrainingError
from counterfoil.data.text.tokenizers import HuggingFaceText, TextProcessor, WordText
from counterfoil.data.text.vocabulary import MASK, SPECIALS
from counterfoil.foils.scene_graph import SceneGraph

RATE = 0.15
UNMASKED = -1
_MASKED, _EXCHANGED = 0.8, 0.1  # shares of the chosen tokens; the rest stay unchanged

BISECTIONS = 12
"""Bisection steps of the search for a rate; interpolation follows."""

Positions = tuple[int, ...]
Ids = NDArray[np.int64]

Form = Literal["paper", "reference"]
NONE = -1
_IDENTICAL, _DUPLICATED = 3.0, 2.0

Filler = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(captions [n], masked ids [n, W], mask of tokens to predict [n, W]) → logits [P, V]."""

Scorer = Callable[[Tensor, Tensor], Tensor]
"""(captions [n], sentences [n, W]) → scores [n] with the images of the captions."""


@dataclass(frozen=True)
class MaskTokens:
    """Tokens that masking may write: the mask, or one of the ``ordinary`` tokens."""

    mask: int
    ordinary: Ids

    @classmethod
    def of(cls, text: TextProcessor) -> MaskTokens:
        """The mask of a text processor, and its tokens without special and unused ones."""
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
    """Masked versions of a caption; ``labels`` has the true tokens to predict, elsewhere −1."""

    ids: Ids  # [versions, tokens]
    labels: Ids  # [versions, tokens]


def graph_units(graph: SceneGraph, word_of: Sequence[int | None]) -> list[Positions]:
    """Token indices of each unit of a scene graph; single tokens if it has no units.

    ``word_of`` is the word of each token, None for special tokens.

    >>> from counterfoil.foils.scene_graph import Unit
    >>> graph_units(SceneGraph.of([Unit((1, 2), "object")]), [None, 0, 1, 1, 2, None])
    [(2, 3, 4)]
    """
    positions: dict[int, list[int]] = {}
    for index, word in enumerate(word_of):
        if word is not None:
            positions.setdefault(word, []).append(index)
    # Words beyond the tokenizer's maximum length have no tokens.
    units = [
        tuple(p for w in unit.positions for p in positions.get(w, ())) for unit in graph.units()
    ]
    return [unit for unit in units if unit] or token_units(word_of)


def token_units(word_of: Sequence[int | None]) -> list[Positions]:
    """One unit per token, without special tokens: plain masking."""
    return [(index,) for index, word in enumerate(word_of) if word is not None]


@dataclass(frozen=True)
class UnitCoverage:
    """How often each of U units covers each of P tokens; ``chances`` of the units at a rate of 1.

    A token that is in f units has the chance 1/f, so that it is not chosen more often than others.
    The chance of a unit is the mean over its tokens.
    """

    counts: Ids  # [U, P]
    chances: NDArray[np.float64]  # [U]

    @classmethod
    def of(cls, units: Sequence[Positions]) -> UnitCoverage:
        columns = {index: n for n, index in enumerate({p for unit in units for p in unit})}
        counts = np.zeros((len(units), len(columns)), dtype=np.int64)
        for number, unit in enumerate(units):
            for index in unit:
                counts[number, columns[index]] += 1
        chances = (counts / counts.sum(0)).sum(1) / counts.sum(1)
        return cls(counts, chances)

    def expected_tokens(self, rate: float) -> float:
        """Tokens that `mask_versions` chooses on average, in closed form.

        A token is chosen with any of its units, or with the unit that is drawn if none was chosen.
        """
        missed = 1 - (rate * self.chances).clip(0, 1)
        chosen = self.counts.shape[1] - np.prod(missed[:, None] ** self.counts, axis=0).sum()
        return float(chosen + np.prod(missed) * self.counts.sum() / len(self.counts))


def unit_chances(units: Sequence[Positions], rate: float = RATE) -> NDArray[np.float64]:
    """How likely each unit is chosen: see `UnitCoverage`."""
    return rate * UnitCoverage.of(units).chances


def expected_share(units: Sequence[Positions], words: int, rate: float = RATE) -> float:
    """The share of ``words`` tokens that `mask_versions` chooses on average.

    >>> round(expected_share([(0,), (1,)], 4), 3)  # (2 · 0.15 + 0.85²) / 4
    0.256
    """
    return UnitCoverage.of(units).expected_tokens(rate) / words


def sentence_rate(units: Sequence[Positions], words: int, share: float = RATE) -> float:
    """The rate with which ``share`` of all ``words`` of a sentence are chosen on average.

    Units cover few words of a sentence, so the rate is above the share. If the share cannot be
    reached, the rate is the smallest (one unit) or the largest (all units) possible.
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
    units: Sequence[Positions],
    versions: int,
    tokens: MaskTokens,
    rng: np.random.Generator,
    rate: float = RATE,
) -> Masked:
    """``versions`` maskings of a caption's ids, each with at least one unit chosen.

    Of the tokens of chosen units 80 % become the mask, 10 % a random ordinary token, 10 % stay; all
    are to be predicted. A caption without units has no version.
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


# A candidate counts as true, and is dropped, if all its new tokens occur in the image's own
# captions (TAGS §2.1). Copies of the caption and duplicates are dropped, too. The public code only
# lowers their scores, so they may still be chosen: ``form="reference"``.
def select_foils(
    candidates: Tensor,
    captions: Tensor,
    scores: Tensor,
    own: Tensor,
    most: int,
    form: Form = "paper",
) -> Tensor:
    """Indices of the ``most`` highest-scoring eligible candidates; −1 if there are fewer.

    ``candidates`` [B, N, W] were made from ``captions`` [B, W] and score ``scores`` [B, N] with
    their images, whose own captions have the tokens ``own`` [B, T], padded with −1. The result is
    [B, most], best first; of equal scores the earlier candidate wins.
    """
    if most < 1:
        raise ConfigError(f"foils: expected at least 1 to select, got {most}")
    if form == "reference":
        eligible = torch.ones_like(scores, dtype=torch.bool)
        scores = penalized_scores(candidates, captions, scores)
    elif form == "paper":
        eligible = is_new(candidates, captions, own) & is_best_copy(candidates, scores)
    else:
        raise ConfigError(f"foils: unknown form '{form}' of the filter (known: paper, reference)")
    ranked = scores.masked_fill(~eligible, float("-inf"))
    order = ranked.argsort(dim=1, descending=True, stable=True)[:, :most]
    selected = order.masked_fill(~eligible.gather(1, order), NONE)
    return torch.nn.functional.pad(selected, (0, most - selected.shape[1]), value=NONE)


def is_new(candidates: Tensor, captions: Tensor, own: Tensor) -> Tensor:
    """Whether a candidate has a new token that none of the image's captions has [B, N]."""
    replaced = candidates != captions[:, None]
    return (replaced & ~_is_among(candidates, own)).any(-1)


def _is_among(tokens: Tensor, own: Tensor) -> Tensor:
    """Whether each token [B, …] is in its row of ``own`` [B, T]."""
    known = torch.nn.functional.pad(own, (0, 1), value=NONE).sort(dim=1).values
    flat = tokens.flatten(1).contiguous()
    index = torch.searchsorted(known, flat).clamp_(max=known.shape[1] - 1)
    return (known.gather(1, index) == flat).view_as(tokens)


def is_best_copy(candidates: Tensor, scores: Tensor) -> Tensor:
    """Selects one of each set of equal candidates [B, N]: the best score, then the earliest."""
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
    """Scores, lowered for copies of the caption and for candidates with a later duplicate."""
    group = _groups(candidates)
    index = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    last = torch.full_like(group.view(-1), NONE)
    last.scatter_reduce_(0, group.view(-1), index.reshape(-1), "amax")
    is_copy = (candidates == captions[:, None]).all(-1)
    return scores - identical * is_copy - duplicated * (index != last[group])


def _groups(candidates: Tensor) -> Tensor:
    """Group ids [B, N] below B·N: the same only for equal candidates of one caption."""
    batch, count, _ = candidates.shape
    image = torch.arange(batch, device=candidates.device).view(-1, 1, 1).expand(-1, count, 1)
    rows = torch.cat([image, candidates], dim=2).flatten(0, 1)
    if not len(rows):
        return rows.new_zeros(batch, count)
    return torch.unique(rows, dim=0, return_inverse=True)[1].view(batch, count)


@dataclass(frozen=True)
class MaskedCaptions:
    """K versions of B captions: ids [B, K, W], and labels: true tokens to predict, else −1."""

    ids: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> MaskedCaptions:
        return MaskedCaptions(self.ids.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Foils:
    """Selected foils [B, m, W], best first, with their ``scores``; padding unless ``real`` [B, m].

    ``labels`` [B, m, W] are the true tokens at the masks of the generator, else −1.
    """

    ids: Tensor
    labels: Tensor
    scores: Tensor
    real: Tensor


def mask_captions(
    captions: Tensor,
    units: Sequence[Sequence[Positions]],
    versions: int,
    tokens: MaskTokens,
    rngs: Sequence[np.random.Generator],
    rates: Sequence[float] | None = None,
) -> MaskedCaptions:
    """Masked versions of captions [B, W]; a caption without units stays unchanged.

    ``rngs`` and ``rates`` are per caption; the rate is `RATE` by default. Padding draws no numbers,
    so the versions of a caption do not depend on the other captions.
    """
    true = captions.cpu().numpy()
    ids = np.repeat(true[:, None], versions, axis=1)
    labels = np.full_like(ids, UNMASKED)
    for row, positions in enumerate(units):
        if positions:
            rate = RATE if rates is None else rates[row]
            width = 1 + max(map(max, positions))
            masked = mask_versions(
                true[row, :width].tolist(), positions, versions, tokens, rngs[row], rate
            )
            ids[row, :, :width], labels[row, :, :width] = masked.ids, masked.labels
    device = captions.device
    return MaskedCaptions(torch.from_numpy(ids).to(device), torch.from_numpy(labels).to(device))


def sampling_numbers(
    masked: MaskedCaptions, samples: int, rngs: Sequence[np.random.Generator]
) -> Tensor:
    """Uniform numbers [P, L] for `refill`, drawn from the generator of each caption."""
    counts = (masked.labels != UNMASKED).flatten(1).sum(1).tolist()
    drawn = [rng.random((count, samples)) for rng, count in zip(rngs, counts, strict=True)]
    return torch.from_numpy(np.concatenate(drawn)).float()


def refill(
    masked: MaskedCaptions,
    fill: Filler,
    ordinary: Tensor,
    samples: int,
    temperature: float,
    numbers: Tensor | None = None,
) -> Tensor:
    """Candidates [B, K·L, W]: each masked token of each version sampled L times from the filler.

    Only ``ordinary`` tokens are drawn. Candidate ``k·L + l`` is sample ``l`` of version ``k``.
    ``numbers`` [P, L], uniform in [0, 1), decide the samples of the P masked tokens; by default
    they come from torch's generator.
    """
    if not 0 < temperature < math.inf:
        raise ConfigError(f"foils: the temperature must be above 0, got {temperature}")
    batch, versions, length = masked.ids.shape
    ids, masked_tokens = masked.ids.flatten(0, 1), masked.labels.flatten(0, 1) != UNMASKED
    rows = torch.arange(batch, device=ids.device).repeat_interleave(versions)
    candidates = ids[:, None].repeat(1, samples, 1)  # [B·K, L, W]
    if masked_tokens.any():
        logits = fill(rows, ids, masked_tokens).float()
        chances = (logits[:, ordinary] / temperature).softmax(-1)
        if numbers is None:
            numbers = torch.rand(len(chances), samples, device=chances.device)
        drawn = ordinary[sample_tokens(chances, numbers.to(chances.device))]  # [P, L]
        row, index = masked_tokens.nonzero(as_tuple=True)
        candidates[row, :, index] = drawn
    return candidates.view(batch, versions * samples, length)


def sample_tokens(chances: Tensor, numbers: Tensor) -> Tensor:
    """Tokens [P, L] whose interval of the cumulated ``chances`` [P, V] has the numbers [P, L].

    As `torch.multinomial`, but a token depends on its own row and number alone, so that processes
    that divide the rows draw the same tokens. A token of chance 0 is never drawn.

    >>> sample_tokens(torch.tensor([[0.5, 0.0, 0.5]]), torch.tensor([[0.2, 0.5, 0.9]]))
    tensor([[0, 2, 2]])
    """
    ends = chances.cumsum(-1)
    total = ends[:, -1:].contiguous()
    if not total.isfinite().all():
        raise TrainingError(
            "foils: the logits of the model that fills masks are not finite, so no word can be "
            "drawn; use an earlier checkpoint, a lower learning rate, or full precision"
        )
    # a number that rounding made 1 would be beyond the last token that has a chance
    last = torch.searchsorted(ends, total)
    return torch.searchsorted(ends, numbers * total, right=True).minimum(last)


def own_tokens(captions: Iterable[Iterable[int]], device: torch.device) -> Tensor:
    """Token sets [B, T] of B images, each from the ids of all its captions; padded with −1."""
    sets = [sorted(set(ids)) for ids in captions]
    own = torch.full((len(sets), max(map(len, sets), default=0)), NONE)
    for row, ids in enumerate(sets):
        own[row, : len(ids)] = torch.tensor(ids, dtype=torch.long)
    return own.to(device)


def hardest_foils(
    captions: Tensor,
    masked: MaskedCaptions,
    candidates: Tensor,
    own: Tensor,
    score: Scorer,
    most: int,
    judge: Scorer | None = None,
) -> Foils:
    """The ``most`` best-scoring candidates that are no false negatives, copies or duplicates.

    Only candidates that can be selected are scored. Those that a ``judge`` scores as high as the
    true caption may be true, and are not selected.
    """
    useful = is_new(candidates, captions, own)
    useful &= is_best_copy(candidates, torch.zeros_like(useful, dtype=torch.float))
    if judge is not None and useful.any():
        rows = useful.nonzero()[:, 0]
        true = judge(torch.arange(len(captions), device=captions.device), captions)
        useful[useful.clone()] = judge(rows, candidates[useful]) < true[rows]
    scores = torch.full(useful.shape, -torch.inf, device=captions.device)
    if useful.any():
        scores[useful] = score(useful.nonzero()[:, 0], candidates[useful]).float()
    selected = select_foils(candidates, captions, scores, own, most)
    index = selected.clamp(min=0)
    real = (selected != NONE) & useful.gather(1, index)
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
