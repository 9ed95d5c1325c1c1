"""NAAF: negative-aware attention (Zhang et al. 2022). Words without a match lower the score.

Equation numbers are the paper's. Attention (section 3.1.2, eq. 6–12) is here. The boundary
(section 3.1.1, eq. 3–5) and its samples (section 3.1.3, eq. 1, 2, 13, 14) are in
`mismatch_boundary`. Eq. 15 is the triplet objective.

Names in a tile: Q texts of N words u_i, C images of K regions v_j. In the image-to-text direction
regions are the queries u_i and words the keys v_j.
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
from counterfoil.encoders.encoded import Encoded
from counterfoil.kernels.attention import (
    Tile,
    indicator_above,
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
"""Options that control how the boundary is learned."""


@dataclass(frozen=True)
class Effects:
    """Effects [Q, N, C] of each word on the score of each image.

    ``s_neg`` is eq. 8, ``s_f`` and ``s_r`` are the two parts of eq. 11, ``w_relevance``
    [Q, N, C, K] the attention weights of s_r.
    """

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

    ``intra``: when a word's match is propagated to similar words (eq. 9): at inference as in the
    paper, always, or never. ``direction`` adds the image-to-text direction, in which regions are
    the queries; it has its own boundary.

    The paper's ablations: ``negative=False`` omits the negative effect. ``mining=False`` fixes t
    at ``boundary``. ``masks=False`` counts s_i − t of every word, not only if it is negative, and
    lets words attend to all regions. ``mismatched="all"`` samples all similarities of a mismatched
    word instead of the highest. ``update_mismatched=False`` keeps the mismatched estimates of the
    first update.

    The public code differs: see `naaf-reference`. Options that have no effect, such as ``alpha``
    with ``mining=False``, raise an error.
    """

    activation: ClassVar[Literal["relu", "leaky"]] = "relu"
    """[·]₊ of the relevance weights (`KernelSpec.activation`)."""

    propagation: ClassVar[Literal["soft", "gate"]] = "soft"
    """How eq. 9 changes the negative effect (`KernelSpec.propagation`)."""

    unit_words: ClassVar[bool] = False
    """Whether words are treated as unit vectors."""

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

    # --- attention (section 3.1.2) ---

    def torch_scores(self, images: Encoded, texts: Encoded) -> Tensor:
        """Scores [I, T]: eq. 12 in each direction, with the current boundaries."""
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
        """Negative and positive attention of each word to each image."""
        s, real = tile.sims_QNCK, tile.key_mask_CK  # eq. 6: s_ij
        s_real = tile.masked_sims(-2.0)  # below every cosine
        s_max = s_real.amax(-1)
        s_i = s_max - t  # eq. 7
        s_neg = self.negative_effect(s_i, tile) if self.negative else s_max * 0
        # eq. 10 without the denominator of the softmax, which the cosine below ignores
        w_inter = (s_real - s_max[..., None]).mul_(self.lambda_softmax).exp_()
        if self.masks:
            w_inter = w_inter * indicator_above(s_real, t)  # Mask_pos
        elif real is not None:
            w_inter = w_inter * real
        # s_f = cos(u_i, v̂_i) with v̂_i = Σ_j w_inter v_j, by the Gram identity
        s_f = packed_cosine(s, w_inter, tile.gram_CKK, self.word_norms(tile))
        s_bar_scaled = l2_over(self.positive_part(s), 1, self.lambda_softmax)  # λ s̄_ij
        w_relevance = masked_softmax(s_bar_scaled, real)
        s_r = (w_relevance * s).sum(-1)
        return Effects(s_neg, s_f, s_r, w_relevance)

    def negative_effect(self, s_i: Tensor, tile: Tile) -> Tensor:
        """s_neg [Q, N, C]: how much each word lowers the score of each image."""
        if tile.query_gram_QNN is not None and self.needs_query_gram:
            s_i = self.w_intra(tile.query_gram_QNN, tile) @ s_i  # eq. 9: ŝ_i replaces s_i
        return s_i.clamp(max=0) if self.masks else s_i  # eq. 8

    def w_intra(self, query_gram: Tensor, tile: Tile) -> Tensor:
        """Weights [Q, N, N] with which words share their match (eq. 9)."""
        mask = None if tile.query_mask_QN is None else tile.query_mask_QN[:, None]
        return masked_softmax(self.lambda_intra * query_gram, mask)

    def positive_part(self, s: Tensor) -> Tensor:
        """[s_ij]₊ of the relevance weights."""
        return s.clamp(min=0)

    def word_norms(self, tile: Tile) -> Tensor:
        """‖u_i‖ [Q, N]."""
        return tile.norms_QN

    @property
    def needs_query_gram(self) -> bool:  # type: ignore[override]
        """Whether eq. 9 applies in the current mode."""
        return self.intra == "always" or (self.intra == "inference" and not self.training)

    def kernel_specs(self) -> tuple[KernelSpec, ...]:
        if not self.masks:  # an ablation without a kernel
            return ()
        return tuple(self.kernel_spec(side) for side in self.directions)

    def kernel_spec(self, side: str) -> KernelSpec:
        """The fused kernel's parameters for one direction, with the current boundary."""
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

    # --- the boundary t (sections 3.1.1 and 3.1.3) ---

    def _create_boundaries(
        self, boundary: float, momentum: float, min_samples: int, update_mismatched: bool
    ) -> None:
        shared = (self.alpha, self.adjust_epoch, momentum, min_samples, update_mismatched)
        self.boundaries = nn.ModuleDict(
            {side: MismatchBoundary(*shared) for side in self.directions}
        )
        for side in self.directions:
            self.estimates(side).boundary.fill_(boundary)
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))
        self._host_scalars = HostScalarCache()

    def _refuse_unused(self, options: dict[str, Any]) -> None:
        """Raise on options that have no effect in combination with the others."""
        no_boundary = not self.masks and not self.negative  # t is never read
        modes = [
            ("mining=false", not self.mining, SAMPLING),
            ("negative=false", not self.negative, ("intra", "lambda_intra")),
            ("intra=none", self.intra == "none", ("lambda_intra",)),
            ("masks=false and negative=false", no_boundary, (*SAMPLING, "boundary")),
        ]
        parameters = inspect.signature(type(self)).parameters
        for mode, applies, names in modes:
            if applies:
                unused = {name: options[name] for name in names if name in parameters}
                refuse_unused(type(self), "model.matcher", mode, **unused)

    def boundary_of(self, side: str) -> float:
        """The current boundary t of one direction."""
        return self.estimates(side).value

    def estimates(self, side: str) -> MismatchBoundary:
        """The estimated distributions and boundary of one direction."""
        module = self.boundaries[side]
        assert isinstance(module, MismatchBoundary)  # noqa: S101 - nn.ModuleDict erases the type
        return module

    @torch.no_grad()
    def observe(self, observation: Observation) -> None:
        """Discriminative mismatch mining (section 3.1.3): learn t from correctly ranked captions.

        The wrong image that a caption is compared with changes from batch to batch.
        """
        if not self.mining:
            return
        batches = int(self._host_scalars.read(self.batches)[0])
        self.batches += 1
        self._host_scalars.store([batches + 1], self.batches)
        shift = 1 + batches % max(1, len(observation.texts) - 1)
        pairs = Mismatches.of(observation, shift)
        for side in self.directions:
            samples = pairs.samples(side, self.mismatched)  # eq. 13 and 14
            sums, counts = samples.moments(), samples.histogram()
            self.estimates(side).accumulate(sums, observation.epoch, counts)

    def close_epoch(self, epoch: int) -> dict[str, Any]:
        """Histograms of matched and mismatched samples, by direction (figure 3)."""
        records = {side: self.estimates(side).close_epoch(epoch) for side in self.directions}
        records = {side: record for side, record in records.items() if record}
        return {"mismatch_histogram": records} if records else {}

    def diagnostics(self) -> dict[str, float]:
        """``mismatch/boundary`` etc.; with two directions ``mismatch/t2i/boundary`` etc."""
        if len(self.directions) == 1:
            return self.estimates(self.directions[0]).diagnostics()
        return {
            key.replace("mismatch/", f"mismatch/{side}/"): value
            for side in self.directions
            for key, value in self.estimates(side).diagnostics().items()
        }

    def notes(self, epochs: int) -> list[str]:
        if not self.mining or self.adjust_epoch < epochs:
            return []
        return [
            f"model.matcher.adjust_epoch={self.adjust_epoch} is beyond the last of {epochs} epochs "
            f"(counted from 0): the boundary stays that of alpha={self.alpha:g}"
        ]

    # --- explanations ---

    def word_parts(self, image: Encoded, text: Encoded) -> WordParts | None:
        if self.directions != ("t2i",):
            return None
        tile, to_padded = one_pair(text, image)
        effects = self.effects(tile, self.boundary_of("t2i"))
        words = tile.sims_QNCK.shape[1]
        return WordParts(
            positive=to_padded(effects.s_pos[0, :, 0] / words),
            negative=to_padded(effects.s_neg[0, :, 0] / words),
            weights=to_padded(effects.w_relevance[0, :, 0]),
            additive=True,
        )

    def beyond_boundary(self, image: Encoded, text: Encoded) -> Tensor:
        """s − t of each word with each region of one pair: [W, R], 0 at padding (figure 4)."""
        tile, to_padded = one_pair(text, image)
        return to_padded(tile.sims_QNCK[0, :, 0] - self.boundary_of(self.directions[0]))
