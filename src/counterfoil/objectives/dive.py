"""DivE's regularizers: MMD between the two modalities, and diversity within predicted sets."""

from __future__ import annotations

import torch
from torch import Tensor

from counterfoil.core.errors import ConfigError
from counterfoil.encoders.encoded import Encoded, l2_normalize
from counterfoil.matchers.ensemble import split_members
from counterfoil.objectives.base import Context, LossReport, Objective, at_least_float32, objectives


def distances(x: Tensor, y: Tensor | None = None) -> Tensor:
    """Euclidean distances [X, Y], or [X, X] of points with each other.

    Computed from inner products. Distances within rounding error are zero, and a distance of zero
    has no gradient: equal points do not move each other.
    """
    other = x if y is None else y
    squares = x.square().sum(-1)[:, None] + other.square().sum(-1)[None]
    squared = squares - 2 * x @ other.T
    same = squared.detach() <= 16 * torch.finfo(x.dtype).eps * squares.detach()
    if y is None:
        same = same | torch.eye(len(x), dtype=torch.bool, device=x.device)
    return squared.masked_fill(same, 1.0).sqrt().masked_fill(same, 0.0)


def encoded_members(context: Context) -> list[tuple[Encoded, Encoded]]:
    """Images and texts of the global batch, as encoded by each member of the ensemble."""
    if context.services is None:
        raise ConfigError("this objective reads encoded batches, but none came with the scores")
    images, texts = context.services.images.gather(), context.services.texts.gather()
    count = max(1, len(context.members))
    return list(zip(split_members(images, count), split_members(texts, count), strict=True))


@objectives.register("mmd")
class MMD(Objective):
    """MMD: distance between the distributions of image and of text vectors (DivE, PVSE).

    The squared maximum mean discrepancy with the kernel exp(−γ‖x − y‖); as in the public code, the
    norm is not squared, and the kernel of a vector with itself is included. Vectors are those that
    the matcher compares: pooled vectors, members of a set, or fragments.
    """

    requires = "the encoded vectors of the batch"
    needs = "both"

    def __init__(self, *, gamma: float = 0.5) -> None:
        super().__init__()
        self._require_positive(gamma=gamma)
        self.gamma = gamma

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        pairs = encoded_members(context)
        losses = [self._discrepancy(points(images), points(texts)) for images, texts in pairs]
        return LossReport(torch.stack(losses).mean())

    def loss_at_equal_scores(self, anchors: int, negatives: float, epoch: int = 0) -> float | None:
        """Zero: equal vectors have equal distributions."""
        return 0.0

    def _discrepancy(self, x: Tensor, y: Tensor) -> Tensor:
        within = self._kernel(distances(x)) + self._kernel(distances(y))
        return within - 2 * self._kernel(distances(x, y))

    def _kernel(self, distance: Tensor) -> Tensor:
        return (-self.gamma * distance).exp().mean()


@objectives.register("uniformity")
class Uniformity(Objective):
    """Penalty on slot residuals of similar direction, so that sets stay diverse (DivE).

    Mean of exp(−t‖a − b‖²) over all pairs of an item's residuals, normalized to unit length; the
    sum of that of images and of texts. Only for models that predict sets.
    """

    requires = "the residuals of the sets that a model predicts"
    needs = "both"

    def __init__(self, *, t: float = 2.0) -> None:
        super().__init__()
        self._require_positive(t=t)
        self.t = t

    def compute(self, scores: Tensor, positives: Tensor, context: Context) -> LossReport:
        pairs = encoded_members(context)
        losses = [self._similarity(images) + self._similarity(texts) for images, texts in pairs]
        return LossReport(torch.stack(losses).mean())

    def loss_at_equal_scores(self, anchors: int, negatives: float, epoch: int = 0) -> float | None:
        """Nearly zero: residuals may differ even if all items are equal."""
        return 0.0

    def _similarity(self, encoded: Encoded) -> Tensor:
        if encoded.residuals is None:
            raise ConfigError(
                "objective.uniformity: this model predicts no sets; use the models dive or "
                "dive-bert, or leave the term out"
            )
        units = l2_normalize(at_least_float32(encoded.residuals))  # [B, K, D]
        one, other = torch.triu_indices(units.shape[1], units.shape[1], 1, device=units.device)
        squared = (units[:, one] - units[:, other]).square().sum(-1)
        return (-self.t * squared).exp().sum() / max(1, squared.numel())  # 0 for sets of one vector


def points(encoded: Encoded) -> Tensor:
    """The vectors [n, D] of all items together."""
    if encoded.pooled is not None:
        return at_least_float32(encoded.pooled)
    if encoded.fragments is None:
        raise ConfigError("objective.mmd: nothing was kept of the encoded batch")
    return at_least_float32(encoded.fragments[encoded.mask])
