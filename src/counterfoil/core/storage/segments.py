"""A store of immutable segment files that commits by replacing its manifest.

A commit writes and syncs new files, then replaces the manifest, which names the valid files. A kill
at any moment leaves the state before or after the commit; the next commit removes what is left.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from counterfoil.core.errors import DataError, first_problem
from counterfoil.core.storage.atomic import sync_file, sync_folder, write_atomically
from counterfoil.core.storage.locks import locked_folder
from counterfoil.core.storage.reading import open_regular, read_text

FORMAT = 1

Ids = NDArray[np.int64]
IDS = "ids.bin"

MAX_SEGMENTS = 16
"""More segments than this are merged, so that a search does not visit many small ones."""

SEGMENTS, COMMIT = "segments", ".commit.lock"
CHANGE_TASK = "changing this index"


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=200)]
"""Name of a file or folder of a store; a manifest cannot lead out of its folder."""

Count = Annotated[int, Field(ge=0, lt=1 << 62)]


class FileMark(BaseModel):
    """Size and checksum of an immutable file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: Count
    crc32: int

    @classmethod
    def of(cls, path: Path) -> FileMark:
        checksum, size = 0, 0
        with open_regular(path) as file:
            while chunk := file.read(1 << 20):
                checksum, size = zlib.crc32(chunk, checksum), size + len(chunk)
        return cls(bytes=size, crc32=checksum)


class SegmentMark(BaseModel):
    """A folder of immutable files; ``notes`` are for the reader of the segment."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    items: Count
    files: dict[Name, FileMark]
    notes: dict[str, Any] = Field(default_factory=dict)


class TableMark(BaseModel):
    """Segments in order, and the file that lists their deleted rows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    segments: tuple[SegmentMark, ...] = ()
    dead: Name | None = None
    dead_mark: FileMark | None = None


class Manifest(BaseModel):
    """The state of a store; ``header`` has the owner's data."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    format: int = FORMAT
    generation: Count = 0
    header: dict[str, Any] = Field(default_factory=dict)
    tables: dict[str, TableMark] = Field(default_factory=dict)

    def folders_and_files(self) -> set[str]:
        """Names of all valid segments and files."""
        names = {segment.name for table in self.tables.values() for segment in table.segments}
        return names | {table.dead for table in self.tables.values() if table.dead}


def read_manifest(path: Path, kind: str) -> Manifest:
    """The manifest of a store of one kind; `DataError` for anything else."""
    try:
        manifest = Manifest.model_validate_json(read_text(path))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{path.parent}: not a {kind} (there is no {path.name}); "
            "make one with: counterfoil index RUN PAIRS --out INDEX"
        ) from None
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise DataError(
            f"{path}: damaged, build the index again ({first_problem(error)})"
        ) from None
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


class Table:
    """The rows of all segments, numbered through; an id has at most one live row."""

    def __init__(self, folder: Path, mark: TableMark) -> None:
        self.mark = mark
        for segment in mark.segments:
            for name, file in segment.files.items():
                check_size(folder / segment.name / name, file)
        counts = [segment.items for segment in mark.segments]
        self.starts: Ids = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        parts = [np.fromfile(folder / s.name / IDS, dtype="<i8") for s in mark.segments]
        self.ids: Ids = np.concatenate([np.empty(0, dtype=np.int64), *parts])
        if len(self.ids) != self.starts[-1]:
            raise DataError(f"{folder}: the ids of a segment are damaged; build the index again")
        self.live = np.ones(len(self.ids), dtype=np.bool_)
        if mark.dead is not None and mark.dead_mark is not None:
            check_size(folder / mark.dead, mark.dead_mark)
            self.live[np.fromfile(folder / mark.dead, dtype="<i8")] = False

    def __len__(self) -> int:
        return int(self.live.sum())

    @cached_property
    def live_rows(self) -> Ids:
        return np.flatnonzero(self.live).astype(np.int64)

    @property
    def live_ids(self) -> Ids:
        ids: Ids = self.ids[self.live]
        return ids

    @cached_property
    def _by_id(self) -> tuple[Ids, Ids]:
        """Live ids in order, and their rows."""
        ids = self.ids[self.live_rows]
        order = np.argsort(ids, kind="stable")
        return ids[order], self.live_rows[order]

    def has(self, ids: Ids) -> NDArray[np.bool_]:
        """Whether each id has a live row."""
        known, _ = self._by_id
        if not len(known):
            return np.zeros(len(ids), dtype=np.bool_)
        present: NDArray[np.bool_] = known.take(np.searchsorted(known, ids), mode="clip") == ids
        return present

    def rows_of(self, ids: Ids) -> Ids:
        """The live rows of ids; `DataError` for an unknown id."""
        present = self.has(ids)
        if not present.all():
            raise DataError(f"no item with the id {int(ids[~present][0])} in this index")
        known, rows = self._by_id
        selected: Ids = rows[np.searchsorted(known, ids)]
        return selected

    def segment_of(self, rows: Ids) -> Ids:
        """Index of the segment of each row."""
        segments: Ids = np.searchsorted(self.starts, rows, side="right") - 1
        return segments

    def find_merge_start(self, first: int = 0) -> int | None:
        """The segment from which on all should be merged into one; None if none should.

        If half of the rows are dead: ``first``. If there are too many segments: the last ones, back
        to one that is more than twice as large as all after it. Never one before ``first``.
        """
        begin = int(self.starts[first]) if first < len(self.starts) else len(self.live)
        dead = int((~self.live[begin:]).sum())
        if dead > max(1000, (len(self.live) - begin) // 2):
            return first
        sizes = [segment.items for segment in self.mark.segments]
        if len(sizes) - first <= MAX_SEGMENTS:
            return None
        start, total = len(sizes) - 1, sizes[-1]
        while start > first and sizes[start - 1] < 2 * total:
            start, total = start - 1, total + sizes[start - 1]
        return start


@dataclass(frozen=True)
class Filled:
    """The ids of the rows of a new segment, and its notes."""

    ids: Ids
    notes: dict[str, Any]


@dataclass(frozen=True)
class Change:
    """A change of one table: ids to remove, then a segment to write.

    ``fill`` writes the segment's files into a folder. With ``replace_from``, the new segment
    replaces all segments from that index on.
    """

    remove: Ids | None = None
    fill: Callable[[Path], Filled] | None = None
    replace_from: int | None = None


class SegmentStore:
    """Tables of rows on disk; `commit` changes any number of them in one step."""

    def __init__(self, folder: Path, kind: str, manifest: str = "manifest.json") -> None:
        self.folder, self.kind, self.path = folder, kind, folder / manifest
        if (folder / SEGMENTS).is_symlink():  # a commit deletes what it does not know there
            raise DataError(f"{folder / SEGMENTS}: a link, expected a folder of this {kind}")
        self.reload()

    @classmethod
    def create(
        cls,
        folder: Path,
        kind: str,
        header: Mapping[str, Any],
        tables: tuple[str, ...],
        manifest: str = "manifest.json",
    ) -> None:
        """Create an empty store."""
        (folder / SEGMENTS).mkdir(parents=True, exist_ok=True)
        empty = Manifest(
            kind=kind, header=dict(header), tables={name: TableMark() for name in tables}
        )
        write_atomically(folder / manifest, empty.model_dump_json(indent=1))

    def reload(self) -> None:
        """Read the state on disk; retried, as a writer may remove files between two reads."""
        for attempt in range(3):
            self.manifest = read_manifest(self.path, self.kind)
            try:
                self.tables = {
                    name: Table(self.folder / SEGMENTS, mark)
                    for name, mark in self.manifest.tables.items()
                }
                return
            except DataError:
                unchanged = read_manifest(self.path, self.kind).generation
                if attempt == 2 or unchanged == self.manifest.generation:
                    raise

    @property
    def header(self) -> dict[str, Any]:
        return self.manifest.header

    def segment(self, name: str) -> Path:
        return self.folder / SEGMENTS / name

    def commit(
        self, changes: Mapping[str, Change], header: Mapping[str, Any] | None = None
    ) -> None:
        """Apply all changes, or none."""
        with locked_folder(self.folder, CHANGE_TASK, name=COMMIT):
            if read_manifest(self.path, self.kind).generation != self.manifest.generation:
                raise DataError(
                    f"{self.folder}: another process changed it meanwhile; open it again"
                )
            self._sweep()
            generation = self.manifest.generation + 1
            marks = dict(self.manifest.tables)
            for name, change in changes.items():
                marks[name] = self._changed(name, change, generation)
            sync_folder(self.folder / SEGMENTS)
            new = self.manifest.model_copy(
                update={
                    "generation": generation,
                    "tables": marks,
                    "header": {**self.header, **(header or {})},
                }
            )
            write_atomically(self.path, new.model_dump_json(indent=1))
            self.reload()
            self._sweep()

    def _changed(self, name: str, change: Change, generation: int) -> TableMark:
        table = self.tables[name]
        live = table.live.copy()
        if change.remove is not None and len(change.remove):
            live[table.rows_of(np.asarray(change.remove, dtype=np.int64))] = False
        segments = list(table.mark.segments)
        if change.replace_from is not None:
            segments = segments[: change.replace_from]
            live = live[: table.starts[change.replace_from]]
        if change.fill is not None:
            segment, ids = self._write_segment(f"{name}-{generation:08d}", change.fill)
            existing = np.intersect1d(ids, table.ids[: len(live)][live])
            if len(existing) or len(np.unique(ids)) < len(ids):
                duplicate = int(existing[0]) if len(existing) else "of a new item"
                raise DataError(f"the id {duplicate} is in this index already; update it instead")
            if len(ids):
                segments.append(segment)
        dead = np.flatnonzero(~live).astype("<i8")
        file, mark = None, None
        if len(dead):
            file = f"{name}-dead-{generation:08d}.bin"
            mark = self._write(self.folder / SEGMENTS / file, dead.tobytes())
        return TableMark(segments=tuple(segments), dead=file, dead_mark=mark)

    def _write_segment(self, name: str, fill: Callable[[Path], Filled]) -> tuple[SegmentMark, Ids]:
        folder = self.segment(name)
        folder.mkdir()
        filled = fill(folder)
        self._write(folder / IDS, filled.ids.astype("<i8").tobytes())
        files = {}
        for path in sorted(folder.iterdir()):
            sync_file(path)
            files[path.name] = FileMark.of(path)
        sync_folder(folder)
        mark = SegmentMark(name=name, items=len(filled.ids), files=files, notes=filled.notes)
        return mark, filled.ids

    @staticmethod
    def _write(path: Path, data: bytes) -> FileMark:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return FileMark.of(path)

    def _sweep(self) -> None:
        """Delete files that the manifest does not name, from killed or earlier commits."""
        valid = self.manifest.folders_and_files()
        for path in (self.folder / SEGMENTS).iterdir():
            if path.name in valid:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        for path in self.folder.glob(f".{self.path.name}.*"):
            path.unlink(missing_ok=True)

    def check(self) -> list[str]:
        """Messages about files whose checksum is wrong."""
        messages = []
        root = self.folder / SEGMENTS
        for table in self.manifest.tables.values():
            files = {root / s.name / name: m for s in table.segments for name, m in s.files.items()}
            if table.dead is not None and table.dead_mark is not None:
                files[root / table.dead] = table.dead_mark
            messages += [
                f"{path}: damaged" for path, mark in files.items() if FileMark.of(path) != mark
            ]
        return messages
