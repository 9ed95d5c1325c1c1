"""A first stage fitted to a matcher of fragments: the bilinear form nearest to its scores.

With φ(x) = [mean of the fragments; their maximum; 1], each at unit length, a sample of scores S of
captions with images is approximated by Φ_captions W Φ_imagesᵀ. Ridge regression gives W in closed
form; its singular vectors turn φ of either side into vectors whose inner product is that form.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from counterfoil.encoders import Encoded
from counterfoil.encoders.copies import members_of
from counterfoil.errors import DataError
from counterfoil.matchers.copies import CopiedMatcher
from counterfoil.models.model import Model

PENALTIES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Ridge penalties that are tried, as shares of the mean eigenvalue."""


@dataclass(frozen=True)
class Fit:
    """Maps [features, dim] of φ to vectors, one for each side.

    ``gain`` is how much more it found than pooled vectors do, on pairs held out.
    """

    images: Tensor
    captions: Tensor
    gain: float = 0.0

    def save(self, path: Path) -> None:
        maps = {"images": self.images, "captions": self.captions}
        save_file({side: x.contiguous() for side, x in maps.items()}, path)

    @classmethod
    def load(cls, path: Path) -> Fit:
        try:
            maps = load_file(path)
            return cls(maps["images"], maps["captions"])
        except (SafetensorError, OSError, KeyError) as error:
            raise DataError(f"{path}: cannot be read, build the index again ({error})") from None


def features(model: Model, encoded: Encoded) -> Tensor:
    """φ [n, features] of encoded items; members of an ensemble side by side."""
    matcher = model.matcher
    count = len(matcher.members) if isinstance(matcher, CopiedMatcher) else 1
    parts = []
    for member in members_of(encoded, count):
        assert member.fragments is not None  # noqa: S101 - fitted only for matchers of fragments
        mask = member.mask[..., None]
        unit = F.normalize(member.fragments.float(), dim=-1) * mask
        largest = unit.masked_fill(~mask, -2.0).amax(1).masked_fill(~mask.any(1), 0.0)
        parts += [F.normalize(unit.sum(1), dim=-1), F.normalize(largest, dim=-1)]
    return torch.cat([*parts, torch.ones_like(parts[0][:, :1])], dim=1)


def solve(captions: Tensor, images: Tensor, scores: Tensor, pooled: Tensor, dim: int) -> Fit:
    """The fit with the penalty that does best on a fifth of both sides, held out.

    ``scores`` [captions, images] are the matcher's, ``pooled`` those of pooled vectors.
    """
    seen = max(1, len(captions) * 4 // 5)
    ridge = _Ridge(captions[:seen], images[:seen], scores[:seen, :seen])
    held = scores[seen:, seen:]
    guesses = {
        penalty: captions[seen:] @ ridge.form(penalty) @ images[seen:].T for penalty in PENALTIES
    }
    best = max(
        PENALTIES,
        key=lambda p: float(_correlation(guesses[p], held) + _correlation(guesses[p].T, held.T)),
    )
    form = _Ridge(captions, images, scores).form(best)
    left, values, right = torch.linalg.svd(form, full_matrices=False)
    roots = values[:dim].sqrt()
    gain = _found(guesses[best], held) - _found(pooled[seen:, seen:], held)
    return Fit((right[:dim].T * roots).float(), (left[:, :dim] * roots).float(), gain)


def _found(guess: Tensor, truth: Tensor) -> float:
    """Share of the best twentieth of each row and column among the best tenth of the guess."""
    shares = []
    for one, other in ((guess, truth), (guess.T, truth.T)):
        few = max(1, one.shape[1] // 20)
        edge = one.topk(2 * few, dim=1).values[:, -1:]
        best = other.topk(few, dim=1).indices
        shares.append((one.gather(1, best) >= edge).double().mean())
    return float(sum(shares)) / 2


class _Ridge:
    """(CᵀC + λ)⁻¹ CᵀS I (IᵀI + λ)⁻¹ for many λ at the cost of one."""

    def __init__(self, captions: Tensor, images: Tensor, scores: Tensor) -> None:
        self.of_captions = torch.linalg.eigh(captions.T @ captions)
        self.of_images = torch.linalg.eigh(images.T @ images)
        self.core = self.of_captions[1].T @ (captions.T @ scores @ images) @ self.of_images[1]

    def form(self, penalty: float) -> Tensor:
        rows, columns = (
            values.clamp(min=0) + penalty * values.mean()
            for values, _ in (self.of_captions, self.of_images)
        )
        inner = self.core / rows[:, None] / columns[None]
        return self.of_captions[1] @ inner @ self.of_images[1].T


def _correlation(guess: Tensor, truth: Tensor) -> Tensor:
    """Mean over rows of the correlation of a row with its counterpart."""
    one, other = (x - x.mean(1, keepdim=True) for x in (guess, truth))
    return F.cosine_similarity(one, other, dim=1).mean()
