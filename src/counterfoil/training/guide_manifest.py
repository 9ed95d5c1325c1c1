"""`guide.json`: what a guide is made of, in which form, and how far it is."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from counterfoil.errors import DataError
from counterfoil.files import write_atomically
from counterfoil.models.store import WEIGHTS
from counterfoil.reading import read_text
from counterfoil.training.guide_data import DataMark

MANIFEST, FORMAT = "guide.json", 1

Form = Literal["matrix", "embeddings"]

MATRIX_BYTES = 1_000_000_000
"""A matrix up to this size is stored as it is; beyond it, the teachers' encodings are."""


class TeacherMark(BaseModel):
    """A trained run that a guide asks; its weights by their digest."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    model: str
    weights_sha256: str


class Extent(BaseModel):
    """How much of an encoded side is safely on disk (see `guide_store`).

    ``rows`` are fragments, ``cells`` entries of word graphs, ``present`` items that could be read;
    ``widths`` the width of each kind of vector.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    items: int = 0
    present: int = 0
    rows: int = 0
    cells: int = 0
    widths: dict[str, int] = Field(default_factory=dict)


class Manifest(BaseModel):
    """A guide on disk. ``matrix_rows`` and ``sides`` say what has been written so far."""

    model_config = ConfigDict(extra="forbid")

    format: int = FORMAT
    form: Form
    dtype: Literal["float16"] = "float16"
    data: DataMark
    teachers: list[TeacherMark]
    matrix_rows: int = 0
    sides: dict[str, Extent] = Field(default_factory=dict)
    complete: bool = False

    def save(self, folder: Path) -> None:
        write_atomically(folder / MANIFEST, self.model_dump_json(indent=2))

    @property
    def share_done(self) -> float:
        """From 0 to 1, by items encoded and, of a matrix, rows written."""
        if self.complete:
            return 1.0
        encoded = sum(extent.items for extent in self.sides.values())
        if self.form == "matrix":
            done, total = self.matrix_rows, self.data.images
            total_encoded = len(self.teachers) * self.data.captions
        else:
            done = total = 0
            total_encoded = len(self.teachers) * (self.data.captions + self.data.images)
        return (done + encoded) / max(1, total + total_encoded)


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        manifest = Manifest.model_validate_json(read_text(path))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{folder}: not a guide (no {MANIFEST} there); make one with: "
            f"counterfoil guide build RUN … --out {folder}"
        ) from None
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise DataError(f"{path}: damaged ({error})") from None
    if manifest.format != FORMAT:
        raise DataError(
            f"{path}: written in format {manifest.format}, this version reads format {FORMAT}"
        )
    return manifest


def default_form(images: int, captions: int) -> Form:
    return "matrix" if images * captions * 2 <= MATRIX_BYTES else "embeddings"


def weights_digest(model: Path) -> str:
    """SHA-256 of a saved model's weights."""
    digest = hashlib.sha256()
    with (model / WEIGHTS).open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def teacher_folder(guide: Path, number: int) -> Path:
    return guide / f"teacher-{number}"


def side_name(number: int, side: Literal["images", "captions"]) -> str:
    """Where a teacher's encoded images or captions lie in a guide."""
    return f"teacher-{number}/{side}"
