"""Diagnostics of a batch from the papers: Δs, margins, gradients on the hypersphere."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from counterfoil.models.model import Model
from counterfoil.objectives.base import Anchors, Context, both_directions

QUANTILES = {"p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}


@torch.no_grad()
def score_diagnostics(directions: tuple[Anchors, Anchors]) -> dict[str, Tensor]:
    """Positives, hardest negatives and the gap between them, over the anchors of both directions.

    ``gap`` is the signed mean of positive − hardest. ``gap/abs`` is the mean of |Δs| (SelHN eq. 10,
    figures 3d and 5d) and ``gap/p05`` … ``gap/p95`` are its quantiles. Anchors without a negative
    are ignored; if no anchor has one, only ``positive`` is returned.
    """
    positive = torch.cat([anchors.positive for anchors in directions])
    hardest = torch.cat([anchors.hardest for anchors in directions])
    met = hardest.isfinite()
    count = int(met.sum())
    if count == 0:
        return {"positive": positive.mean()} if len(positive) else {}
    if count < len(met):
        positive, hardest = positive[met], hardest[met]
    gap = positive - hardest
    size = _full(gap.abs())
    levels = torch.tensor(list(QUANTILES.values()), dtype=size.dtype, device=size.device)
    quantiles = torch.quantile(size, levels)
    return {
        "positive": positive.mean(),
        "hardest_negative": hardest.mean(),
        "gap": gap.mean(),
        "gap/abs": size.mean(),
        **{f"gap/{name}": value for name, value in zip(QUANTILES, quantiles, strict=True)},
    }


@torch.no_grad()
def separation(directions: tuple[Anchors, Anchors]) -> dict[str, Tensor]:
    """Share of all negatives that score below the positive of their anchor, ties as one half.

    One half for random scores, one if every positive is on top, independent of the scale of the
    scores. Empty if no anchor has a negative.
    """
    count = sum(int(anchors.is_negative.sum()) for anchors in directions)
    if count == 0:
        return {}
    above = [
        ((_full(a.positive)[:, None] - a.scores).sign() * a.is_negative).sum() for a in directions
    ]
    return {"separation": ((above[0] + above[1]) / count + 1) / 2}


@torch.no_grad()
def margin_histogram(
    directions: tuple[Anchors, Anchors], bins: int = 40, low: float = -1.0, high: float = 1.0
) -> Tensor:
    """Counts [bins] of positive − negative over all anchors and all their negatives.

    This is the margin distribution of NDGL figure 3b. Values below ``low`` or above ``high`` are
    counted in the first or the last bin. Counts of batches can be added.
    """
    margins = torch.cat([(a.positive[:, None] - a.scores).flatten() for a in directions])
    negative = torch.cat([a.is_negative.flatten() for a in directions])
    index = ((_full(margins).nan_to_num() - low) * (bins / (high - low))).clamp(0, bins - 1).long()
    index = index.masked_fill(~negative, bins)  # an extra bin, discarded below
    return torch.bincount(index, minlength=bins + 1)[:bins]


@torch.no_grad()
def tangential_gradients(
    images: Tensor,
    texts: Tensor,
    positives: Tensor,
    context: Context | None = None,
    *,
    margin: float = 0.2,
) -> dict[str, Tensor]:
    """Tangential gradient of the hinge on the hardest negative at unit embeddings.

    ``images`` [n, D] and ``texts`` [m, D] have unit length; anchors and negatives are those of
    `both_directions`. With anchor v, positive t, hardest negative t̂, s_p = v·t and s_n = v·t̂, the
    hinge has the gradients t̂ − t at v, v at t̂ and −v at t (SelHN eq. 7). Only the part tangential
    to the sphere passes through normalization:

    - ``tangent/anchor``: √(‖t̂ − t‖² − (s_n − s_p)²),
    - ``tangent/positive``: √(1 − s_p²),
    - ``tangent/negative``: √(1 − s_n²),

    each the mean over the anchors of both directions whose hinge is active (empty if none is).

    Eq. 8 of the paper starts with the same and a sine, but after the second equality it prints the
    cosine: ‖t̂ − t‖·|s_n − s_p|, s_p and s_n, the lengths (the first times ‖t̂ − t‖) of the radial
    parts, which normalization discards. Their absolute values are ``eq8/anchor``, ``eq8/positive``
    and ``eq8/negative``, for comparison with the paper.

    The consequence differs from the paper, too. Δs → 0 alone does not make the gradient vanish: at
    Δs = 0 the anchor has the full gradient ‖t̂ − t‖, and t and t̂ the largest if both are orthogonal
    to v. The gradient vanishes for t̂ → t, which happens to all anchors when the embeddings of a
    modality collapse to one point. Then the anchor's part goes to 0, and the parts of t and t̂
    become opposite and cancel in their common encoder. If both modalities collapse to the same
    point, these parts go to 0 as well. Since |Δs| ≤ ‖t̂ − t‖, a small Δs over the whole batch is a
    sign of that collapse, not its cause.
    """
    images, texts = _full(images), _full(texts)
    image, text = _pairs(positives)
    directions = both_directions(images @ texts.T, positives, context)
    parts = [
        _triplets(directions[0], images[image], texts[text], texts, margin),
        _triplets(directions[1], texts[text], images[image], images, margin),
    ]
    anchor, positive, negative, active = (torch.cat(both) for both in zip(*parts, strict=True))
    count = int(active.sum())
    if count == 0:
        return {}
    difference = negative - positive
    along_anchor, across_anchor = _split(difference, anchor)
    along_positive, across_positive = _split(anchor, positive)
    along_negative, across_negative = _split(anchor, negative)
    of_each = {
        "tangent/anchor": across_anchor,
        "tangent/positive": across_positive,
        "tangent/negative": across_negative,
        "eq8/anchor": difference.norm(dim=1) * along_anchor.abs(),
        "eq8/positive": along_positive.abs(),
        "eq8/negative": along_negative.abs(),
    }
    # A mask, not an index: a number of rows that depends on values needs a host sync.
    means = (torch.stack(list(of_each.values())) * active).sum(1) / count
    return dict(zip(of_each, means, strict=True))


def projection_gradient(model: Model) -> dict[str, Tensor]:
    """Norm of the gradient of the image encoder's first linear layer (SelHN figure 3b), if any."""
    layers = (part for part in model.image_encoder.modules() if isinstance(part, nn.Linear))
    layer = next(layers, None)
    if layer is None or layer.weight.grad is None:
        return {}
    return {"gradient/projection": torch.linalg.vector_norm(layer.weight.grad)}


def _pairs(positives: Tensor) -> tuple[Tensor, Tensor]:
    """Image and text of each positive pair, in the order of `both_directions`."""
    images, texts = positives.shape
    numbers = torch.arange(images * texts, device=positives.device).view(images, texts)
    pair = both_directions(numbers, positives)[0].positive
    return pair // texts, pair % texts


def _triplets(
    anchors: Anchors, anchor: Tensor, positive: Tensor, candidates: Tensor, margin: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Embeddings of anchors, positives and hardest negatives, and whether each hinge is active."""
    hardest, index = anchors.scores.masked_fill(~anchors.is_negative, -torch.inf).max(1)
    return anchor, positive, candidates[index], hardest - anchors.positive + margin > 0


def _split(gradient: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Inner products of rows with ``at`` [P, D], and lengths of the tangential parts."""
    along = (gradient * at).sum(1)
    # Divided by ‖at‖²: bfloat16 embeddings are off unit length by more than a collapse leaves.
    squared = (at * at).sum(1).clamp(min=torch.finfo(at.dtype).tiny)
    return along, (gradient - (along / squared)[:, None] * at).norm(dim=1)


def _full(x: Tensor) -> Tensor:
    """At least float32, for quantiles and small differences."""
    return x if x.dtype == torch.float64 else x.float()
