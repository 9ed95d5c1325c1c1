"""Word vocabularies (built from captions, or SCAN's and NAAF's files) and word vectors."""

from __future__ import annotations

import json
import math
import reprlib
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from counterfoil.core.errors import DataError
from counterfoil.core.storage.arrays import ArrayError, parse_header
from counterfoil.core.storage.reading import MIB, VECTORS_BYTES, open_regular, read_lines, read_text
from counterfoil.data.text.words import words

PAD, START, END, UNK, MASK = "<pad>", "<start>", "<end>", "<unk>", "<mask>"
SPECIALS = (PAD, START, END, UNK, MASK)
MAX_FILE_BYTES = 1 << 26
"""Limit of a vocabulary file; one with 400,000 words has a quarter of that."""


class Vocabulary:
    """An ordered list of words; the id of a word is its index.

    >>> vocabulary = Vocabulary.build(["a dog runs", "a cat"], min_count=2)
    >>> vocabulary.encode("a dog")
    [1, 5, 3, 2]
    """

    def __init__(self, entries: Sequence[str], source: str = "vocabulary") -> None:
        self.entries = checked_words(list(entries), source)
        self.index = {word: number for number, word in enumerate(self.entries)}
        if len(self.index) != len(self.entries):
            repeated = next(word for word, n in Counter(self.entries).items() if n > 1)
            raise DataError(f"{source}: the word {repeated!r} is listed twice")
        for special in (PAD, START, END, UNK):
            if special not in self.index:
                raise DataError(f"{source}: the entry {special} is missing")
        if MASK not in self.index:  # public files lack it; their training code appends it
            self.index[MASK] = len(self.entries)
            self.entries.append(MASK)

    @classmethod
    def build(cls, captions: Iterable[str], min_count: int = 4) -> Vocabulary:
        """Words that occur at least ``min_count`` times, most frequent first, ties by spelling."""
        counts = Counter(word for caption in captions for word in words(caption))
        frequent = [word for word, n in counts.items() if n >= min_count and word not in SPECIALS]
        frequent.sort(key=lambda word: (-counts[word], word))
        return cls([*SPECIALS, *frequent])

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, word: object) -> bool:
        return word in self.index

    @property
    def pad(self) -> int:
        return self.index[PAD]

    def encode(self, caption: str) -> list[int]:
        """Ids of ``<start>``, the caption's words and ``<end>``."""
        return self.encode_words(words(caption))

    def encode_words(self, tokens: Sequence[str]) -> list[int]:
        unknown = self.index[UNK]
        ids = [self.index.get(word, unknown) for word in tokens]
        return [self.index[START], *ids, self.index[END]]

    def save(self, path: Path) -> None:
        """Write the SCAN layout: word2idx, idx2word, idx."""
        layout = {
            "word2idx": self.index,
            "idx2word": {str(number): word for number, word in enumerate(self.entries)},
            "idx": len(self.entries),
        }
        path.write_text(json.dumps(layout, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Read SCAN's JSON (word2idx, idx2word, idx) or NAAF's (word2idx, char_level, max_len)."""
        return cls(load_words(Path(path)), source=str(path))


def load_words(path: Path) -> list[str]:
    """Words of a JSON vocabulary file in the order of their numbers."""
    try:
        layout = json.loads(read_text(path, MAX_FILE_BYTES))
    except FileNotFoundError:
        raise DataError(f"{path}: no such vocabulary file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except RecursionError:
        raise DataError(f"{path}: not a JSON vocabulary (it is nested too deeply)") from None
    except ValueError as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise DataError(f"{path}: not a JSON vocabulary ({error})") from None
    index = layout.get("word2idx") if isinstance(layout, dict) else None
    if not isinstance(index, dict) or not all(type(n) is int for n in index.values()):
        raise DataError(f"{path}: expected a JSON object with 'word2idx': word → number")
    if sorted(index.values()) != list(range(len(index))):
        raise DataError(f"{path}: word numbers are not 0…{len(index) - 1}, each once")
    return checked_words(sorted(index, key=index.__getitem__), str(path))


def checked_words(words: list[str], source: str) -> list[str]:
    """The words, after checking that all can be encoded as UTF-8 (no lone surrogates)."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise DataError(
                f"{source}: the word {reprlib.repr(word)} is not Unicode text"
            ) from None
    return words


@dataclass(frozen=True)
class WordVectors:
    """A table [words, dim]; ``count`` words have a vector, the others small uniform noise."""

    table: NDArray[np.float32]
    count: int


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
    except Exception as error:  # a damaged archive raises nearly anything
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
    """An array of an .npz; shape and unpacked size are checked before allocation."""
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
