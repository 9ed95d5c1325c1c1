"""Latent semantics of captions: stems, TF-IDF and a truncated SVD, after LSEH.

Captions that share rare words come to lie close to each other, whichever image they belong to.
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
from counterfoil.data.text.stemming import stem
from counterfoil.data.text.words import STOP_WORDS, words

_OVERSAMPLING = 10
_NO_DIRECTION = 1e-5


@dataclass(frozen=True)
class TermMatrix:
    """Rows of TF-IDF weights [captions, terms] in compressed form; ``terms`` name the columns.

    ``weights[starts[i]:starts[i + 1]]`` and the ``columns`` alike are those of caption ``i``.
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
        places = torch.from_numpy(np.stack([rows, self.columns]))
        return torch.sparse_coo_tensor(
            places,
            torch.from_numpy(self.weights),
            self.shape,
            is_coalesced=True,
            check_invariants=False,
        )


@dataclass(frozen=True)
class CaptionSpace:
    """Vectors [n, dim] of captions; those without a word that counts are zero."""

    vectors: Tensor

    def similarity(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Cosine [rows, columns] between captions given by index; zero where a vector is zero."""
        return self._directions(rows) @ self._directions(columns).T

    def _directions(self, captions: Tensor) -> Tensor:
        return torch.nn.functional.normalize(self.vectors[captions], dim=1)


def caption_space(
    captions: Sequence[str], dim: int = 400, seed: int = 122, iterations: int = 10
) -> CaptionSpace:
    """The semantic space of a list of captions; the same list and seed give the same vectors."""
    return CaptionSpace(truncated_svd(tf_idf(captions).tensor(), dim, seed, iterations))


def stems(caption: str) -> list[str]:
    """Stems of the words that carry meaning.

    >>> stems("Two dogs are running on the beach.")
    ['two', 'dog', 'run', 'beach']
    """
    return [
        stem(word)
        for word in words(caption)
        if word not in STOP_WORDS and any(letter.isalnum() for letter in word)
    ]


def tf_idf(captions: Sequence[str]) -> TermMatrix:
    """Counts of stems times ln((1 + n) / (1 + df)) + 1, every row of length one or empty."""
    index: dict[str, int] = {}
    starts, columns, counts = [0], list[int](), list[int]()
    for caption in captions:
        row = Counter(index.setdefault(term, len(index)) for term in stems(caption))
        for column in sorted(row):
            columns.append(column)
            counts.append(row[column])
        starts.append(len(columns))
    place = np.array(columns, dtype=np.int64)
    frequency = np.bincount(place, minlength=len(index))
    idf = np.log((1 + len(captions)) / (1 + frequency)) + 1
    weights = np.array(counts, dtype=np.float64) * idf[place]
    rows = np.repeat(np.arange(len(captions)), np.diff(starts))
    norms = np.sqrt(np.bincount(rows, weights**2, minlength=len(captions)))
    return TermMatrix(
        list(index),
        np.array(starts, dtype=np.int64),
        place,
        (weights / norms[rows]).astype(np.float32),
    )


@torch.no_grad()
def truncated_svd(matrix: Tensor, dim: int, seed: int = 122, iterations: int = 10) -> Tensor:
    """U·Σ [rows, dim] of a sparse matrix's largest singular values, largest first.

    Columns beyond the rank are zero. The sign of each column is such that the term which weighs
    most in it weighs positively. The seed alone decides the random numbers.
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
