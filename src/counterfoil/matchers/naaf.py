"""NAAF: negative-aware attention (Zhang et al. 2022). Words that match nothing count against."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from counterfoil.encoders.encoded import Encoded
from counterfoil.errors import ConfigError
from counterfoil.kernels.attention import answer_softmax, l2_over, leaky, packed_cosine
from counterfoil.kernels.blocks import Tile
from counterfoil.kernels.fused import Recipe
from counterfoil.kernels.host_naaf import host_naaf
from counterfoil.matchers.base import Observation, matchers
from counterfoil.matchers.boundary import Known, MismatchBoundary
from counterfoil.matchers.local import WordParts, fragments
from counterfoil.matchers.mismatches import Mismatched, Mismatches
from counterfoil.matchers.naaf_reference import ReferenceBoundary, score_with_mining
from counterfoil.matchers.paired import block_diagonals
from counterfoil.matchers.similarity import SimilarityMatcher, one_pair
from counterfoil.registry import refuse_unused

Intra = Literal["none", "inference", "always"]

REFERENCE_LAMBDA_INTRA = 5.0
"""λ of the propagation gate in the public code."""

SAMPLING = (
    *("alpha", "adjust_epoch", "momentum", "min_samples"),
    *("mismatched", "update_mismatched"),
)
"""Options of how the boundary is learned."""


@dataclass(frozen=True)
class Branches:
    """Effects [Q, N, C] of each asking fragment of each pair; where it looked [Q, N, C, K]."""

    negative: Tensor
    feature: Tensor
    relevance: Tensor
    weights: Tensor

    @property
    def total(self) -> Tensor:
        return self.negative + self.feature + self.relevance


@matchers.register("naaf")
class NAAF(SimilarityMatcher):
    """NAAF: mean over words of a negative and two positive effects around a learned boundary t.

    ``intra`` says when a word's match is propagated to words like it (eq. 9): at inference as in
    the paper, always, or never. ``direction`` adds the image-to-text side, where regions ask and
    words answer, with a boundary of its own. The paper's ablations: ``negative=False``,
    ``mining=False`` (then t is ``boundary``), ``masks=False`` (every word's closeness to t counts,
    not only what is below it, and words attend to all regions), ``mismatched="all"`` (a mismatched
    word is sampled by its similarities with all regions, not by the highest one), and
    ``update_mismatched=False`` (mismatched estimates stay those of the first update).

    ``form="reference"`` reproduces the public code: its boundary (recomputed caption by caption
    within a batch, with the least similar image as the wrong one), LeakyReLU in the relevance
    term, propagation only as a gate, λ = 5 in it, and μ₊ − 3σ₊ as boundary at inference. Options
    without effect, in this form or beside ``mining=False`` and the like, are refused.
    """

    batches: Tensor

    def __init__(
        self,
        embed_size: int,
        *,
        lambda_softmax: float = 20.0,
        lambda_intra: float = 20.0,
        intra: Intra = "inference",
        direction: Literal["t2i", "i2t", "both"] = "t2i",
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
        form: Literal["paper", "reference"] = "paper",
    ) -> None:
        super().__init__(embed_size)
        self.lambda_softmax, self.lambda_intra = lambda_softmax, lambda_intra
        self.intra, self.negative, self.mining = intra, negative, mining
        self.masks, self.mismatched = masks, mismatched
        self.directions = ("t2i", "i2t") if direction == "both" else (direction,)
        self.form, self.alpha, self.adjust_epoch = form, alpha, adjust_epoch
        if alpha <= 0:
            raise ConfigError(f"model.matcher.alpha: above 0, got {alpha:g}")
        if mismatched not in get_args(Mismatched):
            raise ConfigError(f"model.matcher.mismatched: 'max' or 'all', got {mismatched!r}")
        _refuse_unused(
            form=form,
            mining=mining,
            masks=masks,
            mismatched=mismatched,
            update_mismatched=update_mismatched,
            negative=negative,
            intra=intra,
            lambda_intra=lambda_intra,
            boundary=boundary,
            alpha=alpha,
            adjust_epoch=adjust_epoch,
            momentum=momentum,
            min_samples=min_samples,
        )
        if form == "reference":
            self.reference = ReferenceBoundary(alpha, min_samples)
            self.lambda_intra = REFERENCE_LAMBDA_INTRA
        else:
            self.boundaries = torch.nn.ModuleDict(
                {
                    side: MismatchBoundary(
                        alpha, adjust_epoch, momentum, min_samples, update_mismatched
                    )
                    for side in self.directions
                }
            )
            self.register_buffer("batches", torch.zeros((), dtype=torch.long))
            self._known = Known()
            for learned in self.boundaries.values():
                learned.boundary.fill_(boundary)  # type: ignore[operator]

    def boundary_of(self, side: str) -> float:
        """The boundary t now in force in one direction."""
        if self.form == "reference":
            return self.reference.thres if self.training else self.reference.thres_safe
        return self.learned(side).value

    def learned(self, side: str) -> MismatchBoundary:
        """The estimates of one direction (of the paper's form)."""
        learned = self.boundaries[side]
        assert isinstance(learned, MismatchBoundary)  # noqa: S101 - nn.ModuleDict forgets the type
        return learned

    @property
    def mines_while_scoring(self) -> bool:
        """Whether a batch that is scored now moves the boundary, as in the public code."""
        return self.form == "reference" and self.training and self.mining

    def forward(self, images: Encoded, texts: Encoded) -> Tensor:
        if self.mines_while_scoring:
            return score_with_mining(self, images, texts)
        return super().forward(images, texts)

    def paired(self, images: Encoded, texts: Encoded) -> Tensor | None:
        """Pairs besides the batch, such as foils: with the boundary it left, which they keep."""
        if not self.mines_while_scoring:
            return None
        return block_diagonals(super().forward, images, texts)

    def recipes(self) -> tuple[Recipe, ...]:
        if not self.masks:  # an ablation, which PyTorch computes everywhere
            return ()
        return tuple(self.recipe(side) for side in self.directions)

    def recipe(self, side: str) -> Recipe:
        """What one direction computes now."""
        paper = self.form == "paper"
        spread: Literal["spread", "gate"] = "spread" if paper else "gate"
        return Recipe(
            "naaf",
            "words" if side == "t2i" else "regions",
            scale=self.lambda_softmax,
            raised="relu" if paper else "leaky",
            boundary=self.boundary_of(side),
            negative=self.negative,
            gate=spread if self.wants_kin and self.negative else "none",
            gate_scale=self.lambda_intra,
            unit_words=not paper,
        )

    def eager(self, images: Encoded, texts: Encoded) -> Tensor:
        if self.directions == ("t2i",) and self.masks:
            pair = (fragments(images), images.mask), (fragments(texts), texts.mask)
            found = host_naaf(self.recipe("t2i"), *pair, kept=self.kept)
            if found is not None:
                return found
        return self.scores(images, texts)

    def scores(self, images: Encoded, texts: Encoded) -> Tensor:
        """Eq. 12 in each direction, with the boundaries now in force: [I, T]."""
        parts = []
        for side in self.directions:
            mean = partial(self.mean, t=self.boundary_of(side))
            if side == "t2i":
                parts.append(self.directed(texts, images, mean).T)
            else:
                parts.append(self.directed(images, texts, mean))
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def mean(self, tile: Tile, t: float) -> Tensor:
        return self.branches(tile, t).total.mean(1)

    def branches(self, tile: Tile, t: float) -> Branches:
        """Effects of each asking fragment (a word, in t2i) against each answering item."""
        sims, answers = tile.sims_QNCK, tile.answers_CK  # eq. 6
        reachable = sims if answers is None else sims.masked_fill(~answers, -2.0)
        best = reachable.amax(-1)
        negative = self._negative(tile.kin_QNN, best - t) if self.negative else best * 0
        # eq. 10; the cosine below does not see the scale of the weights
        weights = (reachable - best[..., None]).mul_(self.lambda_softmax).exp_()
        if self.masks:
            weights = weights * _above(reachable, t)
        elif answers is not None:
            weights = weights * answers
        # the public code takes words as unit vectors, so no gradient flows through their length
        norms = tile.norms_QN if self.form == "paper" else torch.ones_like(tile.norms_QN)
        feature = packed_cosine(sims, weights, tile.gram_CKK, norms)
        raised = leaky(sims) if self.form == "reference" else sims.clamp(min=0)
        looked = answer_softmax(l2_over(raised, 1, self.lambda_softmax), answers)
        return Branches(negative, feature, (looked * sims).sum(-1), looked)

    @property
    def wants_kin(self) -> bool:  # type: ignore[override]
        """Whether eq. 9 applies now."""
        return self.intra == "always" or (self.intra == "inference" and not self.training)

    def _negative(self, kin_QNN: Tensor | None, closeness_QNC: Tensor) -> Tensor:
        """Eq. 7 and 8, with eq. 9 where it applies."""
        if kin_QNN is None or not self.wants_kin:
            return closeness_QNC.clamp(max=0) if self.masks else closeness_QNC
        spread = (self.lambda_intra * kin_QNN).softmax(-1) @ closeness_QNC
        if self.form == "reference":  # propagation is the mask there
            return closeness_QNC * (spread < 0) if self.masks else closeness_QNC
        return spread.clamp(max=0) if self.masks else spread

    @torch.no_grad()
    def observe(self, seen: Observation) -> None:
        """Discriminative mismatch mining (section 3.1.3): learn t from correctly ranked captions.

        Which wrong image a caption is compared with changes from batch to batch.
        """
        if self.form == "reference" or not self.mining:
            return
        batches = int(self._known.read(self.batches)[0])
        self.batches += 1
        self._known.remember([batches + 1], self.batches)
        pairs = Mismatches.of(seen, shift=1 + batches % max(1, len(seen.texts) - 1))
        for side in self.directions:
            samples = pairs.samples(side, self.mismatched)
            self.learned(side).take(samples.moments(), seen.epoch, samples.histogram())

    def close_epoch(self, epoch: int) -> dict[str, Any]:
        """Histograms of matched and mismatched samples, by direction (figure 3)."""
        if self.form == "reference":
            closed = {"t2i": self.reference.close_epoch()}
        else:
            closed = {side: self.learned(side).close_epoch(epoch) for side in self.directions}
        sampled = {side: record for side, record in closed.items() if record}
        return {"mismatch_histogram": sampled} if sampled else {}

    def diagnostics(self) -> dict[str, float]:
        """``mismatch/boundary`` and so on; with two directions ``mismatch/t2i/boundary`` …"""
        if self.form == "reference":
            return self.reference.diagnostics()
        if len(self.directions) == 1:
            return self.learned(self.directions[0]).diagnostics()
        return {
            key.replace("mismatch/", f"mismatch/{side}/"): value
            for side in self.directions
            for key, value in self.learned(side).diagnostics().items()
        }

    def notes(self, epochs: int) -> list[str]:
        if self.form == "reference" or not self.mining or self.adjust_epoch < epochs:
            return []
        return [
            f"model.matcher.adjust_epoch={self.adjust_epoch} is beyond the last of {epochs} epochs "
            f"(counted from 0): the boundary stays that of alpha={self.alpha:g}"
        ]

    def word_parts(self, image: Encoded, text: Encoded) -> WordParts | None:
        if self.directions != ("t2i",):
            return None
        tile, place = one_pair(text, image)
        found = self.branches(tile, self.boundary_of("t2i"))
        words = tile.sims_QNCK.shape[1]
        return WordParts(
            positive=place((found.feature + found.relevance)[0, :, 0] / words),
            negative=place(found.negative[0, :, 0] / words),
            weights=place(found.weights[0, :, 0]),
            additive=True,
        )

    def beyond_boundary(self, image: Encoded, text: Encoded) -> Tensor:
        """s − t of each word with each region of one pair: [W, R], 0 at padding (figure 4)."""
        tile, place = one_pair(text, image)
        return place(tile.sims_QNCK[0, :, 0] - self.boundary_of(self.directions[0]))


def _refuse_unused(**options: Any) -> None:
    """Raise on options that have no effect beside the others."""
    if options["form"] == "reference" and options["lambda_intra"] == REFERENCE_LAMBDA_INTRA:
        del options["lambda_intra"]  # what that form takes anyway
    unused = {
        "form=reference": (
            *("boundary", "adjust_epoch", "momentum", "lambda_intra"),
            *("mismatched", "update_mismatched"),
        ),
        "mining=false": SAMPLING,
        "negative=false": ("intra", "lambda_intra"),
        "intra=none": ("lambda_intra",),
    }
    for mode, names in unused.items():
        option, _, value = mode.partition("=")
        if options[option] == {"false": False}.get(value, value):
            given = {name: options[name] for name in names if name in options}
            refuse_unused(NAAF, "model.matcher", mode, **given)
    if not options["masks"] and not options["negative"]:  # nothing is compared with the boundary
        given = {name: options[name] for name in (*SAMPLING, "boundary")}
        refuse_unused(NAAF, "model.matcher", "masks=false and negative=false", **given)
    if not options["masks"] and options["form"] == "reference":
        given = {"intra": options["intra"]}
        refuse_unused(NAAF, "model.matcher", "masks=false and form=reference", **given)


@torch.no_grad()
def _above(sims: Tensor, t: float) -> Tensor:
    """1 where a similarity is above t, else 0; as numbers, which multiply faster than booleans."""
    return torch.gt(sims, t, out=torch.empty_like(sims))
