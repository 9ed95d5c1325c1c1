"""The tokenizer of an imported model: a folder of `transformers`, or BERT's list of pieces."""

from __future__ import annotations

from pathlib import Path

from counterfoil.data.texts import HuggingFaceText
from counterfoil.errors import CheckpointError, DataError, MissingExtraError
from counterfoil.reading import read_text

SPECIALS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


def read_tokenizer(path: str | Path, rows: int) -> HuggingFaceText:
    """The tokenizer for a table of so many word vectors; both numbers are named where they differ.

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
    missing = [piece for piece in SPECIALS.values() if piece not in pieces]
    if missing:
        raise DataError(f"{path}: not BERT's vocab.txt, one piece a line ({missing[0]} is missing)")
    index = {piece: number for number, piece in enumerate(pieces)}
    core = BertWordPieceTokenizer(index, lowercase=False, strip_accents=False)
    return HuggingFaceText(PreTrainedTokenizerFast(tokenizer_object=core._tokenizer, **SPECIALS))
