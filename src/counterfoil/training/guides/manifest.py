"""`guide.json`: teachers, form, progress and data fingerprint of a guide.

A guide is indexed by image and caption, so it fits only the same images and captions in the same
order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from counterfoil.core.errors import DataError, first_problem
from counterfoil.core.storage.atomic import write_atomically
from counterfoil.core.storage.reading import digest_of, open_text, read_text
from counterfoil.data.fragments import FragmentTable
from counterfoil.data.pairs import Split
from counterfoil.encoders.stored import Extent
from counterfoil.features.extractors import same_extractor, split_full_name
from counterfoil.models.store import WEIGHTS

IDS, CAPTIONS = "ids.jsonl", "captions.jsonl"

FINGERPRINT_IMAGES = 32
"""Images whose fragments are read for the fingerprint; of the others only their number."""

MANIFEST, FORMAT = "guide.json", 1
Form = Literal["matrix", "embeddings"]

MATRIX_BYTES = 1_000_000_000
"""Largest size of a stored matrix; beyond it, the teachers' encodings are stored."""


class FeatureMark(BaseModel):
    """Extractor, shape and digest (lengths and a sample) of fragments."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dim: int
    fragments: int
    made_by: str | None
    sha256: str


class DataMark(BaseModel):
    """Fingerprint of a training split."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    images: int
    captions: int
    ids_sha256: str
    captions_sha256: str
    features: FeatureMark


def mark_of(split: Split) -> DataMark:
    return DataMark(
        images=len(split),
        captions=len(split.texts),
        ids_sha256=_digest(split.ids),
        captions_sha256=_digest(split.texts),
        features=_features_of(split.require_fragments()),
    )


def write_texts(split: Split, folder: Path) -> None:
    """Write ids and captions into the guide, so that errors can show the first difference."""
    for name, lines in ((IDS, split.ids), (CAPTIONS, split.texts)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_atomically(folder / name, text)


def difference(mark: DataMark, split: Split, folder: Path) -> str | None:
    """How a split differs from that of a guide; None if it does not."""
    now = mark_of(split)
    if (now.images, now.captions) != (mark.images, mark.captions):
        return (
            f"it was made of {mark.images:,} images with {mark.captions:,} captions, these data "
            f"have {now.images:,} images with {now.captions:,} captions"
        )
    if now.ids_sha256 != mark.ids_sha256:
        return _first_difference("image id", folder / IDS, split.ids)
    if now.captions_sha256 != mark.captions_sha256:
        return _first_difference("caption", folder / CAPTIONS, split.texts)
    return _feature_difference(mark.features, now.features)


def _digest(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        data = line.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _features_of(table: FragmentTable) -> FeatureMark:
    digest = hashlib.sha256()
    if table.lengths is not None:
        digest.update(table.lengths[table.rows].astype("<i8").tobytes())
    for image in range(0, len(table), max(1, len(table) // FINGERPRINT_IMAGES)):
        try:
            digest.update(table.stored(image).features.tobytes())
        except (DataError, OSError):
            digest.update(b"unreadable")
    return FeatureMark(
        dim=table.dim,
        fragments=table.max_fragments,
        made_by=table.made_by,
        sha256=digest.hexdigest(),
    )


def _first_difference(what: str, path: Path, here: Sequence[str]) -> str:
    try:
        with open_text(path) as file:
            for index, (line, mine) in enumerate(zip(file, here, strict=False)):
                theirs = json.loads(line)
                if theirs != mine:
                    return f"{what} {index:,} is {theirs!r} in the guide and {mine!r} in these data"
    except (OSError, ValueError):
        pass
    return f"it has other {what}s, or the same in another order"


def _feature_difference(mark: FeatureMark, now: FeatureMark) -> str | None:
    names: dict[str, str] = {
        "made_by": "an extractor",
        "dim": "a width",
        "fragments": "a largest number of fragments",
    }
    for key, name in names.items():
        theirs: Any = getattr(mark, key)
        mine: Any = getattr(now, key)
        if theirs != mine and not (key == "made_by" and _may_be_same(theirs, mine)):
            return f"its features have {name} of {_quoted(theirs)}, these data have {_quoted(mine)}"
    if mark.sha256 != now.sha256:
        return "its features are others: same shape, but not the same numbers of the same images"
    return None


def _may_be_same(theirs: str | None, mine: str | None) -> bool:
    """Whether two extractors can have made the same features, which the digest then decides.

    Guides of earlier versions name extractors without their options.
    """
    if theirs is None or mine is None:
        return False
    return same_extractor(theirs, mine) or theirs == split_full_name(mine)[0]


def _quoted(value: object) -> str:
    return "'none, they were precomputed'" if value is None else repr(value)


class TeacherMark(BaseModel):
    """A trained run that scores for a guide, with the digest of its weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    model: str
    weights_sha256: str


class Manifest(BaseModel):
    """The state of a guide on disk; ``matrix_rows`` and ``sides`` are written so far."""

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
        """Progress from 0 to 1, by encoded items and written matrix rows."""
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
        raise DataError(f"{path}: damaged ({first_problem(error)})") from None
    if manifest.format != FORMAT:
        raise DataError(
            f"{path}: written in format {manifest.format}, this version reads format {FORMAT}"
        )
    return manifest


def default_form(images: int, captions: int) -> Form:
    return "matrix" if images * captions * 2 <= MATRIX_BYTES else "embeddings"


def weights_digest(model: Path) -> str:
    """SHA-256 of a saved model's weights."""
    return digest_of(model / WEIGHTS)


def teacher_folder(guide: Path, number: int) -> Path:
    return guide / f"teacher-{number}"


def side_name(number: int, side: Literal["images", "captions"]) -> str:
    """Folder of a teacher's encoded images or captions within a guide."""
    return f"teacher-{number}/{side}"
