"""An index in parts: each process or machine encodes its share of the images, one merges them.

A part has the encoded images and captions of whole blocks, so that every model input is the same as
in one process. The merge writes the index: keys, descriptions and first stage.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from counterfoil.core.errors import ConfigError, DataError, first_problem
from counterfoil.core.parts import (
    FinishedPart,
    Part,
    begun_part,
    digest_of_values,
    finish_part,
    finished_parts,
)
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.storage.arrays import RowArray
from counterfoil.core.storage.segments import Change, SegmentStore
from counterfoil.data.fragments import PictureRows
from counterfoil.data.images import RowImage
from counterfoil.data.pairs import Split
from counterfoil.encoders import Encoded
from counterfoil.models.model import Model
from counterfoil.models.store import model_digest
from counterfoil.search.first_stage import ItemEncoder
from counterfoil.search.items import BLOCK_ITEMS, Block, Items, Side, stored_dtype, write_blocks
from counterfoil.search.state import SIDES, IndexState
from counterfoil.search.update import (
    CAPTIONS_PER_BLOCK,
    Added,
    FreshBlocks,
    add_splits,
    unknown_words,
)

KIND, STORE_KIND = "index", "part of a search index"
STORE, MANIFEST = "items", "items.json"

BLOCKS_PER_COMMIT = 16
"""Blocks per commit: the most that an interrupted part loses."""

ROWS_COMPARED = 16
"""Stored rows per split by which parts of other features are refused."""


@dataclass(frozen=True)
class PartReport:
    """A finished part: its folder, and the numbers of images and captions in it."""

    part: Part
    folder: Path
    images: int
    captions: int
    left_out: list[str]

    def as_dict(self) -> dict[str, Any]:
        return {
            "part": self.part.number,
            "parts": self.part.total,
            "folder": str(self.folder),
            "images": self.images,
            "captions": self.captions,
            "left_out": self.left_out,
        }


@dataclass(frozen=True)
class PartSettings:
    """What the parts of an index have in common."""

    model: Model
    retriever: Model | None
    dtype: str

    def identity(self, splits: Sequence[Split]) -> dict[str, str]:
        texts = [[s.name, list(s.ids), [list(c) for c in s.captions]] for s in splits]
        return {
            "data set": digest_of_values(texts),
            "model": model_digest(self.model)[:32],
            "retriever": model_digest(self.retriever)[:32] if self.retriever else "none",
            "dtype": self.dtype,
            "features": digest_of_values([_features(split) for split in splits]),
        }


def _features(split: Split) -> list[Any]:
    """What tells the features of a split from others: type, size and some of the stored rows."""
    table = split.fragments
    if table is None:
        return []
    chosen = np.unique(np.linspace(0, len(table) - 1, min(len(table), ROWS_COMPARED)).astype(int))
    rows = [_stored_digest(table.features, int(table.rows[image])) for image in chosen]
    return [str(table.features.dtype), table.dim, rows]


def _stored_digest(features: RowArray, row: int) -> str:
    """Of the stored bytes: decoded pixels may differ between machines."""
    try:
        if not isinstance(features, PictureRows):
            data = features.row(row).tobytes()
        elif isinstance(ref := features.refs[row], RowImage):
            data = ref.array.row(ref.row).tobytes()
        else:
            data = ref.read()
    except DataError:
        return "unreadable"
    return sha256(data).hexdigest()[:16]


def encode_part(
    target: str | Path,
    splits: Sequence[Split],
    part: Part,
    settings: PartSettings,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PartReport:
    """Encode the images of one part, and their captions, into `part.folder(target)`."""
    target, identity = Path(target), settings.identity(splits)
    settings.model.eval()
    if settings.retriever is not None:
        settings.retriever.eval()
    with begun_part(part, target, KIND, identity, overwrite=overwrite) as folder:
        units = _units(splits)
        mine = part.share(len(units))
        writer = _PartWriter(folder / STORE, splits, settings)
        todo = [units[number] for number in mine][writer.done :]
        steps = range(0, len(todo), BLOCKS_PER_COMMIT)
        progress = progress or Silent()
        for start in progress.track(steps, f"encoding {part}", len(steps)):
            writer.commit(todo[start : start + BLOCKS_PER_COMMIT])
        finish_part(folder, {"blocks": len(mine)})
        left_out = [text for record in writer.records for text in record.left_out]
        return PartReport(part, folder, writer.count("images"), writer.count("captions"), left_out)


def _units(splits: Sequence[Split]) -> list[tuple[int, int]]:
    """(split, first image) of all blocks."""
    return [
        (number, start)
        for number, split in enumerate(splits)
        for start in range(0, len(split), BLOCK_ITEMS)
    ]


class BlockRecord(BaseModel):
    """What a block of a part holds: numbers of images and captions, and what is left out."""

    model_config = ConfigDict(extra="forbid", strict=True)

    split: str
    start: int
    images: int
    captions: int = 0
    unreadable: list[int]
    left_out: list[str]


_RECORDS = TypeAdapter(list[BlockRecord])


class _PartWriter:
    """Appends encoded blocks; ``records`` say what each block holds."""

    def __init__(self, folder: Path, splits: Sequence[Split], settings: PartSettings) -> None:
        if not (folder / MANIFEST).is_file():
            header = {"dtype": settings.dtype, "records": []}
            SegmentStore.create(folder, STORE_KIND, header, SIDES, MANIFEST)
        self.store = SegmentStore(folder, STORE_KIND, MANIFEST)
        self.splits, self.settings = splits, settings
        self.source = FreshBlocks(ItemEncoder(settings.model, settings.retriever))
        self.records = _read_records(self.store)

    @property
    def done(self) -> int:
        """Blocks that are complete."""
        return len(self.records)

    def count(self, side: str) -> int:
        return sum(getattr(record, side) for record in self.records)

    def commit(self, units: Sequence[tuple[int, int]]) -> None:
        """Encode some blocks, and write them in one step."""
        dtype, added = stored_dtype(self.settings.dtype), _Blocks(self, units)
        fills = {"images": added.images, "captions": added.captions}
        changes = {
            side: Change(fill=lambda to, make=make: write_blocks(to, dtype, make()))  # type: ignore[misc]
            for side, make in fills.items()
        }
        # the list is complete once both sides are written, before the store writes its header
        self.store.commit(changes, {"records": added.dumped})
        self.records += added.records


class _Blocks:
    """The encoded images, then the captions, of some blocks."""

    def __init__(self, writer: _PartWriter, units: Sequence[tuple[int, int]]) -> None:
        self.units, self.splits, self.source = units, writer.splits, writer.source
        self.model = writer.settings.model
        self.first = {side: writer.count(side) for side in SIDES}
        self.dumped = [record.model_dump() for record in writer.records]
        self.records: list[BlockRecord] = []

    def images(self) -> Iterator[Block]:
        key = self.first["images"]
        for number, start in self.units:
            split = self.splits[number]
            chosen = range(start, min(start + BLOCK_ITEMS, len(split)))
            encoded, readable, left_out = self.source.images(split, chosen)
            self.records.append(
                BlockRecord(
                    split=split.name,
                    start=start,
                    images=len(readable),
                    unreadable=sorted({*chosen} - {*readable}),
                    left_out=left_out,
                )
            )
            if encoded is not None:
                keys = key + np.arange(len(readable), dtype=np.int64)
                key += len(readable)
                yield Block(keys, encoded, [{"id": split.ids[image]} for image in readable])

    def captions(self) -> Iterator[Block]:
        key = self.first["captions"]
        for (number, start), record in zip(self.units, self.records, strict=True):
            split, without = self.splits[number], set(record.unreadable)
            stop = min(start + BLOCK_ITEMS, len(split))
            first, last = np.searchsorted(split.image_of, [start, stop])
            texts = [
                text
                for text in range(int(first), int(last))
                if int(split.image_of[text]) not in without
                and unknown_words(self.model, split.texts[text]) is None
            ]
            record.captions = len(texts)
            self.dumped.append(record.model_dump())
            for done in range(0, len(texts), CAPTIONS_PER_BLOCK):
                chosen = texts[done : done + CAPTIONS_PER_BLOCK]
                keys = key + np.arange(len(chosen), dtype=np.int64)
                key += len(chosen)
                encoded = self.source.captions(split, start, chosen, done)
                yield Block(keys, encoded, [{"id": split.texts[text][:80]} for text in chosen])


def _read_records(store: SegmentStore) -> list[BlockRecord]:
    try:
        return _RECORDS.validate_python(store.header.get("records"))
    except ValidationError as error:
        raise DataError(f"{store.path}: damaged ({first_problem(error)})") from None


class _PartReader:
    """The encoded items of a finished part, checked against their checksums."""

    def __init__(self, part: FinishedPart) -> None:
        self.part, problems = part, []
        try:
            store = SegmentStore(part.folder / STORE, STORE_KIND, MANIFEST)
            self.records, problems = _read_records(store), store.check()
            self.items = {side: Items(store, side, torch.device("cpu")) for side in SIDES}
        except (DataError, OSError, KeyError, ValueError) as error:
            _refuse_if_too_many_files(error)
            problems = [str(error)]
        if problems:
            raise self.damaged(problems[0])

    def encoded(self, side: Side, first: int, count: int) -> Encoded:
        return self.items[side].encoded(np.arange(first, first + count, dtype=np.int64))

    def damaged(self, reason: str) -> DataError:
        part = self.part.part
        return DataError(
            f"{self.part.folder}: {part} is damaged ({reason}); make it again with --part "
            f"{part.number}/{part.total} --overwrite"
        )


def _raise_file_limit() -> None:
    """Allow as many open files as the system permits: the merge opens those of all parts."""
    if sys.platform == "win32":  # has no limit on open files
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # the system may refuse an unlimited number
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _refuse_if_too_many_files(error: Exception) -> None:
    """`ConfigError` if there were too many open files: the part is not to blame."""
    cause = error if isinstance(error, OSError) else error.__context__
    if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
        raise ConfigError(
            f"too many open files ({cause.strerror}): the merge opens the files of all parts at "
            "once; raise the limit (see: ulimit -n), or make fewer parts"
        ) from None


@dataclass(frozen=True)
class _StoredBlock:
    """A block in a part; ``image`` and ``caption`` are the keys of its first items."""

    reader: _PartReader
    record: BlockRecord
    image: int
    caption: int


class MergedParts:
    """The encoded blocks of all parts, as `add_splits` reads them."""

    def __init__(self, parts: Sequence[FinishedPart], splits: Sequence[Split]) -> None:
        _raise_file_limit()
        self.splits = list(splits)
        self.blocks: dict[tuple[str, int], _StoredBlock] = {}
        units = _units(splits)
        for one in parts:
            reader = _PartReader(one)
            mine = [units[number] for number in one.part.share(len(units))]
            keys = [(splits[number].name, start) for number, start in mine]
            if keys != [(record.split, record.start) for record in reader.records]:
                raise reader.damaged("other blocks than its share")
            image = caption = 0
            for key, record in zip(keys, reader.records, strict=True):
                self.blocks[key] = _StoredBlock(reader, record, image, caption)
                image, caption = image + record.images, caption + record.captions

    @classmethod
    def open(
        cls, target: str | Path, splits: Sequence[Split], settings: PartSettings
    ) -> MergedParts:
        """The parts of an index; `DataError` names a missing, unfinished or other one."""
        names = [split.name for split in splits]
        if len({*names}) < len(names):
            raise DataError(f"splits of the same name ({', '.join(names)}) cannot be merged")
        parts = finished_parts(Path(target), KIND, settings.identity(splits))
        return cls(parts, splits)

    def add_to(self, index: IndexState, progress: Progress | None = None) -> Added:
        """Fill a new index; the result is byte for byte that of one process."""
        with index.locked():
            return add_splits(index, self.splits, "refuse", progress or Silent(), self)

    def images(self, split: Split, chosen: range) -> tuple[Encoded | None, list[int], list[str]]:
        block = self.blocks[split.name, chosen.start]
        without = set(block.record.unreadable)
        readable = [image for image in chosen if image not in without]
        if len(readable) != block.record.images:
            raise block.reader.damaged("another number of images than its record states")
        count = len(readable)
        encoded = block.reader.encoded("images", block.image, count) if count else None
        return encoded, readable, block.record.left_out

    def captions(self, split: Split, block: int, chosen: Sequence[int], first: int) -> Encoded:
        stored = self.blocks[split.name, block]
        if first + len(chosen) > stored.record.captions:
            raise stored.reader.damaged("fewer captions than the data set has")
        return stored.reader.encoded("captions", stored.caption + first, len(chosen))
