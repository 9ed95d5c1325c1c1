"""Pretrained word vectors (GloVe) for the words of a vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from counterfoil.data.vocabulary import Vocabulary
from counterfoil.errors import DataError


@dataclass(frozen=True)
class WordVectors:
    """One row per vocabulary entry; words without a vector get small uniform noise."""

    table: NDArray[np.float32]
    found: int


def load_vectors(path: str | Path, vocabulary: Vocabulary, seed: int = 0) -> WordVectors:
    """Read a GloVe text file (``word x1 x2 …``) or an npz with arrays ``words`` and ``vectors``."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file of word vectors")
    rows = _read_npz(path, vocabulary) if path.suffix == ".npz" else _read_text(path, vocabulary)
    if not rows:
        raise DataError(f"{path}: none of the {len(vocabulary)} words has a vector here")
    dim = len(next(iter(rows.values())))
    table = np.random.default_rng(seed).uniform(-0.1, 0.1, (len(vocabulary), dim))
    for number, vector in rows.items():
        table[number] = vector
    table[vocabulary.pad] = 0.0
    return WordVectors(table.astype(np.float32), len(rows))


def _read_text(path: Path, vocabulary: Vocabulary) -> dict[int, NDArray[np.float32]]:
    rows: dict[int, NDArray[np.float32]] = {}
    dim = 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            word, _, numbers = line.rstrip("\n").partition(" ")
            if number == 1 and len(numbers.split()) == 1:  # word2vec's "count dim" header
                continue
            if word not in vocabulary:
                continue
            try:
                vector = np.array(numbers.split(), dtype=np.float32)
            except ValueError:
                raise DataError(f"{path}, line {number}: not a word and its numbers") from None
            dim = dim or len(vector)
            if len(vector) != dim or not np.isfinite(vector).all():
                raise DataError(f"{path}, line {number}: expected {dim} finite numbers")
            rows[vocabulary.index[word]] = vector
    return rows


def _read_npz(path: Path, vocabulary: Vocabulary) -> dict[int, NDArray[np.float32]]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            names, vectors = archive["words"], archive["vectors"]
    except (KeyError, ValueError, OSError) as error:
        raise DataError(f"{path}: expected arrays 'words' and 'vectors' ({error})") from None
    if len(names) != len(vectors):
        raise DataError(f"{path}: {len(names)} words but {len(vectors)} vectors")
    return {
        vocabulary.index[str(word)]: np.asarray(vector, dtype=np.float32)
        for word, vector in zip(names, vectors, strict=True)
        if str(word) in vocabulary
    }
