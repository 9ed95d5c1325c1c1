"""Vocabularies and tokenizers of imported models, read from files or made of placeholders.

A public checkpoint has one vector per word but not the words. Those are in JSON files (SCAN, NAAF)
or in a pickled `Vocabulary` (vsepp, VSRN, DivE); for BERT in a folder of `transformers` or a list
of word pieces.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from counterfoil.core.errors import CheckpointError, DataError, MissingExtraError
from counterfoil.core.storage.reading import JSON_BYTES, open_regular, read_text
from counterfoil.data.pickle_values import (
    PYTHON,
    ForbiddenNameError,
    Global,
    PickleDamagedError,
    PickleEncodingError,
    PickleError,
    PickleRefusedError,
    StandIn,
    TooManyInstructionsError,
    resolve,
)
from counterfoil.data.pickles import PickleReader
from counterfoil.data.text.tokenizers import HuggingFaceText
from counterfoil.data.text.vocabulary import (
    END,
    MASK,
    PAD,
    START,
    UNK,
    Vocabulary,
    checked_words,
    load_words,
)

SPECIALS = (PAD, START, END, UNK)
OPERATIONS, MAX_OPERATIONS = 1_000_000, 4_000_000
"""Pickle instructions allowed: a quarter of the file's bytes, within these limits.

A word needs five instructions in about 24 bytes, so 800,000 words is the maximum.
"""

BERT_SPECIALS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


def read_entries(path: str | Path) -> list[str]:
    """Words in the order of their ids, as in the file (``<mask>`` not appended)."""
    path = Path(path)
    if path.suffix.lower() in (".pkl", ".pickle"):
        return entries_of(_read_pickle(path), str(path))
    return load_words(path)


def entries_of(index: Mapping[Any, Any], source: str) -> list[str]:
    """Words of a mapping word → number, in order."""
    words: list[str | None] = [None] * len(index)
    for word, number in index.items():
        if not isinstance(word, str) or type(number) is not int:
            raise DataError(
                f"{source}: expected word → number, found {reprlib.repr(word)} → "
                f"{reprlib.repr(number)}"
            )
        if 0 <= number < len(words):
            words[number] = word
    complete = [word for word in words if word is not None]
    if len(complete) != len(words):
        raise DataError(f"{source}: word numbers are not 0…{len(index) - 1}, each once")
    return checked_words(complete, source)


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
    """A vocabulary for an embedding of ``rows`` rows; raises if the sizes differ.

    The VSE∞ family appends ``<mask>`` at run time (``appends_mask``), so its embeddings have one
    row more than its files have words. The SCAN family has no ``<mask>``; its embedding gets
    another row because `Vocabulary` always has one (see `Importer.weights`).
    """
    appended = appends_mask and MASK not in entries
    if len(entries) + appended != rows:
        also = " and <mask>" if appended else ""
        raise CheckpointError(
            f"{source}: {len(entries):,} words{also}, but the checkpoint's embedding has {rows:,} "
            "rows: this is the vocabulary of another model"
        )
    return Vocabulary(entries, source=source)


class _VocabularyState(StandIn):
    """The attributes of a pickled Vocabulary."""

    def finish(self, content: Any) -> Any:
        return content


def _make(*arguments: Any) -> _VocabularyState:
    if arguments:
        raise PickleRefusedError("it wants to call 'Vocabulary' with arguments")
    return _VocabularyState()


def _find(name: str) -> Global | None:
    if name.endswith(".Vocabulary"):  # under __main__, vocab, lib.vocab …
        return Global(name, _make)
    return PYTHON.get(name)


def _read_pickle(path: Path) -> Mapping[Any, Any]:
    try:
        with open_regular(path, JSON_BYTES) as file:
            try:
                layout = _load(file, "utf-8")
            except PickleEncodingError:  # Python 2 strings in another encoding
                file.seek(0)
                layout = _load(file, "latin1")
    except FileNotFoundError:
        raise DataError(f"{path}: no such vocabulary file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except ForbiddenNameError as error:
        raise CheckpointError(
            f"{path}: holds {error.name!r}; only an object of a class 'Vocabulary' is accepted, as "
            "anything else could run code (nothing was run)"
        ) from None
    except PickleDamagedError as error:
        raise DataError(f"{path}: not a readable pickle ({error})") from None
    except TooManyInstructionsError as error:
        raise CheckpointError(f"{path}: refused: {error}; save it as JSON") from None
    except PickleError as error:
        raise CheckpointError(f"{path}: refused: {error} (nothing was run)") from None
    index = layout.get("word2idx") if isinstance(layout, dict) else None
    if not isinstance(index, dict):
        raise DataError(f"{path}: not a pickled Vocabulary (no word2idx in it)")
    return index


def _load(file: BinaryIO, encoding: str) -> Any:
    end = os.fstat(file.fileno()).st_size
    operations = min(max(OPERATIONS, end // 4), MAX_OPERATIONS)
    raw = PickleReader(file, end, _find, encoding=encoding, operations=operations).load()
    return resolve(raw, frozenset(), 4 * operations)


def read_tokenizer(path: str | Path, rows: int) -> HuggingFaceText:
    """The tokenizer for an embedding of ``rows`` rows; raises if the sizes differ.

    A ``vocab.txt`` is read as cased, as UNITER's is.
    """
    path = Path(path)
    text = HuggingFaceText.from_pretrained(str(path)) if path.is_dir() else _of_pieces(path)
    if len(text) != rows:
        raise CheckpointError(
            f"{path}: a tokenizer of {len(text):,} pieces, but the checkpoint's embedding has "
            f"{rows:,} rows: this is the tokenizer of another model"
        )
    return text


def _of_pieces(path: Path) -> HuggingFaceText:
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        raise MissingExtraError("transformers", "hf", "a Hugging Face tokenizer") from None
    from tokenizers import BertWordPieceTokenizer

    try:
        pieces = read_text(path).splitlines()
    except FileNotFoundError:
        raise DataError(f"{path}: no such tokenizer folder or vocab.txt") from None
    except OSError as error:
        raise DataError(f"{path}: not a readable vocab.txt ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a readable vocab.txt ({error})") from None
    missing = [piece for piece in BERT_SPECIALS.values() if piece not in pieces]
    if missing:
        raise DataError(
            f"{path}: not a vocab.txt of BERT with one piece per line (no {missing[0]})"
        )
    index = {piece: number for number, piece in enumerate(pieces)}
    core = BertWordPieceTokenizer(index, lowercase=False, strip_accents=False)
    return HuggingFaceText(
        PreTrainedTokenizerFast(tokenizer_object=core._tokenizer, **BERT_SPECIALS)
    )
