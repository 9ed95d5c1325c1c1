"""Exact search on memory-mapped vectors, without tuning or rebuilding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from counterfoil.core.storage.segments import Change, Filled, Ids, SegmentStore, Table
from counterfoil.search.backends import backends
from counterfoil.search.vectors import Floats, TopK, Vectors, checked, checked_ids, max_sim

KIND, TABLE = "vector index", "vectors"
ROWS, LENGTHS = "rows.bin", "lengths.bin"

BLOCK_NUMBERS = 1 << 24
"""Numbers of vectors or similarities per block."""


@backends.register("exact")
class ExactIndex:
    """Compares every vector, stored in float16 or float32; the default."""

    def __init__(self, folder: Path) -> None:
        self.store = SegmentStore(folder, KIND)
        header = self.store.header
        self.dim, self.multi, self.dtype = header["dim"], header["multi"], header["dtype"]
        self._maps: dict[str, tuple[NDArray[Any], Ids | None]] = {}
        self._remap()

    @classmethod
    def create(
        cls, folder: Path, dim: int, multi: bool, dtype: str, options: dict[str, Any]
    ) -> ExactIndex:
        backends.check("exact", options, where="backend")
        SegmentStore.create(folder, KIND, {"dim": dim, "multi": multi, "dtype": dtype}, (TABLE,))
        return cls(folder)

    @classmethod
    def open(cls, folder: Path, options: dict[str, Any]) -> ExactIndex:
        return cls(folder)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def table(self) -> Table:
        return self.store.tables[TABLE]

    def ids(self) -> Ids:
        return np.sort(self.table.live_ids)

    def add(self, ids: ArrayLike, vectors: Vectors) -> None:
        vectors = self._checked(vectors)
        self._commit(np.empty(0, dtype=np.int64), checked_ids(ids, vectors), vectors)

    def delete(self, ids: ArrayLike) -> None:
        self._commit(checked_ids(ids), None, None)

    def update(self, ids: ArrayLike, vectors: Vectors) -> None:
        vectors = self._checked(vectors)
        keys = checked_ids(ids, vectors)
        self._commit(keys, keys, vectors)

    def search(self, queries: Vectors, k: int) -> tuple[Ids, Floats]:
        best = TopK(len(queries), k)
        queries = checked(queries, self.dim, True)
        for segment in range(len(self.table.mark.segments)):
            for ids, scores in self.scores(queries, segment):
                best.update(ids, scores)
        return best.result()

    def scores(self, queries: Vectors, segment: int) -> Iterator[tuple[Ids, Tensor]]:
        """Scores of the rows of one segment, block by block; those of deleted rows are −∞."""
        table = self.table
        rows, lengths = self._maps[table.mark.segments[segment].name]
        first, last = int(table.starts[segment]), int(table.starts[segment + 1])
        ends = None if lengths is None else np.cumsum(lengths)
        most = 1 if lengths is None else int(lengths.max())
        step = max(1, BLOCK_NUMBERS // (most * max(self.dim, len(queries.rows))))
        for start in range(0, last - first, step):
            stop = min(start + step, last - first)
            if ends is None or lengths is None:
                block, counts = rows[start:stop], None
            else:
                begin = int(ends[start] - lengths[start])
                block, counts = rows[begin : int(ends[stop - 1])], lengths[start:stop]
            scores = max_sim(queries, torch.from_numpy(block), counts)
            live = table.live[first + start : first + stop]
            if not live.all():
                scores[:, torch.from_numpy(~live)] = -torch.inf
            yield table.ids[first + start : first + stop], scores

    def vectors_of(self, rows: Ids) -> Floats:
        """Vectors of some rows of an index of single vectors, as float32."""
        out = np.empty((len(rows), self.dim), dtype=np.float32)
        segments = self.table.segment_of(rows)
        for segment in np.unique(segments):
            here = segments == segment
            stored, _ = self._maps[self.table.mark.segments[segment].name]
            out[here] = stored[rows[here] - self.table.starts[segment]]
        return out

    def compact(self) -> None:
        self._rewrite(0)

    def check(self) -> list[str]:
        return self.store.check()

    def describe(self) -> dict[str, Any]:
        segments = self.table.mark.segments
        size = sum(mark.bytes for segment in segments for mark in segment.files.values())
        return {
            "backend": "exact",
            "items": len(self),
            "deleted": len(self.table.ids) - len(self),
            "segments": len(segments),
            "bytes": size,
        }

    def drop(self) -> None:
        """Nothing lies outside the folder."""

    def close(self) -> None:
        self._maps.clear()

    def _checked(self, vectors: Vectors) -> Vectors:
        return checked(vectors, self.dim, self.multi, self.dtype)

    def _commit(self, remove: Ids, ids: Ids | None, vectors: Vectors | None) -> None:
        def fill(folder: Path) -> Filled:
            assert ids is not None  # noqa: S101 - for the type checker
            assert vectors is not None  # noqa: S101
            self._write(folder, [vectors])
            return Filled(ids, {})

        if not len(remove) and (ids is None or not len(ids)):
            return
        self.store.commit({TABLE: Change(remove, fill if ids is not None else None)})
        self._remap()
        start = self.table.find_merge_start(self._fixed_segments())
        if start is not None:
            self._rewrite(start)

    def _fixed_segments(self) -> int:
        """How many of the first segments are never merged."""
        return 0

    def _rewrite(self, start: int) -> None:
        """Merge the live rows of all segments from ``start`` on into one segment."""
        table = self.table
        begin = int(table.starts[start])
        rows = table.live_rows[table.live_rows >= begin]

        def fill(folder: Path) -> Filled:
            self._write(folder, self._live_blocks(start))
            return Filled(table.ids[rows], {})

        self.store.commit({TABLE: Change(fill=fill, replace_from=start)})
        self._remap()

    def _live_blocks(self, start: int) -> Iterator[Vectors]:
        table = self.table
        for number in range(start, len(table.mark.segments)):
            rows, lengths = self._maps[table.mark.segments[number].name]
            live = table.live[table.starts[number] : table.starts[number + 1]]
            counts = np.ones(len(live), dtype=np.int64) if lengths is None else lengths
            ends = np.cumsum(counts)
            step = max(1, BLOCK_NUMBERS // (self.dim * int(counts.max(initial=1))))
            for first in range(0, len(live), step):
                part = slice(first, first + step)
                begin = int(ends[first] - counts[first])
                block = rows[begin : int(ends[part][-1])].astype(np.float32)
                mask = np.repeat(live[part], counts[part])
                yield Vectors(block[mask], counts[part][live[part]])

    def _write(self, folder: Path, blocks: Any) -> None:
        with (folder / ROWS).open("wb") as rows, (folder / LENGTHS).open("wb") as lengths:
            for block in blocks:
                rows.write(np.ascontiguousarray(block.rows, dtype=self.dtype).data)
                if self.multi:
                    lengths.write(block.lengths.astype("<i4").data)
        if not self.multi:
            (folder / LENGTHS).unlink()

    def _map(self, name: str) -> tuple[NDArray[Any], Ids | None]:
        """The rows of a segment, mapped into memory, and how many each item has."""
        folder = self.store.segment(name)
        # copy on write: torch needs a writable array, although nothing is written
        rows = np.memmap(folder / ROWS, dtype=self.dtype, mode="c").reshape(-1, self.dim)
        lengths = None
        if self.multi:
            lengths = np.fromfile(folder / LENGTHS, dtype="<i4").astype(np.int64)
        return np.asarray(rows), lengths

    def _remap(self) -> None:
        """Map every segment now, so that one replaced by another process stays readable."""
        self._maps = {
            segment.name: self._maps.get(segment.name) or self._map(segment.name)
            for segment in self.table.mark.segments
        }
