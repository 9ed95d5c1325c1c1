"""A folder of immutable segments that changes by swapping one file.

A commit writes new files beside those that count, waits until they are on the disk, and then
replaces the manifest, which names what counts. A kill at any moment therefore leaves the state
before the commit or the one after it; what a killed commit left behind is swept by the next one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from counterfoil.errors import DataError
from counterfoil.files import sync_file, sync_folder, write_atomically
from counterfoil.locks import locked_folder
from counterfoil.search.manifest import FileMark, Manifest, SegmentMark, TableMark, read_manifest
from counterfoil.search.table import IDS, Ids, Table

SEGMENTS, COMMIT = "segments", ".commit.lock"
CHANGING = "changing this index"


@dataclass(frozen=True)
class Filled:
    """What was written into a new segment: the ids of its rows, and notes to keep."""

    ids: Ids
    notes: dict[str, Any]


@dataclass(frozen=True)
class Change:
    """A change of one table: rows to delete, then a segment to write.

    ``fill`` writes its files into the folder it is given. With ``replace_from`` the segment takes
    the place of all segments from that one on.
    """

    remove: Ids | None = None
    fill: Callable[[Path], Filled] | None = None
    replace_from: int | None = None


class SegmentStore:
    """Tables of rows on disk; `commit` changes any number of them in one step."""

    def __init__(self, folder: Path, kind: str, manifest: str = "manifest.json") -> None:
        self.folder, self.kind, self.path = folder, kind, folder / manifest
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
        """An empty store."""
        (folder / SEGMENTS).mkdir(parents=True, exist_ok=True)
        empty = Manifest(
            kind=kind, header=dict(header), tables={name: TableMark() for name in tables}
        )
        write_atomically(folder / manifest, empty.model_dump_json(indent=1))

    def reload(self) -> None:
        """Read the state on disk; a writer may sweep files between two reads, so try again."""
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
        """Make all changes, or none."""
        with locked_folder(self.folder, CHANGING, name=COMMIT):
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
            taken = np.intersect1d(ids, table.ids[: len(live)][live])
            if len(taken) or len(np.unique(ids)) < len(ids):
                twice = int(taken[0]) if len(taken) else "of a new item"
                raise DataError(f"the id {twice} is in this index already; update it instead")
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
        """Delete what no manifest names: left by a killed commit, or replaced by the last one."""
        kept = self.manifest.folders_and_files()
        for path in (self.folder / SEGMENTS).iterdir():
            if path.name in kept:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        for path in self.folder.glob(f".{self.path.name}.*"):
            path.unlink(missing_ok=True)

    def check(self) -> list[str]:
        """Files whose content is not what was written."""
        found = []
        root = self.folder / SEGMENTS
        for table in self.manifest.tables.values():
            files = {root / s.name / name: m for s in table.segments for name, m in s.files.items()}
            if table.dead is not None and table.dead_mark is not None:
                files[root / table.dead] = table.dead_mark
            found += [
                f"{path}: damaged" for path, mark in files.items() if FileMark.of(path) != mark
            ]
        return found
