"""The rows of a table over its segments: which item each holds, and which are still alive."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from counterfoil.errors import DataError
from counterfoil.search.manifest import TableMark, check_size

Ids = NDArray[np.int64]
IDS = "ids.bin"

MOST_SEGMENTS = 16
"""More than this many are joined, so that a search does not visit crumbs."""


class Table:
    """Rows are numbered through all segments; an id has at most one live row."""

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
            raise DataError(f"{folder}: the ids of a segment are not whole; build the index again")
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
        found: Ids = self.ids[self.live]
        return found

    @cached_property
    def _by_id(self) -> tuple[Ids, Ids]:
        """Live ids in order, and their rows."""
        ids = self.ids[self.live_rows]
        order = np.argsort(ids, kind="stable")
        return ids[order], self.live_rows[order]

    def has(self, ids: Ids) -> NDArray[np.bool_]:
        known, _ = self._by_id
        places = np.searchsorted(known, ids)
        found = np.zeros(len(ids), dtype=np.bool_)
        inside = places < len(known)
        found[inside] = known[places[inside]] == ids[inside]
        return found

    def rows_of(self, ids: Ids) -> Ids:
        """The live rows of some ids; one that is not there is a `DataError`."""
        there = self.has(ids)
        if not there.all():
            raise DataError(f"no item with the id {int(ids[~there][0])} in this index")
        known, rows = self._by_id
        found: Ids = rows[np.searchsorted(known, ids)]
        return found

    def segment_of(self, rows: Ids) -> Ids:
        """Number of the segment of each row."""
        found: Ids = np.searchsorted(self.starts, rows, side="right") - 1
        return found

    def untidy_from(self, first: int = 0) -> int | None:
        """The first segment worth rewriting together with all after it, if there is one.

        Where half of the rows are dead, all; where segments are too many, the last ones, back to
        one that is more than twice as large as what follows it. Those before ``first`` stay.
        """
        begin = int(self.starts[first]) if first < len(self.starts) else len(self.live)
        dead = int((~self.live[begin:]).sum())
        if dead > max(1000, (len(self.live) - begin) // 2):
            return first
        sizes = [segment.items for segment in self.mark.segments]
        if len(sizes) - first <= MOST_SEGMENTS:
            return None
        start, total = len(sizes) - 1, sizes[-1]
        while start > first and sizes[start - 1] < 2 * total:
            start, total = start - 1, total + sizes[start - 1]
        return start
