"""Images or captions of an index on disk: the matcher's inputs and their descriptions."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from counterfoil.core.errors import DataError
from counterfoil.core.storage.arrays import Descriptor, read_into
from counterfoil.core.storage.segments import Change, Filled, Ids, SegmentStore, Table
from counterfoil.encoders import Encoded
from counterfoil.encoders.stored import EncodedReader, EncodedWriter, Extent, full_precision
from counterfoil.search.vectors import HALF_MAX

Side = Literal["images", "captions"]
ABOUT, ENDS = "about.bin", "about_ends.bin"
BLOCK_ITEMS = 256
"""Items read or written at once."""
RUN_ITEMS = 1024
"""Descriptions that follow each other and are read at once."""


@dataclass(frozen=True)
class Block:
    """Items to write: keys, encoded inputs of the matcher, and descriptions."""

    keys: Ids
    encoded: Encoded
    about: list[dict[str, Any]]


class Items:
    """One side of an index in its current state; keys are numbers that are never reused."""

    def __init__(self, store: SegmentStore, side: Side, device: torch.device) -> None:
        self.store, self.side, self.device = store, side, device
        self.table: Table = store.tables[side]
        self._names: dict[str, int] | None = None
        self._before: tuple[dict[str, int], Ids] | None = None  # names and keys, see `follow`
        self.dtype = stored_dtype(store.header["dtype"])
        # opened at once: a file that another process replaces later stays readable
        self._readers = [self._reader(number) for number in range(len(self.table.mark.segments))]

    def __len__(self) -> int:
        return len(self.table)

    @property
    def names(self) -> dict[str, int]:
        """Key of every item by its name, read when something is looked up or changed."""
        if self._names is None:
            self._names, self._before = self._read_names(), None
        return self._names

    def _read_names(self) -> dict[str, int]:
        keys, known = self.table.live_ids, dict[str, int]()
        earlier = self._before  # another thread may read the names, too
        if earlier is not None:
            names, before = earlier
            gone = set(np.setdiff1d(before, keys, assume_unique=True).tolist())
            known = {name: key for name, key in names.items() if key not in gone}
            keys = np.setdiff1d(keys, before, assume_unique=True)
        new = zip(keys.tolist(), self.about(keys), strict=True)
        return known | {about["id"]: key for key, about in new}

    def follow(self, earlier: Items) -> None:
        """Take over the names of the state before an own commit, if they were read.

        To read all of them after every commit would make a large index slow to build.
        """
        read = earlier._names
        self._before = earlier._before if read is None else (read, earlier.table.live_ids)

    def encoded(self, keys: Ids) -> Encoded:
        """Items as the matcher reads them, in the order given."""
        rows = self.table.rows_of(keys)
        segments = self.table.segment_of(rows)
        parts, order = [], []
        for segment in np.unique(segments):
            here = np.flatnonzero(segments == segment)
            reader = self._readers[segment].encoded
            part, _ = reader.read(rows[here] - self.table.starts[segment])
            parts.append(full_precision(part, self.device))
            order.append(here)
        back = np.argsort(np.concatenate(order), kind="stable")
        return Encoded.cat(parts)[torch.from_numpy(back).to(self.device)]

    def blocks(self, first_segment: int = 0) -> Iterator[tuple[Ids, Encoded]]:
        """All live items, or those from one segment on, a few at a time, in stored order."""
        rows = self.table.live_rows
        keys = self.table.ids[rows[rows >= self.table.starts[first_segment]]]
        for start in range(0, len(keys), BLOCK_ITEMS):
            part = keys[start : start + BLOCK_ITEMS]
            yield part, self.encoded(part)

    def about(self, keys: Ids) -> list[dict[str, Any]]:
        """The descriptions of items, as given when they were added."""
        rows = self.table.rows_of(np.asarray(keys, dtype=np.int64))
        order = np.argsort(rows, kind="stable")
        records: list[dict[str, Any]] = [{}] * len(rows)
        for run in self._runs(rows[order]):
            segment = int(self.table.segment_of(rows[order[run.start]]))
            first = int(rows[order[run.start]] - self.table.starts[segment])
            reader = self._readers[segment]
            begin = int(reader.ends[first - 1]) if first else 0
            ends = reader.ends[first : first + len(run)] - begin
            text = np.empty(int(ends[-1]), dtype=np.uint8)
            read_into(text, reader.about.fd, begin)
            starts = [0, *ends[:-1].tolist()]
            whole = text.tobytes()
            for index, start, end in zip(order[run.start : run.stop], starts, ends, strict=True):
                records[index] = self._parsed(whole[start:end], segment)
        return records

    def _runs(self, rows: Ids) -> Iterator[range]:
        """Ranges of sorted rows that follow each other in one segment, to be read at once."""
        breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(self.table.segment_of(rows)) != 0))
        for begin, end in pairwise([0, *(breaks + 1).tolist(), len(rows)]):
            for start in range(begin, end, RUN_ITEMS):
                yield range(start, min(start + RUN_ITEMS, end))

    def _parsed(self, text: bytes, segment: int) -> dict[str, Any]:
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("id"), str):
            path = self.store.segment(self.table.mark.segments[segment].name) / ABOUT
            raise DataError(f"{path}: damaged (not a description); build the index again")
        return record

    def rewritten(self, first: int) -> Change:
        """The change that writes the live items of all segments from one on as one segment."""

        def blocks() -> Iterator[Block]:
            for keys, encoded in self.blocks(first):
                yield Block(keys, encoded, self.about(keys))

        return Change(
            fill=lambda folder: write_blocks(folder, self.dtype, blocks()), replace_from=first
        )

    def _reader(self, number: int) -> _Reader:
        mark = self.table.mark.segments[number]
        folder = self.store.segment(mark.name)
        try:
            extent = Extent.model_validate(mark.notes["extent"])
        except (KeyError, ValueError):
            raise DataError(f"{folder}: damaged (no valid extent); build the index again") from None
        ends = np.fromfile(folder / ENDS, dtype="<i8")
        about = Descriptor(folder / ABOUT)
        size = os.fstat(about.fd).st_size
        if len(ends) != mark.items or (np.diff(ends, prepend=0, append=size) < 0).any():
            raise DataError(f"{folder / ENDS}: damaged; restore it, or build the index again")
        encoded = EncodedReader(folder, self.dtype, extent)
        written = sum((folder / f"{name}.bin").stat().st_size for name in extent.widths)
        if extent.items != mark.items or encoded.size_in_bytes != written:
            raise DataError(f"{folder}: damaged (another extent); build the index again")
        return _Reader(encoded, ends, about)


def stored_dtype(dtype: str) -> str:
    """How an index of a dtype stores the matcher's inputs: 1 bit would be too coarse to rank."""
    return "int8" if dtype == "binary" else dtype


@dataclass(frozen=True)
class _Reader:
    """The open files of a segment."""

    encoded: EncodedReader
    ends: Ids
    about: Descriptor


def write_blocks(folder: Path, dtype: str, blocks: Iterable[Block]) -> Filled:
    """Fill a new segment."""
    writer = EncodedWriter(folder, dtype, Extent(), sync=False)  # the commit does
    keys: list[Ids] = [np.empty(0, dtype=np.int64)]
    ends: list[int] = []
    end = 0
    with (folder / ABOUT).open("wb") as file:
        for block in blocks:
            _refuse_infinite(block, dtype)
            writer.append(block.encoded, np.ones(len(block.keys), dtype=np.bool_))
            keys.append(block.keys)
            for about in block.about:
                end += file.write(json.dumps(about, ensure_ascii=False).encode())
                ends.append(end)
    (folder / ENDS).write_bytes(np.array(ends, dtype="<i8").tobytes())
    return Filled(np.concatenate(keys), {"extent": writer.done.model_dump()})


def _refuse_infinite(block: Block, dtype: str) -> None:
    limit = HALF_MAX if dtype == "float16" else float(np.finfo(np.float32).max)
    for tensor in (block.encoded.fragments, block.encoded.pooled):
        if tensor is not None and not bool((tensor.abs() <= limit).all()):
            bad = ~(tensor.abs() <= limit).flatten(1).all(1)
            name = block.about[int(bad.nonzero()[0])]["id"]
            raise DataError(f"{name}: the model encodes it as numbers that are not finite")
