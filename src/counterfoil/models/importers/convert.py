"""`import_checkpoint`: converts a public checkpoint to a `Model`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from counterfoil.core.errors import CheckpointError, CounterfoilError
from counterfoil.data.text.tokenizers import TextProcessor, WordText
from counterfoil.data.text.vocabulary import Vocabulary
from counterfoil.models.importers.base import Checkpoint, Importer, importers
from counterfoil.models.importers.vocabularies import (
    fit_to,
    placeholder,
    read_entries,
    read_tokenizer,
)
from counterfoil.models.model import Model


@dataclass(frozen=True)
class Imported:
    """An imported model with its origin.

    ``vocabulary`` is the source of its words, None if they are placeholders.
    """

    model: Model
    family: str
    epoch: int | None
    best_rsum: float | None
    vocabulary: str | None

    @property
    def warnings(self) -> list[str]:
        if self.vocabulary is not None:
            return []
        return [
            "the words of this model are placeholders (word4, word5 …): it scores token ids as in "
            "the public code, but knows no words; import it again with --vocab"
        ]

    def as_dict(self) -> dict[str, Any]:
        model = self.model
        return {
            "family": self.family,
            "model": model.spec.name,
            "epoch": self.epoch,
            "best_rsum": self.best_rsum,
            "input_dim": model.input_dim,
            "embed_size": model.spec.embed_size,
            "words": len(model.text),
            "vocabulary": self.vocabulary,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "spec": model.spec.model_dump(),
            "warnings": self.warnings,
        }


def import_checkpoint(
    path: str | Path, family: str, vocabulary: str | Path | None = None
) -> Imported:
    """Import a checkpoint of one of the registered families.

    The model scores as the public code does: ``form="reference"`` (of NAAF: `naaf-reference`) if
    that differs from the paper. Without a vocabulary its words are placeholders, see
    `Imported.warnings`; models with a tokenizer need one.
    """
    kind = importers[family]
    checkpoint = Checkpoint.read(path)
    _check_family(kind, checkpoint)
    try:
        return _convert(kind(checkpoint), family, vocabulary)
    except CounterfoilError:
        raise
    except ValidationError as error:
        wrong = error.errors()[0]
        field = ".".join(str(part) for part in wrong["loc"])
        raise CheckpointError(
            f"{path}: its weights imply an invalid model ({field}: {wrong['msg']})"
        ) from None
    except Exception as error:  # a forged file may fail anywhere
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{path}: its weights and options are not those of {kind.title} ({reason[:200]})"
        ) from error


def _convert(importer: Importer, family: str, vocabulary: str | Path | None) -> Imported:
    spec = importer.spec()
    text, source = _text(importer, vocabulary)
    with torch.device("meta"):  # finds wrong sizes before memory is allocated
        outline = Model(spec, importer.input_dim, text)
    weights = importer.weights(outline)
    model = Model(spec, importer.input_dim, text)
    model.load_state_dict(weights)
    checkpoint = importer.checkpoint
    return Imported(model.eval(), family, checkpoint.epoch, checkpoint.best_rsum, source)


def _check_family(kind: type[Importer], checkpoint: Checkpoint) -> None:
    reason = kind.misfit(checkpoint)
    if reason is None:
        return
    fitting = [name for name in importers if importers[name].misfit(checkpoint) is None]
    advice = (
        f"it looks like one of {importers[fitting[0]].title}: --from {fitting[0]}"
        if fitting
        else f"nor of any other family known here ({', '.join(importers)})"
    )
    raise CheckpointError(
        f"{checkpoint.path}: not a checkpoint of {kind.title} ({reason}); {advice}"
    )


def _text(importer: Importer, path: str | Path | None) -> tuple[TextProcessor, str | None]:
    """The text processor that gives the checkpoint's token ids, and its source."""
    if not importer.tokenizer:
        words, source = _vocabulary(importer, path)
        return WordText(words), source
    if path is None:
        raise CheckpointError(
            f"{importer.checkpoint.path}: its words are those of {importer.tokenizer}, which the "
            "file does not hold: give the folder of that tokenizer, or its vocab.txt, with --vocab"
        )
    return read_tokenizer(path, len(importer.embedding)), str(path)


def _vocabulary(importer: Importer, path: str | Path | None) -> tuple[Vocabulary, str | None]:
    """Words from a file, from the checkpoint, or placeholders; and their source."""
    rows = len(importer.embedding)
    if path is not None:
        return fit_to(read_entries(path), rows, importer.appends_mask, str(path)), str(path)
    source = str(importer.checkpoint.path)
    entries = importer.entries()
    if entries is not None:
        return fit_to(entries, rows, importer.appends_mask, source), source
    if rows < len(importer.specials):
        raise CheckpointError(
            f"{source}: expected an embedding of at least {len(importer.specials)} rows, got {rows}"
        )
    words = placeholder(rows, importer.specials, importer.appends_mask)
    return fit_to(words, rows, False, source), None
