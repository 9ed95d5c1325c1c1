"""Pretrained word vectors (GloVe) for the words of a vocabulary."""

from __future__ import annotations

import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from counterfoil.data.arrays import ArrayError, parse_header
from counterfoil.data.vocabulary import Vocabulary
from counterfoil.errors import DataError
from counterfoil.reading import MIB, VECTORS_BYTES, open_regular, read_lines


@dataclass(frozen=True)
class WordVectors:
    """One row per vocabulary entry; words without a vector get small uniform noise."""

    table: NDArray[np.float32]
    found: int


def load_vectors(path: str | Path, vocabulary: Vocabulary, seed: int = 0) -> WordVectors:
    """Read a GloVe text file (``word x1 x2 …``) or an npz with arrays ``words`` and ``vectors``."""
    path = Path(path)
    try:
        with open_regular(path) as file:
            read = _read_npz if path.suffix == ".npz" else _read_text
            rows = read(path, file, vocabulary)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file of word vectors") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not rows:
        raise DataError(f"{path}: none of the {len(vocabulary)} words has a vector here")
    dim = len(next(iter(rows.values())))
    table = np.random.default_rng(seed).uniform(-0.1, 0.1, (len(vocabulary), dim))
    for number, vector in rows.items():
        table[number] = vector
    table[vocabulary.pad] = 0.0
    return WordVectors(table.astype(np.float32), len(rows))


def _read_text(
    path: Path, file: BinaryIO, vocabulary: Vocabulary
) -> dict[int, NDArray[np.float32]]:
    rows: dict[int, NDArray[np.float32]] = {}
    dim = 0
    for number, line in enumerate(read_lines(file, path, MIB), start=1):
        word, _, numbers = line.decode(errors="replace").rstrip("\r\n").partition(" ")
        if number == 1 and len(numbers.split()) == 1:  # word2vec's "count dim" header
            continue
        if word not in vocabulary:
            continue
        try:
            vector = np.array(numbers.split(), dtype=np.float32)
        except ValueError:
            raise DataError(f"{path}, line {number}: not a word and its numbers") from None
        dim = dim or len(vector)
        if not len(vector) or len(vector) != dim or not np.isfinite(vector).all():
            raise DataError(f"{path}, line {number}: expected {dim or 'some'} finite numbers")
        rows[vocabulary.index[word]] = vector
    return rows


def _read_npz(path: Path, file: BinaryIO, vocabulary: Vocabulary) -> dict[int, NDArray[np.float32]]:
    try:
        with zipfile.ZipFile(file) as archive:
            names, vectors = (_read_member(archive, name) for name in ("words", "vectors"))
    except ArrayError:
        raise
    except Exception as error:  # as with images, a damaged archive raises nearly anything
        raise DataError(f"{path}: expected arrays 'words' and 'vectors' ({error})") from None
    if names.ndim != 1 or names.dtype.kind not in "US" or vectors.ndim != 2:
        raise DataError(
            f"{path}: expected words [n] and vectors [n, dim], found {names.dtype} {names.shape} "
            f"and {vectors.dtype} {vectors.shape}"
        )
    if len(names) != len(vectors):
        raise DataError(f"{path}: {len(names)} words but {len(vectors)} vectors")
    if vectors.dtype.kind not in "fiu" or not np.isfinite(vectors).all():
        raise DataError(f"{path}: 'vectors' are not all finite numbers")
    return {
        vocabulary.index[str(word)]: np.asarray(vector, dtype=np.float32)
        for word, vector in zip(names, vectors, strict=True)
        if str(word) in vocabulary
    }


def _read_member(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    """An array of an .npz, with its shape and unpacked size checked before it is allocated."""
    info = archive.getinfo(f"{name}.npy")
    with archive.open(info) as member:
        shape, dtype, start = parse_header(cast(BinaryIO, member), name)
        needed = start + math.prod(shape) * dtype.itemsize
        if needed > min(info.file_size, VECTORS_BYTES):
            raise ValueError(
                f"'{name}' has {info.file_size} bytes, its shape {shape} needs {needed}, and at "
                f"most {VECTORS_BYTES} are read"
            )
        return np.frombuffer(member.read(needed - start), dtype=dtype).reshape(shape)
