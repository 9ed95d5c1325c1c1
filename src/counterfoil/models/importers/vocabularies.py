"""The words of an imported model: read from a file, or stood in for.

A public checkpoint holds one vector per word but not the words. The files that do are JSON (SCAN,
NAAF) or a pickled object of a class `Vocabulary` (vsepp, VSRN, DivE).
"""

from __future__ import annotations

import io
import json
import pickle  # what comes out of it is limited to one class name, see _VocabularyUnpickler
import pickletools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from counterfoil.data.vocabulary import END, MASK, PAD, START, UNK, Vocabulary
from counterfoil.errors import CheckpointError, DataError

SPECIALS = (PAD, START, END, UNK)


def read_entries(path: str | Path) -> list[str]:
    """Words in the order of their numbers, as the file has them (``<mask>`` not appended)."""
    path = Path(path)
    if path.suffix.lower() in (".pkl", ".pickle"):
        return entries_of(_read_pickle(path), str(path))
    entries = Vocabulary.load(path).entries
    listed = json.loads(path.read_text(encoding="utf-8"))["word2idx"]
    return entries[: len(listed)]


def entries_of(index: Mapping[Any, Any], source: str) -> list[str]:
    """Words of a mapping word → number, in order."""
    words: dict[int, str] = {}
    for word, number in index.items():
        if not isinstance(word, str) or type(number) is not int:
            raise DataError(
                f"{source}: expected word → number, found {word!r:.40} → {number!r:.40}"
            )
        words[number] = word
    if sorted(words) != list(range(len(index))):
        raise DataError(f"{source}: word numbers are not 0…{len(index) - 1}, each once")
    return [words[number] for number in range(len(words))]


def placeholder(rows: int, specials: Sequence[str] = SPECIALS, masked: bool = False) -> list[str]:
    """``<pad> <start> <end> <unk> word4 word5 …``; ``masked``: the last entry is ``<mask>``.

    >>> placeholder(6)
    ['<pad>', '<start>', '<end>', '<unk>', 'word4', 'word5']
    """
    entries = [*specials, *(f"word{number}" for number in range(len(specials), rows))][:rows]
    if masked and rows > len(specials):
        entries[-1] = MASK
    return entries


def fit_to(entries: Sequence[str], rows: int, appends_mask: bool, source: str) -> Vocabulary:
    """A vocabulary for an embedding of so many rows; both numbers are named where they differ.

    The VSE∞ family appends ``<mask>`` when it runs (``appends_mask``), so its embeddings have one
    row more than its files have words. The SCAN family has no such word; as `Vocabulary` always
    does, its embedding gets one row more (see `Importer.weights`).
    """
    appended = appends_mask and MASK not in entries
    if len(entries) + appended != rows:
        also = " and <mask>" if appended else ""
        raise CheckpointError(
            f"{source}: {len(entries):,} words{also}, but the checkpoint's embedding has {rows:,} "
            "rows: this is the vocabulary of another model"
        )
    return Vocabulary(entries, source=source)


class _Held:
    """What a pickled Vocabulary becomes: its attributes, nothing else."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.found = state if isinstance(state, dict) else {}


def _reconstruct(cls: Any, *_: Any) -> _Held:
    """`copyreg._reconstructor` for the one class there is (pickle protocols 0 and 1)."""
    if cls is not _Held:
        raise pickle.UnpicklingError("an object of another class")
    return _Held()


class _VocabularyUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, source: str, encoding: str) -> None:
        super().__init__(io.BytesIO(data), encoding=encoding)
        self.source = source

    def find_class(self, module: str, name: str) -> Any:
        if name == "Vocabulary":  # under __main__, vocab, lib.vocab …
            return _Held
        if f"{module}.{name}" in ("copyreg._reconstructor", "copy_reg._reconstructor"):
            return _reconstruct
        if f"{module}.{name}" in ("builtins.object", "__builtin__.object"):
            return None  # the base class that _reconstruct is told of, and ignores
        raise CheckpointError(
            f"{self.source}: holds '{module}.{name}'; only an object of a class 'Vocabulary' is "
            "accepted, as anything else could run code (nothing was run)"
        )

    def persistent_load(self, pid: Any) -> NoReturn:
        raise CheckpointError(f"{self.source}: not a pickled Vocabulary")


def _read_pickle(path: Path) -> Mapping[Any, Any]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: no such vocabulary file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    found = _load(data, path)
    layout = found.found if isinstance(found, _Held) else found
    index = layout.get("word2idx") if isinstance(layout, dict) else None
    if not isinstance(index, dict):
        raise DataError(f"{path}: not a pickled Vocabulary (no word2idx in it)")
    return index


def _load(data: bytes, path: Path) -> Any:
    try:
        for code, argument, _ in pickletools.genops(data):
            # the unpickler makes room for as many memo entries as the largest number says
            if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and (argument or 0) > len(data):
                raise ValueError("a memo number beyond the file")
        try:
            return _VocabularyUnpickler(data, str(path), "utf-8").load()
        except UnicodeDecodeError:  # Python 2 strings in another encoding
            return _VocabularyUnpickler(data, str(path), "latin1").load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may fail anywhere
        raise DataError(f"{path}: not a readable pickle ({error})") from None
