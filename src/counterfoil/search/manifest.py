"""What a store on disk says of itself: which files count, and how long each must be."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from counterfoil.errors import DataError
from counterfoil.reading import open_regular, read_text

FORMAT = 1


class FileMark(BaseModel):
    """Size and checksum of a file that never changes again."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: int
    crc32: int

    @classmethod
    def of(cls, path: Path) -> FileMark:
        checksum, size = 0, 0
        with open_regular(path) as file:
            while chunk := file.read(1 << 20):
                checksum, size = zlib.crc32(chunk, checksum), size + len(chunk)
        return cls(bytes=size, crc32=checksum)


class SegmentMark(BaseModel):
    """A folder of files written once; ``notes`` are for whoever reads them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    items: int
    files: dict[str, FileMark]
    notes: dict[str, Any] = Field(default_factory=dict)


class TableMark(BaseModel):
    """Segments in order, and the file that lists the rows of them that were deleted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    segments: tuple[SegmentMark, ...] = ()
    dead: str | None = None
    dead_mark: FileMark | None = None


class Manifest(BaseModel):
    """The state of a store; ``header`` is what its owner keeps there."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    format: int = FORMAT
    generation: int = 0
    header: dict[str, Any] = Field(default_factory=dict)
    tables: dict[str, TableMark] = Field(default_factory=dict)

    def folders_and_files(self) -> set[str]:
        """Names of everything that counts."""
        names = {segment.name for table in self.tables.values() for segment in table.segments}
        return names | {table.dead for table in self.tables.values() if table.dead}


def read_manifest(path: Path, kind: str) -> Manifest:
    """The manifest of a store of one kind; anything else is refused in words."""
    try:
        manifest = Manifest.model_validate_json(read_text(path))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{path.parent}: not a {kind} (there is no {path.name}); "
            "make one with: counterfoil index RUN PAIRS --out INDEX"
        ) from None
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise DataError(f"{path}: damaged, build the index again ({error})") from None
    if manifest.kind != kind:
        raise DataError(f"{path}: describes a {manifest.kind}, expected a {kind}")
    if manifest.format != FORMAT:
        raise DataError(
            f"{path}: written in format {manifest.format}, this version reads format {FORMAT}; "
            "build the index again"
        )
    return manifest


def check_size(path: Path, mark: FileMark) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); restore it, or build the index again"
        ) from None
    if size != mark.bytes:
        raise DataError(
            f"{path}: {size} bytes, but {mark.bytes} were written; "
            "restore it, or build the index again"
        )
