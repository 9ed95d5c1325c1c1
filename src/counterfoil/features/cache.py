"""Cache of image features on disk, by image content and extractor.

A cache folder has one folder per extractor (``image-features/NAME-KEY``; the key is a digest of its
fingerprint) with files of up to a chunk of images (``*.rows``). Each file is written atomically and
never changed, so writers need no lock: at worst, two extract the same image. Every image has its
own checksum.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import struct
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from counterfoil.core.errors import DataError
from counterfoil.core.parallel import usable_cores
from counterfoil.core.storage.arrays import read_into
from counterfoil.core.storage.atomic import write_atomically
from counterfoil.core.storage.reading import open_descriptor
from counterfoil.features.chunks import Chunk

FOLDER = "image-features"
"""Folder of the features in a cache folder, which may hold other data, too."""

DIGESTS = "digests"
"""Folder in it with digests of images by the names and dates of their files (see `extract`)."""

CLEAR = "counterfoil data cache --clear"
_EXTRACTOR = "extractor.json"
_MAGIC = b"CFROWS01"
_HEAD = struct.Struct("<8sQII")
_RECORD = np.dtype([("digest", "u1", (32,)), ("length", "<i8"), ("checksum", "<u4")])
_FEATURE, _BOX = np.dtype("<f2"), np.dtype("<f4")
_REMAINS_SECONDS = 3600.0
"""An incomplete file older than this was left by a kill."""
_NOT_REGULAR = {errno.EINVAL, errno.EISDIR}
"""Errors of `open_descriptor` for something that is no file of the cache."""


@dataclass(frozen=True)
class RowFile:
    """A file of the cache: a header, one record per image, all features, all boxes."""

    path: Path
    count: int
    fragments: int
    dim: int

    @property
    def features_at(self) -> int:
        return _HEAD.size + self.count * _RECORD.itemsize

    @property
    def boxes_at(self) -> int:
        return self.features_at + self.count * self.fragments * self.dim * _FEATURE.itemsize

    @property
    def size(self) -> int:
        return self.boxes_at + self.count * self.fragments * 4 * _BOX.itemsize

    @classmethod
    def open(cls, path: Path) -> RowFile | None:
        """The file with the sizes in its header; None if it is not complete."""
        descriptor = open_descriptor(path)
        try:
            head = os.pread(descriptor, _HEAD.size, 0)
            if len(head) < _HEAD.size:
                return None
            magic, count, fragments, dim = _HEAD.unpack(head)
            file = cls(path, count, fragments, dim)
            whole = magic == _MAGIC and os.fstat(descriptor).st_size == file.size
            return file if whole else None
        finally:
            os.close(descriptor)

    @cached_property
    def records(self) -> NDArray[Any]:
        return self._read(_HEAD.size, (self.count,), _RECORD)

    @cached_property
    def digests(self) -> list[bytes]:
        return [record.tobytes() for record in self.records["digest"]]

    def features(self, row: int) -> NDArray[np.float16]:
        shape = (self.fragments, self.dim)
        step = self.fragments * self.dim * _FEATURE.itemsize
        return self._read(self.features_at + row * step, shape, _FEATURE)

    def boxes(self, row: int) -> NDArray[np.float32]:
        step = self.fragments * 4 * _BOX.itemsize
        return self._read(self.boxes_at + row * step, (self.fragments, 4), _BOX)

    def is_intact(self, row: int) -> bool:
        record = self.records[row]
        length = int(record["length"])
        checksum = _checksum(self.digests[row], length, self.features(row), self.boxes(row))
        return checksum == int(record["checksum"]) and 0 < length <= self.fragments

    def _read(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        # opened per read: many files would need as many descriptors otherwise
        out = np.empty(shape, dtype=dtype)
        try:
            descriptor = open_descriptor(self.path)
        except FileNotFoundError:
            raise DataError(f"{self.path}: the cache was cleared meanwhile; run it again") from None
        try:
            if not read_into(out, descriptor, offset):
                raise DataError(f"{self.path}: ends early; was it changed meanwhile?")
        finally:
            os.close(descriptor)
        return out


@dataclass(frozen=True)
class CachedRow:
    """The row of one image in a file."""

    file: RowFile
    row: int


class FeatureCache:
    """The features of one extractor; ``damaged`` lists files that failed their checksum."""

    def __init__(self, folder: Path, fingerprint: str = "") -> None:
        self.folder, self.fingerprint = folder, fingerprint
        self.damaged: list[Path] = []

    @classmethod
    def of(cls, cache_dir: Path, name: str, fingerprint: str) -> FeatureCache:
        key = hashlib.sha256(fingerprint.encode()).hexdigest()[:12]
        return cls(cache_dir / FOLDER / f"{name}-{key}", fingerprint)

    def find(self, wanted: Collection[bytes]) -> dict[bytes, CachedRow]:
        """The intact rows of the wanted digests. Damaged files are deleted."""
        rows: dict[bytes, CachedRow] = {}
        paths = sorted(self.folder.glob("*.rows"))
        with ThreadPoolExecutor(usable_cores()) as pool:
            results = pool.map(lambda path: _find_intact(path, wanted), paths)
            for path, intact in zip(paths, results, strict=True):
                if intact is None:
                    self.damaged.append(path)
                    with suppress(OSError):
                        path.unlink()
                else:
                    rows.update(intact)
        self._sweep()
        return rows

    def add(self, digests: Sequence[bytes], chunk: Chunk) -> dict[bytes, CachedRow]:
        """Write the good images of a chunk; `OSError` if that fails."""
        rows = [row for row in range(len(digests)) if row not in chunk.bad]
        if not rows:
            return {}
        features = chunk.features[rows].astype(_FEATURE, copy=False)
        boxes = chunk.boxes[rows].astype(_BOX, copy=False)
        records = np.zeros(len(rows), dtype=_RECORD)
        for record, row, own, box in zip(records, rows, features, boxes, strict=True):
            length = int(chunk.lengths[row])
            record["digest"] = np.frombuffer(digests[row], dtype=np.uint8)
            record["length"] = length
            record["checksum"] = _checksum(digests[row], length, own, box)
        # the same images get the same name and layout from every writer
        name = hashlib.sha256(records["digest"].tobytes()).hexdigest()[:24]
        file = RowFile(self.folder / f"{name}.rows", len(rows), *features.shape[1:])
        head = _HEAD.pack(_MAGIC, file.count, file.fragments, file.dim)
        parts = (head, records.tobytes(), features.tobytes(), boxes.tobytes())
        write_atomically(file.path, b"".join(parts))
        if not (self.folder / _EXTRACTOR).exists():  # for people, and `cache_contents`
            text = json.dumps({"extractor": self.fingerprint}, ensure_ascii=False)
            write_atomically(self.folder / _EXTRACTOR, f"{text}\n")
        return {digests[row]: CachedRow(file, number) for number, row in enumerate(rows)}

    def _sweep(self) -> None:
        """Delete files that a kill left incomplete."""
        with suppress(OSError):
            for path in self.folder.glob(".*.rows.*"):
                if time.time() - path.stat().st_mtime > _REMAINS_SECONDS:
                    path.unlink()


def _find_intact(path: Path, wanted: Collection[bytes]) -> dict[bytes, CachedRow] | None:
    """Rows of wanted images in a file; None if the file or one of these rows is damaged.

    A file that cannot be read now, as on a network drive that does not answer, is no damaged file.
    """
    try:
        file = RowFile.open(path)
        if file is None:
            return None
        rows = {digest: row for row, digest in enumerate(file.digests) if digest in wanted}
        if not all(file.is_intact(row) for row in rows.values()):
            return None
    except OSError as error:
        return None if error.errno in _NOT_REGULAR else {}
    except MemoryError:
        return {}
    except (DataError, ValueError):
        return None
    return {digest: CachedRow(file, row) for digest, row in rows.items()}


def _checksum(
    digest: bytes, length: int, features: NDArray[np.float16], boxes: NDArray[np.float32]
) -> int:
    start = zlib.crc32(length.to_bytes(8, "little", signed=True), zlib.crc32(digest))
    return zlib.crc32(boxes.tobytes(), zlib.crc32(features.tobytes(), start))


class CachedRows:
    """A `RowArray` over many files: the ``"features"``, or the ``"boxes"``, of some images."""

    def __init__(self, rows: Sequence[CachedRow], field: str) -> None:
        self.path = rows[0].file.path.parent
        self._rows, self._is_boxes = list(rows), field == "boxes"
        shapes = {(row.file.fragments, row.file.dim) for row in rows}
        if len(shapes) > 1:
            raise DataError(
                f"{self.path}: features of different shapes {sorted(shapes)} from one extractor; "
                f"its fingerprint must differ when its shape does (delete them: {CLEAR})"
            )
        ((fragments, dim),) = shapes
        self.shape: tuple[int, ...] = (len(rows), fragments, 4 if self._is_boxes else dim)
        self.dtype: np.dtype[Any] = _BOX if self._is_boxes else _FEATURE

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> NDArray[Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {self.path}, which has {len(self)}")
        cached = self._rows[index]
        read = cached.file.boxes if self._is_boxes else cached.file.features
        return read(cached.row)

    def rows(self, indices: Sequence[int]) -> NDArray[Any]:
        out = np.empty((len(indices), *self.shape[1:]), dtype=self.dtype)
        for position, index in enumerate(indices):
            out[position] = self.row(int(index))
        return out


@dataclass(frozen=True)
class CacheUse:
    """How many images of a data set came from the cache, and the size of the cache.

    ``extracted`` may be less than the rest, as copies of a photo are extracted once. ``folder`` is
    None without a cache.
    """

    images: int = 0
    cached: int = 0
    extracted: int = 0
    folder: Path | None = None
    bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        folder = None if self.folder is None else str(self.folder)
        return {**vars(self), "folder": folder}

    def __str__(self) -> str:
        return f"{self.cached:,} of {self.images:,} images from the cache"


@dataclass(frozen=True)
class CacheContents:
    """The number of images, and their bytes, that the cache has of one extractor."""

    name: str
    extractor: str
    images: int
    bytes: int


def cache_contents(cache_dir: Path) -> list[CacheContents]:
    """The contents of the cache, per extractor."""
    contents = []
    for folder in sorted(path for path in _folders(cache_dir) if path.name != DIGESTS):
        files = [file for file in map(_try_open, folder.glob("*.rows")) if file is not None]
        try:
            extractor = str(json.loads((folder / _EXTRACTOR).read_text())["extractor"])
        except (OSError, ValueError, KeyError, TypeError):
            extractor = folder.name
        images = sum(file.count for file in files)
        contents.append(CacheContents(folder.name, extractor, images, _bytes_in(folder)))
    return contents


def cache_bytes(cache_dir: Path) -> int:
    """Size of all features in a cache folder."""
    return sum(map(_bytes_in, _folders(cache_dir)))


def clear_cache(cache_dir: Path) -> int:
    """Delete the features in a cache folder, and nothing else; returns their size in bytes."""
    size = cache_bytes(cache_dir)
    for folder in _folders(cache_dir):
        shutil.rmtree(folder)
    with suppress(OSError):
        (cache_dir / FOLDER).rmdir()
    return size


def _folders(cache_dir: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in (cache_dir / FOLDER).iterdir():
            if path.is_dir() and not path.is_symlink():
                yield path


def _try_open(path: Path) -> RowFile | None:
    try:
        return RowFile.open(path)
    except OSError:
        return None


def _bytes_in(folder: Path) -> int:
    size = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # deleted by another process meanwhile
            size += path.lstat().st_size
    return size


def reason(error: OSError) -> str:
    """Why the cache cannot be written, as text."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return "the disk is full" if full else error.strerror or str(error)
