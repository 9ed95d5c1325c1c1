"""Exact search on memory-mapped vectors, without tuning or rebuilding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from counterfoil.core.errors import DataError
from counterfoil.core.storage.segments import Change, Filled, Ids, SegmentMark, SegmentStore, Table
from counterfoil.search.backends import backends
from counterfoil.search.codes import DTYPES, Coded, map_coded, write_coded
from counterfoil.search.vectors import Floats, TopK, Vectors, checked, checked_ids, max_sim

KIND, TABLE = "vector index", "vectors"
LENGTHS = "lengths.bin"

BLOCK_NUMBERS = 1 << 24
"""Numbers of vectors or similarities per block."""


@backends.register("exact")
class ExactIndex:
    """Compares every vector; the default.

    Of binary vectors the bits are compared, and ``refine`` × k candidates are scored again from
    their 8-bit codes.
    """

    def __init__(self, folder: Path, *, refine: int = 4) -> None:
        self.store = SegmentStore(folder, KIND)
        header = self.store.header
        self.dim, self.multi, self.dtype = header["dim"], header["multi"], header["dtype"]
        if self.dtype not in DTYPES:
            raise DataError(f"{folder}: its dtype is {self.dtype!r}, expected {', '.join(DTYPES)}")
        self.refine = max(1, refine)
        self._maps: dict[str, tuple[Coded, Ids | None]] = {}
        self._remap()

    @classmethod
    def check_choices(cls, multi: bool, dtype: str) -> None:
        """Refuse an index that this backend cannot hold, before there is anything to put in."""

    @classmethod
    def create(
        cls, folder: Path, dim: int, multi: bool, dtype: str, options: dict[str, Any]
    ) -> ExactIndex:
        backends.check("exact", options, where="backend")
        SegmentStore.create(folder, KIND, {"dim": dim, "multi": multi, "dtype": dtype}, (TABLE,))
        return cls(folder, **options)

    @classmethod
    def open(cls, folder: Path, options: dict[str, Any]) -> ExactIndex:
        backends.check("exact", options, where="backend")
        return cls(folder, **options)

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
        queries = checked(queries, self.dim, True)
        estimated = self.dtype == "binary"
        best = TopK(len(queries), k * self.refine if estimated else k)
        for segment in range(len(self.table.mark.segments)):
            for rows, scores in self.scores(queries, segment):
                best.update(rows if estimated else self.table.ids[rows], scores)
        return self._rescored(queries, best.result()[0], k) if estimated else best.result()

    def _rescored(self, queries: Vectors, candidates: Ids, k: int) -> tuple[Ids, Floats]:
        """The best ``k`` of the candidates, rows [Q, C] of the table, scored from 8-bit codes."""
        best = TopK(len(queries), k)
        for query, padded in enumerate(candidates):
            rows = padded[padded >= 0]
            if len(rows):
                items, one = self.vectors_of(rows), queries[query : query + 1]
                sims = torch.from_numpy(one.rows @ items.rows.T)
                lengths = items.lengths if self.multi else None
                scores = max_sim(sims, one, lengths)[0].numpy()
                best.insert(query, self.table.ids[rows], scores)
        return best.result()

    def scores(self, queries: Vectors, segment: int) -> Iterator[tuple[Ids, Tensor]]:
        """Rows of one segment and their scores, block by block; those of deleted rows are −∞.

        Of binary vectors they are estimates.
        """
        table = self.table
        coded, lengths = self._maps[table.mark.segments[segment].name]
        first, last = int(table.starts[segment]), int(table.starts[segment + 1])
        ends = None if lengths is None else np.cumsum(lengths)
        most = 1 if lengths is None else int(lengths.max())
        step = max(1, BLOCK_NUMBERS // (most * max(self.dim, len(queries.rows))))
        for start in range(0, last - first, step):
            stop = min(start + step, last - first)
            if ends is None or lengths is None:
                block, counts = coded[start:stop], None
            else:
                begin = int(ends[start] - lengths[start])
                block, counts = coded[begin : int(ends[stop - 1])], lengths[start:stop]
            scores = max_sim(block.products(queries.rows), queries, counts)
            live = table.live[first + start : first + stop]
            if not live.all():
                scores[:, torch.from_numpy(~live)] = -torch.inf
            yield np.arange(first + start, first + stop), scores

    def vectors_of(self, rows: Ids) -> Vectors:
        """Vectors of the items in some rows of the table, as float32."""
        segments = self.table.segment_of(rows)
        lengths = np.ones(len(rows), dtype=np.int64)
        firsts = np.empty(len(rows), dtype=np.int64)
        for segment in np.unique(segments):
            here = segments == segment
            firsts[here] = inside = rows[here] - self.table.starts[segment]
            if self.multi:
                _, counts, _ = self._stored(int(segment))
                firsts[here], lengths[here] = (np.cumsum(counts) - counts)[inside], counts[inside]
        # place of each vector: in its segment, and in the result
        shift = np.repeat(firsts - (np.cumsum(lengths) - lengths), lengths)
        places, owners = shift + np.arange(len(shift)), np.repeat(segments, lengths)
        out = np.empty((len(places), self.dim), dtype=np.float32)
        for segment in np.unique(segments):
            coded, _ = self._maps[self.table.mark.segments[segment].name]
            here = owners == segment
            out[here] = coded[places[here]].decode()
        return Vectors(out, lengths)

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
            coded = Coded.encode(vectors.rows, self.dtype)
            self._write(folder, [(coded, vectors.lengths)], len(coded))
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
            segments = map(self._stored, range(start, len(table.mark.segments)))
            total = sum(int(counts[live].sum()) for _, counts, live in segments)
            self._write(folder, self._live_blocks(start), total)
            return Filled(table.ids[rows], {})

        self.store.commit({TABLE: Change(fill=fill, replace_from=start)})
        self._remap()

    def _live_blocks(self, start: int) -> Iterator[tuple[Coded, Ids]]:
        """Live vectors as they are stored, a few at a time, and how many each item has."""
        for number in range(start, len(self.table.mark.segments)):
            coded, counts, live = self._stored(number)
            ends = np.cumsum(counts)
            step = max(1, BLOCK_NUMBERS // (self.dim * int(counts.max(initial=1))))
            for first in range(0, len(live), step):
                part = slice(first, first + step)
                begin = int(ends[first] - counts[first])
                mask = np.repeat(live[part], counts[part])
                yield coded[begin : int(ends[part][-1])][mask], counts[part][live[part]]

    def _stored(self, number: int) -> tuple[Coded, Ids, NDArray[np.bool_]]:
        """Vectors of a segment, how many each of its items has, and which items are live."""
        coded, lengths = self._maps[self.table.mark.segments[number].name]
        live = self.table.live[self.table.starts[number] : self.table.starts[number + 1]]
        return coded, np.ones(len(live), dtype=np.int64) if lengths is None else lengths, live

    def _write(self, folder: Path, blocks: Iterable[tuple[Coded, Ids]], total: int) -> None:
        def coded(lengths: BinaryIO) -> Iterator[Coded]:
            for block, counts in blocks:
                if self.multi:
                    lengths.write(counts.astype("<i4").data)
                yield block

        with (folder / LENGTHS).open("wb") as lengths:
            write_coded(folder, coded(lengths), total)
        if not self.multi:
            (folder / LENGTHS).unlink()

    def _map(self, segment: SegmentMark) -> tuple[Coded, Ids | None]:
        """The vectors of a segment, mapped into memory, and how many each item has."""
        folder = self.store.segment(segment.name)
        coded, lengths = map_coded(folder, self.dim, self.dtype), None
        if self.multi:
            lengths = np.fromfile(folder / LENGTHS, dtype="<i4").astype(np.int64)
        if len(coded) != (segment.items if lengths is None else lengths.sum()):
            raise DataError(f"{folder}: its files do not belong together; build the index again")
        return coded, lengths

    def _remap(self) -> None:
        """Map every segment now, so that one replaced by another process stays readable."""
        self._maps = {
            segment.name: self._maps.get(segment.name) or self._map(segment)
            for segment in self.table.mark.segments
        }
