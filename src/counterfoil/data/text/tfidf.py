"""Latent semantic space of captions (LSEH): stems, TF-IDF and a truncated SVD.

Captions that share rare words are close to each other, even if they belong to different images.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from counterfoil.core.errors import ConfigError
from counterfoil.data.text.words import STOP_WORDS, stem, words

_OVERSAMPLING = 10
_NO_DIRECTION = 1e-5


@dataclass(frozen=True)
class TermMatrix:
    """TF-IDF weights [captions, terms] as compressed sparse rows; ``terms`` name the columns.

    Caption ``i`` has ``columns[starts[i]:starts[i + 1]]`` and the same slice of ``weights``.
    """

    terms: list[str]
    starts: NDArray[np.int64]
    columns: NDArray[np.int64]
    weights: NDArray[np.float32]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.starts) - 1, len(self.terms)

    def tensor(self) -> Tensor:
        rows = np.repeat(np.arange(self.shape[0], dtype=np.int64), np.diff(self.starts))
        indices = torch.from_numpy(np.stack([rows, self.columns]))
        return torch.sparse_coo_tensor(
            indices,
            torch.from_numpy(self.weights),
            self.shape,
            is_coalesced=True,
            check_invariants=False,
        )


@dataclass(frozen=True)
class CaptionSpace:
    """Vectors [n, dim] of captions; zero for captions without content words."""

    vectors: Tensor

    def similarity(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Cosine [rows, columns] of captions by index; zero if a vector is zero."""
        return self._directions(rows) @ self._directions(columns).T

    def _directions(self, captions: Tensor) -> Tensor:
        return torch.nn.functional.normalize(self.vectors[captions], dim=1)


def caption_space(
    captions: Sequence[str], dim: int = 400, seed: int = 122, iterations: int = 10
) -> CaptionSpace:
    """The semantic space of captions; deterministic for a list and a seed."""
    return CaptionSpace(truncated_svd(tf_idf(captions).tensor(), dim, seed, iterations))


def stems(caption: str) -> list[str]:
    """Stems of the content words, with repetitions.

    >>> stems("Two dogs are running on the beach.")
    ['two', 'dog', 'run', 'beach']
    """
    return [
        stem(word)
        for word in words(caption)
        if word not in STOP_WORDS and any(letter.isalnum() for letter in word)
    ]


def tf_idf(captions: Sequence[str]) -> TermMatrix:
    """Counts of stems times ln((1 + n) / (1 + df)) + 1, with rows of L2 norm 1 (or empty)."""
    index: dict[str, int] = {}
    starts, columns, counts = [0], list[int](), list[int]()
    for caption in captions:
        row = Counter(index.setdefault(term, len(index)) for term in stems(caption))
        for column in sorted(row):
            columns.append(column)
            counts.append(row[column])
        starts.append(len(columns))
    column_of = np.array(columns, dtype=np.int64)
    frequency = np.bincount(column_of, minlength=len(index))
    idf = np.log((1 + len(captions)) / (1 + frequency)) + 1
    weights = np.array(counts, dtype=np.float64) * idf[column_of]
    rows = np.repeat(np.arange(len(captions)), np.diff(starts))
    norms = np.sqrt(np.bincount(rows, weights**2, minlength=len(captions)))
    return TermMatrix(
        list(index),
        np.array(starts, dtype=np.int64),
        column_of,
        (weights / norms[rows]).astype(np.float32),
    )


@torch.no_grad()
def truncated_svd(matrix: Tensor, dim: int, seed: int = 122, iterations: int = 10) -> Tensor:
    """U·Σ [rows, dim] for the largest singular values of a sparse matrix, largest first.

    Columns beyond the rank are zero. The sign of each column makes its heaviest term positive. The
    result depends on the seed, not on torch's global generator.
    """
    if dim < 1:
        raise ConfigError(f"caption vectors: expected at least 1 dimension, got {dim}")
    rows, terms = matrix.shape
    width = min(dim + _OVERSAMPLING, rows, terms)
    if width == 0:
        return torch.zeros(rows, dim)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _, lengths, axes = torch.svd_lowrank(matrix, q=width, niter=iterations)
    rank = int((lengths > _NO_DIRECTION * lengths[0]).sum())
    axes = axes[:, : min(dim, rank)]
    heaviest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    vectors = torch.sparse.mm(matrix, axes * heaviest.sign())
    return torch.nn.functional.pad(vectors, (0, dim - vectors.shape[1]))
