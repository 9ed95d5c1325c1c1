"""The public NAAF code's state machine: kept to score and train as its authors did.

Within one batch the captions are taken one after the other: each is scored with the boundary its
predecessors left, and moves it if its own image ranks first. That is a sequence by nature, so this
is the one place that goes caption by caption. The paper's form does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from counterfoil.core.distributed import world_size
from counterfoil.core.errors import ConfigError
from counterfoil.core.registry import refuse_unused
from counterfoil.encoders.encoded import Encoded
from counterfoil.kernels.attention import Tile, leaky
from counterfoil.kernels.spec import ScoringJob
from counterfoil.matchers.base import Observation, block_diagonals, matchers
from counterfoil.matchers.fragment_matcher import single_fragments, single_precision
from counterfoil.matchers.mismatch_boundary import BINS, close_histogram, histogram
from counterfoil.matchers.naaf import NAAF, Direction, Intra

LAMBDA_INTRA = 5.0
"""λ of the propagation gate in the public code."""

OLD_BOUNDARY_SHARE = 0.3
"""Share of the old boundary in a new one."""


class ReferenceBoundary(nn.Module):
    """thres, thres_safe, mean_pos, mean_neg, stnd_pos, stnd_neg of the public code, as a buffer."""

    state: Tensor
    histogram: Tensor

    def __init__(self, alpha: float, min_words: int) -> None:
        super().__init__()
        self.alpha, self.min_words = alpha, min_words
        self.register_buffer("state", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("histogram", torch.zeros(2, BINS, dtype=torch.float64))

    @property
    def thres(self) -> float:
        return float(self.state[0])

    @property
    def thres_safe(self) -> float:
        return float(self.state[1])

    def diagnostics(self) -> dict[str, float]:
        names = ("boundary", "safe", "mean_pos", "mean_neg", "std_pos", "std_neg")
        return {f"mismatch/{n}": float(x) for n, x in zip(names, self.state, strict=True)}

    def close_epoch(self) -> dict[str, Any]:
        """The histogram of the epoch's samples with its boundary; the next epoch starts anew."""
        return close_histogram(self.histogram, self.thres, self.alpha)

    def update(self, matched: Tensor, mismatched: Tensor) -> None:
        """Boundaries from all samples of the batch so far, mixed with the ones before."""
        mean_pos, std_pos = float(matched.mean()), float(matched.std())
        mean_neg, std_neg = float(mismatched.mean()), float(mismatched.std())
        self.state[2:] = self.state.new_tensor([mean_pos, mean_neg, std_pos, std_neg])
        a = std_pos**2 - std_neg**2
        b = 2 * (mean_pos * std_neg**2 - mean_neg * std_pos**2)
        c = (mean_neg * std_pos) ** 2 - (mean_pos * std_neg) ** 2
        c += 2 * (std_pos * std_neg) ** 2 * math.log(std_neg / (self.alpha * std_pos) + 1e-8)
        inside = b**2 - 4 * a * c
        if inside <= 0:
            return
        new = (-b + math.sqrt(inside)) / (2 * a + 1e-10), mean_pos - 3 * std_pos
        for place, value in enumerate(new):
            inside_unit = value if 0 <= value <= 1 else 0.0  # above 1 becomes 0 there, not 1
            self.state[place] = (
                1 - OLD_BOUNDARY_SHARE
            ) * inside_unit + OLD_BOUNDARY_SHARE * self.state[place]


@matchers.register("naaf-reference")
class ReferenceNAAF(NAAF):
    """NAAF as the public code computes and trains it, for its checkpoints.

    What differs from the paper: the boundary is recomputed caption by caption within a batch, with
    the least similar image as the wrong one; at inference it is μ₊ − 3σ₊; the relevance weights
    use LeakyReLU; words are taken as unit vectors; propagation (eq. 9, with λ = 5) only decides
    which words count. Options without effect are refused.
    """

    activation: ClassVar[Literal["relu", "leaky"]] = "leaky"
    propagation: ClassVar[Literal["soft", "gate"]] = "gate"
    unit_words: ClassVar[bool] = True

    def __init__(
        self,
        embed_size: int | None = None,
        *,
        lambda_softmax: float = 20.0,
        intra: Intra = "inference",
        direction: Direction = "t2i",
        negative: bool = True,
        mining: bool = True,
        masks: bool = True,
        alpha: float = 2.0,
        min_samples: int = 200,
    ) -> None:
        super().__init__(
            embed_size,
            lambda_softmax=lambda_softmax,
            lambda_intra=LAMBDA_INTRA,
            intra=intra,
            direction=direction,
            negative=negative,
            mining=mining,
            masks=masks,
            alpha=alpha,
            min_samples=min_samples,
        )

    def _create_boundaries(
        self, boundary: float, momentum: float, min_samples: int, update_mismatched: bool
    ) -> None:
        self.reference = ReferenceBoundary(self.alpha, min_samples)

    def _refuse_unused(self, options: dict[str, Any]) -> None:
        super()._refuse_unused(options)
        if not self.masks:  # propagation is a mask here
            refuse_unused(type(self), "model.matcher", "masks=false", intra=options["intra"])

    def boundary_of(self, side: str) -> float:
        return self.reference.thres if self.training else self.reference.thres_safe

    def negative_effect(self, s_i: Tensor, tile: Tile) -> Tensor:
        if tile.query_gram_QNN is None or not self.needs_query_gram or not self.masks:
            return super().negative_effect(s_i, replace(tile, query_gram_QNN=None))
        weights = self.w_intra(tile.query_gram_QNN, tile.query_mask_QN)
        return s_i * (weights @ s_i < 0)

    def positive_part(self, s: Tensor) -> Tensor:
        return leaky(s)

    def word_norms(self, tile: Tile) -> Tensor:
        return torch.ones_like(tile.norms_QN)  # so no gradient flows through their length

    @property
    def mines_while_scoring(self) -> bool:
        """Whether a batch that is scored now moves the boundary."""
        return self.training and self.mining

    def score_block(self, images: Encoded, texts: Encoded, job: ScoringJob) -> Tensor:
        if self.mines_while_scoring:
            return score_with_mining(self.torch_scores, self.reference, images, texts)
        return super().score_block(images, texts, job)

    def paired(self, images: Encoded, texts: Encoded) -> Tensor | None:
        """Pairs besides the batch, such as foils: with the boundary it left, which they keep."""
        if not self.mines_while_scoring:
            return None
        return block_diagonals(partial(super().score_block, job=ScoringJob()), images, texts)

    def observe(self, seen: Observation) -> None:
        """Nothing: the boundary moves while a batch is scored."""

    def close_epoch(self, epoch: int) -> dict[str, Any]:
        record = self.reference.close_epoch()
        return {"mismatch_histogram": {"t2i": record}} if record else {}

    def diagnostics(self) -> dict[str, float]:
        return self.reference.diagnostics()

    def notes(self, epochs: int) -> list[str]:
        return []


def score_with_mining(
    score: Callable[[Encoded, Encoded], Tensor],
    boundary: ReferenceBoundary,
    images: Encoded,
    texts: Encoded,
) -> Tensor:
    """Scores of a batch of pairs in training, the boundary moving from caption to caption."""
    if len(images) != len(texts) or world_size() > 1:
        raise ConfigError(
            f"model.matcher.name=naaf-reference trains on batches of pairs in one process, got "
            f"{len(images)} images with {len(texts)} texts in {world_size()} processes: use "
            "model.matcher.name=naaf, or data.captions=all in one process"
        )
    with single_precision(images.mask.device) as was_mixed:
        if was_mixed:
            images, texts = single_fragments(images), single_fragments(texts)
        return _score_by_caption(score, boundary, images, texts)


def _score_by_caption(
    score: Callable[[Encoded, Encoded], Tensor],
    boundary: ReferenceBoundary,
    images: Encoded,
    texts: Encoded,
) -> Tensor:
    matched: list[Tensor] = []
    mismatched: list[Tensor] = []
    sampled = 0
    columns: list[Tensor] = []
    for i in range(len(texts)):
        text = texts[i : i + 1]
        column = score(images, text)[:, 0]
        columns.append(column)
        with torch.no_grad():
            if int(column.argmax()) == i:
                matched.append(_word_maxima(images[i : i + 1], text))
                easiest = int(column.argmin())
                mismatched.append(_word_maxima(images[easiest : easiest + 1], text))
                sampled += int(text.mask.sum())
                if sampled > boundary.min_words:
                    boundary.update(torch.cat(matched), torch.cat(mismatched))
            if sampled < boundary.min_words:
                boundary.state[:2] = 0.0
    for row, kind in zip(boundary.histogram, (matched, mismatched), strict=True):
        if kind:
            row += histogram(torch.cat(kind).view(1, 1, -1))[0]
    return torch.stack(columns, dim=1)


def _word_maxima(image: Encoded, text: Encoded) -> Tensor:
    assert image.fragments is not None  # noqa: S101 - a local matcher's input
    assert text.fragments is not None  # noqa: S101
    sims = text.fragments[0, text.mask[0]] @ image.fragments[0, image.mask[0]].T
    return sims.amax(-1).double()
