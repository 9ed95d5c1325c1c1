"""NAAF as the public code computes it: the boundary changes from caption to caption of a batch.

Each caption is scored with the boundary that the previous caption left, and updates the boundary if
its own image ranks first. These updates are sequential, so this is the only matcher that loops over
captions. The paper's form (`naaf`) does not.
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
from counterfoil.matchers.fragment_matcher import fragments, single_fragments, single_precision
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
        """The histogram of the epoch's samples with its boundary; resets the histogram."""
        return close_histogram(self.histogram, self.thres, self.alpha)

    def update(self, matched: Tensor, mismatched: Tensor) -> None:
        """Update both boundaries from all samples of the batch so far."""
        mean_pos, std_pos = float(matched.mean()), float(matched.std())
        mean_neg, std_neg = float(mismatched.mean()), float(mismatched.std())
        self.state[2:] = self.state.new_tensor([mean_pos, mean_neg, std_pos, std_neg])
        a = std_pos**2 - std_neg**2
        b = 2 * (mean_pos * std_neg**2 - mean_neg * std_pos**2)
        c = (mean_neg * std_pos) ** 2 - (mean_pos * std_neg) ** 2
        c += 2 * (std_pos * std_neg) ** 2 * math.log(std_neg / (self.alpha * std_pos) + 1e-8)
        discriminant = b**2 - 4 * a * c
        if discriminant <= 0:
            return
        boundaries = (-b + math.sqrt(discriminant)) / (2 * a + 1e-10), mean_pos - 3 * std_pos
        for index, value in enumerate(boundaries):
            new = value if 0 <= value <= 1 else 0.0  # the public code sets values above 1 to 0
            old = self.state[index]
            self.state[index] = (1 - OLD_BOUNDARY_SHARE) * new + OLD_BOUNDARY_SHARE * old


@matchers.register("naaf-reference")
class ReferenceNAAF(NAAF):
    """NAAF as the public code computes and trains it, for its checkpoints.

    Differences from the paper: the boundary is recomputed after each caption of a batch, with the
    least similar image as the wrong one. At inference it is μ₊ − 3σ₊. The relevance weights use
    LeakyReLU, and words are treated as unit vectors. Propagation (eq. 9, with λ = 5) only decides
    which words have a negative effect. Options that have no effect raise an error.
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
        if not self.masks:  # propagation acts as a mask here
            refuse_unused(type(self), "model.matcher", "masks=false", intra=options["intra"])

    def boundary_of(self, side: str) -> float:
        return self.reference.thres if self.training else self.reference.thres_safe

    def negative_effect(self, s_i: Tensor, tile: Tile) -> Tensor:
        if tile.query_gram_QNN is None or not self.needs_query_gram or not self.masks:
            return super().negative_effect(s_i, replace(tile, query_gram_QNN=None))
        return s_i * (self.w_intra(tile.query_gram_QNN, tile) @ s_i < 0)

    def positive_part(self, s: Tensor) -> Tensor:
        return leaky(s)

    def word_norms(self, tile: Tile) -> Tensor:
        return torch.ones_like(tile.norms_QN)  # no gradient through the norms

    @property
    def mines_while_scoring(self) -> bool:
        """Whether scoring a batch updates the boundary."""
        return self.training and self.mining

    def score_block(self, images: Encoded, texts: Encoded, job: ScoringJob) -> Tensor:
        if self.mines_while_scoring:
            return score_with_mining(self.torch_scores, self.reference, images, texts)
        return super().score_block(images, texts, job)

    def paired(self, images: Encoded, texts: Encoded) -> Tensor | None:
        """Scores of extra pairs, such as foils; the boundary stays as the batch left it."""
        if not self.mines_while_scoring:
            return None
        return block_diagonals(partial(super().score_block, job=ScoringJob()), images, texts)

    def observe(self, observation: Observation) -> None:
        """Does nothing: the boundary is updated while a batch is scored."""

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
    """Scores of a training batch of pairs; the boundary is updated after each caption."""
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
    columns: list[Tensor] = []
    sampled_words = 0
    for i in range(len(texts)):
        text = texts[i : i + 1]
        column = score(images, text)[:, 0]
        columns.append(column)
        with torch.no_grad():
            if int(column.argmax()) == i:
                matched.append(_word_maxima(images[i : i + 1], text))
                easiest = int(column.argmin())
                mismatched.append(_word_maxima(images[easiest : easiest + 1], text))
                sampled_words += int(text.mask.sum())
                if sampled_words > boundary.min_words:
                    boundary.update(torch.cat(matched), torch.cat(mismatched))
            if sampled_words < boundary.min_words:
                boundary.state[:2] = 0.0
    for row, samples in zip(boundary.histogram, (matched, mismatched), strict=True):
        if samples:
            row += histogram(torch.cat(samples).view(1, 1, -1))[0]
    return torch.stack(columns, dim=1)


def _word_maxima(image: Encoded, text: Encoded) -> Tensor:
    """Highest similarity of each word of a text with a region of an image."""
    sims = fragments(text)[0, text.mask[0]] @ fragments(image)[0, image.mask[0]].T
    return sims.amax(-1).double()
