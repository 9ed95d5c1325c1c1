"""NAAF: negative-aware attention (Zhang et al. 2022). Words that match nothing count against.

Equation numbers are the paper's. Section 3.1.1 (eq. 3–5) and the samples of section 3.1.3 (eq. 1,
2, 13, 14) are in `mismatch_boundary`, section 3.1.2 (eq. 6–12) is here. Eq. 15 is the triplet
objective. Names in a tile: Q texts of N words u_i, C images of K regions v_j; in the image-to-text
direction they change places.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from counterfoil.core.errors import ConfigError
from counterfoil.core.registry import refuse_unused
from counterfoil.core.tensors.host_mirror import HostScalarCache
from counterfoil.core.tensors.modes import is_exporting
from counterfoil.encoders.encoded import Encoded
from counterfoil.kernels.attention import (
    Tile,
    key_softmax,
    l2_over,
    masked_softmax,
    packed_cosine,
    query_mean,
)
from counterfoil.kernels.spec import KernelSpec
from counterfoil.matchers.base import Observation, matchers
from counterfoil.matchers.fragment_matcher import CrossAttentionMatcher, WordParts, one_pair
from counterfoil.matchers.mismatch_boundary import MismatchBoundary, Mismatched, Mismatches

Intra = Literal["none", "inference", "always"]
Direction = Literal["t2i", "i2t", "both"]

SAMPLING = (
    *("alpha", "adjust_epoch", "momentum", "min_samples"),
    *("mismatched", "update_mismatched"),
)
"""Options of how the boundary is learned."""


@dataclass(frozen=True)
class Effects:
    """Effects [Q, N, C] of each word on each image, and its relevance weights [Q, N, C, K]."""

    s_neg: Tensor
    s_f: Tensor
    s_r: Tensor
    w_relevance: Tensor

    @property
    def s_pos(self) -> Tensor:
        return self.s_f + self.s_r  # eq. 11

    @property
    def total(self) -> Tensor:
        return self.s_neg + self.s_f + self.s_r  # the sum of eq. 12


@matchers.register("naaf")
class NAAF(CrossAttentionMatcher):
    """NAAF: mean over words of a negative and two positive effects around a learned boundary t.

    ``intra`` says when a word's match is propagated to words like it (eq. 9): at inference as in
    the paper, always, or never. ``direction`` adds the image-to-text side, in which regions are
    the queries, with a boundary of its own. The paper's ablations: ``negative=False``,
    ``mining=False`` (then t is ``boundary``), ``masks=False`` (every word's closeness to t counts,
    not only what is below it, and words attend to all regions), ``mismatched="all"`` (a mismatched
    word is sampled by its similarities with all regions, not by the highest one), and
    ``update_mismatched=False`` (mismatched estimates stay those of the first update).

    The public code differs: see `naaf-reference`. Options without effect, as beside
    ``mining=False``, are refused.
    """

    activation: ClassVar[Literal["relu", "leaky"]] = "relu"
    """[·]₊ of the relevance weights, as kernels name it."""

    propagation: ClassVar[Literal["soft", "gate"]] = "soft"
    """What eq. 9 does to the negative effect, as kernels name it."""

    unit_words: ClassVar[bool] = False
    """Whether words are taken as unit vectors."""

    batches: Tensor

    def __init__(
        self,
        embed_size: int | None = None,
        *,
        lambda_softmax: float = 20.0,
        lambda_intra: float = 20.0,
        intra: Intra = "inference",
        direction: Direction = "t2i",
        negative: bool = True,
        mining: bool = True,
        masks: bool = True,
        mismatched: Mismatched = "max",
        update_mismatched: bool = True,
        boundary: float = 0.0,
        alpha: float = 2.0,
        adjust_epoch: int = 15,
        momentum: float = 0.1,
        min_samples: int = 200,
    ) -> None:
        options = {**locals()}
        super().__init__(embed_size)
        self.lambda_softmax, self.lambda_intra = lambda_softmax, lambda_intra
        self.intra, self.negative, self.mining = intra, negative, mining
        self.masks, self.mismatched = masks, mismatched
        self.directions = ("t2i", "i2t") if direction == "both" else (direction,)
        self.alpha, self.adjust_epoch = alpha, adjust_epoch
        if alpha <= 0:
            raise ConfigError(f"model.matcher.alpha: above 0, got {alpha:g}")
        if mismatched not in get_args(Mismatched):
            raise ConfigError(f"model.matcher.mismatched: 'max' or 'all', got {mismatched!r}")
        self._refuse_unused(options)
        self._create_boundaries(boundary, momentum, min_samples, update_mismatched)

    def _create_boundaries(
        self, boundary: float, momentum: float, min_samples: int, update_mismatched: bool
    ) -> None:
        shared = (self.alpha, self.adjust_epoch, momentum, min_samples, update_mismatched)
        self.boundaries = nn.ModuleDict(
            {side: MismatchBoundary(*shared) for side in self.directions}
        )
        for side in self.directions:
            self.learned(side).boundary.fill_(boundary)
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))
        self._host_scalars = HostScalarCache()

    def _refuse_unused(self, options: dict[str, Any]) -> None:
        """Raise on options that have no effect beside the others."""
        neither = not self.masks and not self.negative  # then nothing is compared with t
        modes = [
            ("mining=false", not self.mining, SAMPLING),
            ("negative=false", not self.negative, ("intra", "lambda_intra")),
            ("intra=none", self.intra == "none", ("lambda_intra",)),
            ("masks=false and negative=false", neither, (*SAMPLING, "boundary")),
        ]
        own = inspect.signature(type(self)).parameters
        for mode, applies, names in modes:
            if applies:
                given = {name: options[name] for name in names if name in own}
                refuse_unused(type(self), "model.matcher", mode, **given)

    def boundary_of(self, side: str) -> float:
        """The boundary t now in force in one direction."""
        return self.learned(side).value

    def learned(self, side: str) -> MismatchBoundary:
        """The estimates of one direction."""
        learned = self.boundaries[side]
        assert isinstance(learned, MismatchBoundary)  # noqa: S101 - nn.ModuleDict forgets the type
        return learned

    def kernel_specs(self) -> tuple[KernelSpec, ...]:
        if not self.masks:  # an ablation, which PyTorch computes everywhere
            return ()
        return tuple(self.kernel_spec(side) for side in self.directions)

    def kernel_spec(self, side: str) -> KernelSpec:
        """What one direction computes now."""
        return KernelSpec(
            "naaf",
            "text" if side == "t2i" else "image",
            scale=self.lambda_softmax,
            activation=self.activation,
            boundary=self.boundary_of(side),
            negative=self.negative,
            propagation=self.propagation if self.needs_query_gram and self.negative else "none",
            gate_scale=self.lambda_intra,
            unit_words=self.unit_words,
        )

    def torch_scores(self, images: Encoded, texts: Encoded) -> Tensor:
        """Eq. 12 in each direction, with the boundaries now in force: [I, T]."""
        parts = []
        for side in self.directions:
            similarity = partial(self.similarity, t=self.boundary_of(side))
            if side == "t2i":
                parts.append(self.attend(texts, images, similarity).T)
            else:
                parts.append(self.attend(images, texts, similarity))
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def similarity(self, tile: Tile, t: float) -> Tensor:
        """S(U, V) [Q, C] of every text with every image."""
        return query_mean(self.effects(tile, t).total, tile)  # eq. 12

    def effects(self, tile: Tile, t: float) -> Effects:
        """Negative and positive attention (section 3.1.2) of each word against each image."""
        s, real = tile.sims_QNCK, tile.key_mask_CK  # eq. 6: s_ij
        s_real = s if real is None else s.masked_fill(~real, -2.0)
        s_max = s_real.amax(-1)
        s_i = s_max - t  # eq. 7
        s_neg = self.negative_effect(s_i, tile) if self.negative else s_max * 0
        # eq. 10 but for the softmax's sum, which the cosine below does not see
        w_inter = (s_real - s_max[..., None]).mul_(self.lambda_softmax).exp_()
        if self.masks:
            w_inter = w_inter * _mask_pos(s_real, t)
        elif real is not None:
            w_inter = w_inter * real
        # s_f = cos(u_i, v̂_i) with v̂_i = Σ_j w_inter v_j, by the Gram identity
        s_f = packed_cosine(s, w_inter, tile.gram_CKK, self.word_norms(tile))
        s_bar_scaled = l2_over(self.positive_part(s), 1, self.lambda_softmax)  # λ s̄_ij
        w_relevance = key_softmax(s_bar_scaled, real)
        s_r = (w_relevance * s).sum(-1)
        return Effects(s_neg, s_f, s_r, w_relevance)

    def negative_effect(self, s_i: Tensor, tile: Tile) -> Tensor:
        """How much each word counts against each image, [Q, N, C]."""
        if tile.query_gram_QNN is not None and self.needs_query_gram:
            weights = self.w_intra(tile.query_gram_QNN, tile.query_mask_QN)
            s_i = weights @ s_i  # eq. 9: ŝ_i replaces s_i
        return s_i.clamp(max=0) if self.masks else s_i  # eq. 8

    def w_intra(self, query_gram: Tensor, query_mask: Tensor | None) -> Tensor:
        logits = self.lambda_intra * query_gram  # eq. 9
        if query_mask is None:
            return logits.softmax(-1)
        return masked_softmax(logits, query_mask[:, None])

    def positive_part(self, s: Tensor) -> Tensor:
        """[s_ij]₊ of the relevance weights."""
        return s.clamp(min=0)

    def word_norms(self, tile: Tile) -> Tensor:
        return tile.norms_QN

    @property
    def needs_query_gram(self) -> bool:  # type: ignore[override]
        """Whether eq. 9 applies now."""
        return self.intra == "always" or (self.intra == "inference" and not self.training)

    @torch.no_grad()
    def observe(self, seen: Observation) -> None:
        """Discriminative mismatch mining (section 3.1.3): learn t from correctly ranked captions.

        Which wrong image a caption is compared with changes from batch to batch.
        """
        if not self.mining:
            return
        batches = int(self._host_scalars.read(self.batches)[0])
        self.batches += 1
        self._host_scalars.store([batches + 1], self.batches)
        pairs = Mismatches.of(seen, shift=1 + batches % max(1, len(seen.texts) - 1))
        for side in self.directions:
            samples = pairs.samples(side, self.mismatched)  # eq. 13 and 14
            self.learned(side).accumulate(samples.moments(), seen.epoch, samples.histogram())

    def close_epoch(self, epoch: int) -> dict[str, Any]:
        """Histograms of matched and mismatched samples, by direction (figure 3)."""
        closed = {side: self.learned(side).close_epoch(epoch) for side in self.directions}
        sampled = {side: record for side, record in closed.items() if record}
        return {"mismatch_histogram": sampled} if sampled else {}

    def diagnostics(self) -> dict[str, float]:
        """``mismatch/boundary`` and so on; with two directions ``mismatch/t2i/boundary`` …"""
        if len(self.directions) == 1:
            return self.learned(self.directions[0]).diagnostics()
        return {
            key.replace("mismatch/", f"mismatch/{side}/"): value
            for side in self.directions
            for key, value in self.learned(side).diagnostics().items()
        }

    def notes(self, epochs: int) -> list[str]:
        if not self.mining or self.adjust_epoch < epochs:
            return []
        return [
            f"model.matcher.adjust_epoch={self.adjust_epoch} is beyond the last of {epochs} epochs "
            f"(counted from 0): the boundary stays that of alpha={self.alpha:g}"
        ]

    def word_parts(self, image: Encoded, text: Encoded) -> WordParts | None:
        if self.directions != ("t2i",):
            return None
        tile, place = one_pair(text, image)
        effects = self.effects(tile, self.boundary_of("t2i"))
        words = tile.sims_QNCK.shape[1]
        return WordParts(
            positive=place(effects.s_pos[0, :, 0] / words),
            negative=place(effects.s_neg[0, :, 0] / words),
            weights=place(effects.w_relevance[0, :, 0]),
            additive=True,
        )

    def beyond_boundary(self, image: Encoded, text: Encoded) -> Tensor:
        """s − t of each word with each region of one pair: [W, R], 0 at padding (figure 4)."""
        tile, place = one_pair(text, image)
        return place(tile.sims_QNCK[0, :, 0] - self.boundary_of(self.directions[0]))


@torch.no_grad()
def _mask_pos(s: Tensor, t: float) -> Tensor:
    """1 where s − t is positive, else 0; as numbers, which multiply faster than booleans."""
    return (s > t).to(s.dtype) if is_exporting() else torch.gt(s, t, out=torch.empty_like(s))
