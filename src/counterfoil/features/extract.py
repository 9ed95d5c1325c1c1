"""Fragments for every image of a data set, extracted once per image content and extractor."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from counterfoil.core.errors import DataError
from counterfoil.core.parallel import bounded_workers, usable_cores
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.storage.atomic import Scratch, write_atomically
from counterfoil.core.storage.reading import GIB, read_bytes
from counterfoil.core.storage.remote import RemoteFile
from counterfoil.data.formats.assemble import may_lack
from counterfoil.data.fragments import FragmentTable, PixelTable
from counterfoil.data.images import FileImage, ImageRef, MemberImage, RowImage
from counterfoil.data.pairs import Pairs, ProblemLog, Split
from counterfoil.features.cache import (
    DIGESTS,
    FOLDER,
    CachedRow,
    CachedRows,
    CacheUse,
    FeatureCache,
    cache_bytes,
    reason,
)
from counterfoil.features.chunks import Chunk, Refs, chunks
from counterfoil.features.extractors import Backbone, Extractor, extractors, with_options
from counterfoil.features.pixels import Pixels

_SIZE = 32
_UNREADABLE = bytes(_SIZE)
_CHUNK = 64

_SAMPLE = 32
"""Images of a split whose content is checked before each run; for others, size and dates are."""

_BAR_FROM_IMAGES = 1000
"""Number of images above which reading them shows a progress bar."""

_scratch: list[Scratch] = []
"""Features outside the cache; a data set may read them until the process ends."""


def digest_of(ref: ImageRef) -> bytes:
    """SHA-256 of the encoded bytes of an image, or of its pixels if they are not encoded."""
    try:
        if isinstance(ref, RowImage):  # a PNG of it would depend on the version of Pillow
            pixels = ref.array.row(ref.row)
            head = f"pixels {pixels.dtype.str} {pixels.shape}\n".encode()
            return hashlib.sha256(head + pixels.tobytes()).digest()
        return hashlib.sha256(ref.read()).digest()
    except OSError as error:
        raise DataError(f"{ref.name}: cannot be read ({error.strerror})") from None


@dataclass(frozen=True)
class CheckedImage:
    """An image that must still match its digest when it is read."""

    ref: ImageRef
    digest: bytes

    @property
    def name(self) -> str:
        return self.ref.name

    def read(self) -> bytes:
        if isinstance(self.ref, RowImage):
            return self.ref.read()
        data = self.ref.read()
        if hashlib.sha256(data).digest() != self.digest:
            raise DataError(f"{self.name}: was changed while features were extracted; run it again")
        return data


def digests_of(split: Split, cache_dir: Path | None, progress: Progress) -> list[bytes | str]:
    """The digest of each image of a split, or an error message if it is unreadable.

    With a cache folder, digests are stored there and reused while the files of the split have the
    same names, sizes and dates.
    """
    pixels = split.pixels or ()
    path = None if cache_dir is None else cache_dir / FOLDER / DIGESTS / _fingerprint_of(split)
    cached = None if path is None else _try_read(path, len(pixels))
    if cached is not None:
        return [
            _try_digest(ref) if digest == _UNREADABLE else digest
            for ref, digest in zip(pixels, cached, strict=True)
        ]
    with ThreadPoolExecutor(usable_cores()) as pool:
        results = pool.map(_try_digest, pixels)
        if len(pixels) > _BAR_FROM_IMAGES:
            results = progress.track(results, f"reading images ({split.name})", len(pixels))
        digests = list(results)
    if path is not None:
        data = b"".join(d if isinstance(d, bytes) else _UNREADABLE for d in digests)
        with suppress(OSError):  # the next run reads the images again
            write_atomically(path, data + hashlib.sha256(data).digest())
    return digests


def _try_digest(ref: ImageRef) -> bytes | str:
    try:
        return digest_of(ref)
    except DataError as error:
        return str(error)


def _try_read(path: Path, count: int) -> list[bytes] | None:
    """Stored digests; None if there are none, or if the file is damaged."""
    try:
        data = read_bytes(path, GIB)
    except OSError:
        return None
    body, checksum = data[:-_SIZE], data[-_SIZE:]
    if len(body) != count * _SIZE or hashlib.sha256(body).digest() != checksum:
        return None
    return [body[start : start + _SIZE] for start in range(0, len(body), _SIZE)]


def _fingerprint_of(split: Split) -> str:
    """A digest that differs if images are added, removed, reordered or replaced."""
    digest = hashlib.sha256()
    pixels = split.pixels or ()
    for stamp in _stamps(pixels):
        digest.update(f"{stamp}\n".encode(errors="surrogatepass"))
    for index in range(0, len(pixels), max(1, len(pixels) // _SAMPLE)):
        content = _try_digest(pixels[index])
        digest.update(content if isinstance(content, bytes) else b"unreadable")
    return digest.hexdigest()


def _stamps(pixels: Sequence[ImageRef]) -> Iterator[str]:
    cached_stamp = lru_cache(maxsize=1024)(_stamp)  # many images share an archive or an array
    for ref in pixels:
        if isinstance(ref, FileImage):
            yield f"{ref.path} {_stamp(ref.path)}"
        elif isinstance(ref, MemberImage):
            yield f"{ref.archive} {cached_stamp(ref.archive)} {ref.name} {ref.offset} {ref.size}"
        elif isinstance(ref, RowImage):
            yield f"{ref.array.path} {cached_stamp(ref.array.path)} {ref.array.shape} {ref.row}"
        else:
            yield ref.name


def _stamp(path: Path | RemoteFile) -> str:
    """Size and times of a file; of a remote one what its server states."""
    if isinstance(path, RemoteFile):
        return f"{path.url} {path.size} {path.stamp}"
    try:
        status = path.stat()
    except OSError:
        return "missing"
    # the change time of the inode also reveals a file whose date was set back
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def with_fragments(
    pairs: Pairs,
    cache_dir: Path | None,
    extractor: str = "segments",
    options: dict[str, Any] | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
    device: str = "auto",
) -> Pairs:
    """The data set with fragments for every split that has pixels but no fragments yet.

    Fragments are cached in ``cache_dir`` by image content and extractor; None: in a temporary
    folder, until the process ends. An image that cannot be decoded is dropped with its captions and
    recorded in the problems of the result. ``device`` is where a `Backbone` runs. The extractor
    "pixels" extracts nothing: images are decoded when they are read.
    """
    tool: Extractor = extractors.create(extractor, options or {}, where="features")
    if isinstance(tool, Pixels):
        return with_pixels(pairs, tool)
    job = Job(extractor, options or {}, tool, progress or Silent(), workers, device)
    return extract_pairs(pairs, cache_dir, job).pairs


def with_pixels(pairs: Pairs, tool: Pixels) -> Pairs:
    """The data set with the patches of its images as fragments, decoded when they are read."""
    splits = {split.name: _pixels_of(pairs.name, split, tool) for split in pairs}
    return replace(pairs, splits=splits)


def _pixels_of(name: str, split: Split, tool: Pixels) -> Split:
    if split.pixels is not None:
        return replace(split, fragments=PixelTable.of(split.pixels, tool, tool.description()))
    table = split.fragments
    if table is not None and (table.max_fragments, table.dim) == (tool.max_fragments, tool.dim):
        return split  # patches on disk, made by: counterfoil features -b pixels
    raise DataError(
        f"data set '{name}': the model reads pixels, but split '{split.name}' has no images, only "
        "features; name the folder of images (see: counterfoil data inspect)"
    )


@dataclass(frozen=True)
class Job:
    """How to extract: an extractor with its name and options, and where it runs.

    ``temporary`` is the folder for features that cannot be cached; None: the system's.
    """

    name: str
    options: dict[str, Any]
    tool: Extractor
    progress: Progress
    workers: int | None = None
    device: str = "auto"
    temporary: Path | None = None


@dataclass(frozen=True)
class Extraction:
    """A data set with fragments, and the use of the cache.

    ``scratch`` has features that could not be cached; it is deleted when the process ends.
    """

    pairs: Pairs
    cache: CacheUse
    scratch: Scratch | None = None


def extract_pairs(
    pairs: Pairs, cache_dir: Path | None, job: Job, parts: StoredParts | None = None
) -> Extraction:
    """`with_fragments` for an extractor that exists already.

    With ``parts``, nothing is extracted: all features must be in them.
    """
    todo = [s for s in pairs if s.fragments is None and s.pixels is not None and len(s)]
    if not todo:
        return Extraction(pairs, CacheUse())
    work = extract_splits(todo, cache_dir, job, parts)
    log = ProblemLog(list(pairs.problems))
    splits = dict(pairs.splits)
    made_by = with_options(job.name, job.options)
    for split in todo:
        complete = _attach(split, work.digests[split.name], work.rows, work.bad, made_by, log)
        if len(complete):
            splits[split.name] = complete
        else:
            del splits[split.name]
    return Extraction(replace(pairs, splits=splits, problems=log.problems), work.use, work.scratch)


class StoredParts(Protocol):
    """Features that other processes extracted (`features.parts`)."""

    def find(
        self, splits: Sequence[Split], digests: Mapping[str, Sequence[bytes | str]]
    ) -> tuple[dict[bytes, CachedRow], dict[bytes, str]]:
        """The row of every image by its digest, or the error message of an unreadable one."""
        ...


@dataclass(frozen=True)
class ExtractedSplits:
    """Digests per split, cached rows and error messages by digest, and the use of the cache."""

    digests: dict[str, list[bytes | str]]
    rows: Mapping[bytes, CachedRow]
    bad: Mapping[bytes, str]
    use: CacheUse
    scratch: Scratch | None = None


def extract_splits(
    splits: Sequence[Split], cache_dir: Path | None, job: Job, parts: StoredParts | None = None
) -> ExtractedSplits:
    """Extract and store the features of all images that the cache (or ``parts``) does not have."""
    digests = {split.name: digests_of(split, cache_dir, job.progress) for split in splits}
    if parts is not None:
        rows, bad = parts.find(splits, digests)
        listed = sum(map(len, digests.values()))
        return ExtractedSplits(digests, rows, bad, CacheUse(listed, listed))
    store = _Store(cache_dir, job)
    images: dict[bytes, ImageRef] = {}
    for split in splits:
        for digest, ref in zip(digests[split.name], split.pixels or (), strict=True):
            if isinstance(digest, bytes):
                images.setdefault(digest, ref)
    store.find(images)
    all_digests = [digest for split in splits for digest in digests[split.name]]
    use = CacheUse(len(all_digests), sum(digest in store.rows for digest in all_digests))
    if cache_dir is not None:
        job.progress.say(f"features: {use}")
    missing = [digest for digest in images if digest not in store.rows]
    bad = store.extract([(digest, images[digest]) for digest in missing])
    use = replace(
        use,
        extracted=len(missing) - len(bad),
        folder=cache_dir,
        bytes=cache_bytes(cache_dir) if cache_dir is not None else 0,
    )
    return ExtractedSplits(digests, store.rows, bad, use, store.scratch)


class _Store:
    """The features of a job: in the cache or, if that is not writable, in a temporary folder."""

    def __init__(self, cache_dir: Path | None, job: Job) -> None:
        self.job = job
        self.scratch: Scratch | None = None
        self.rows: dict[bytes, CachedRow] = {}
        if cache_dir is None:
            self.cache = self._temporary_cache()
        else:
            self.cache = FeatureCache.of(cache_dir, job.tool.name, job.tool.fingerprint())

    def find(self, digests: Collection[bytes]) -> None:
        self.rows.update(self.cache.find(digests))
        if self.cache.damaged:
            self.job.progress.say(
                f"warning: {self.cache.folder}: {len(self.cache.damaged)} damaged file(s) of the "
                "cache deleted; their images are extracted again"
            )

    def extract(self, images: list[tuple[bytes, ImageRef]]) -> dict[bytes, str]:
        """Extract and store images; returns error messages by digest."""
        bad: dict[bytes, str] = {}
        if images and isinstance(self.job.tool, Backbone):
            from counterfoil.core.tensors.device import choose_device  # which imports torch

            self.job.tool.to(str(choose_device(self.job.device)))
        for digests, chunk in _work(images, self._bounded_job()):
            bad.update((digests[row], message) for row, message in chunk.bad.items())
            self.rows.update(self._store(digests, chunk))
        return bad

    def _bounded_job(self) -> Job:
        """The job with at most one process per core; threads are not limited."""
        wanted = self.job.workers
        if wanted is None or isinstance(self.job.tool, Backbone):
            return self.job
        return replace(self.job, workers=bounded_workers(wanted, "workers", self.job.progress))

    def _store(self, digests: list[bytes], chunk: Chunk) -> dict[bytes, CachedRow]:
        try:
            return self.cache.add(digests, chunk)
        except OSError as error:
            if self.scratch is not None:
                raise
            self.job.progress.say(
                f"warning: {self.cache.folder}: the cache cannot be written ({reason(error)}); "
                "going on without it"
            )
        self.cache = self._temporary_cache()
        return self.cache.add(digests, chunk)

    def _temporary_cache(self) -> FeatureCache:
        self.scratch = Scratch(".counterfoil-features-", self.job.temporary)
        _scratch.append(self.scratch)
        return FeatureCache(self.scratch.folder)


def _work(images: list[tuple[bytes, ImageRef]], job: Job) -> Iterator[tuple[list[bytes], Chunk]]:
    starts = range(0, len(images), _CHUNK)
    parts: list[Refs] = [
        [CheckedImage(ref, digest) for digest, ref in images[start : start + _CHUNK]]
        for start in starts
    ]

    def steps() -> Iterator[tuple[list[bytes], Chunk] | None]:
        # one step per image, so that the bar counts images; the last one carries the chunk
        results = chunks(job.tool, job.name, job.options, parts, job.workers)
        for start, chunk in zip(starts, results, strict=True):
            yield from [None] * (len(chunk.lengths) - 1)
            yield [digest for digest, _ in images[start : start + _CHUNK]], chunk

    if images:
        for step in job.progress.track(steps(), "extracting features", total=len(images)):
            if step is not None:
                yield step


def _attach(
    split: Split,
    digests: list[bytes | str],
    cached: Mapping[bytes, CachedRow],
    bad: Mapping[bytes, str],
    made_by: str,
    log: ProblemLog,
) -> Split:
    """The split with its fragments, without unreadable images."""
    dropped = {}
    for row, digest in enumerate(digests):
        if isinstance(digest, str):
            dropped[row] = digest
        elif digest not in cached:
            dropped[row] = bad[digest]
    for row, message in dropped.items():
        log.skip("unreadable-image", f"{split.name}/{split.ids[row]}", message)
    selected = [row for row in range(len(split)) if row not in dropped]
    if not selected:
        message = (
            f"none of its {len(split)} images can be read "
            f"(the first: {next(iter(dropped.values()))})"
        )
        if not may_lack(split.name, log.problems):
            raise DataError(f"split '{split.name}': {message}")
        log.skip("no-images", f"split '{split.name}'", f"{message}; the split is left out")
        return split.select([])
    rows = [cached[digest] for digest in digests if isinstance(digest, bytes) and digest in cached]
    table = FragmentTable(
        CachedRows(rows, "features"),
        np.arange(len(rows), dtype=np.int64),
        np.array([row.file.records[row.row]["length"] for row in rows], dtype=np.int64),
        CachedRows(rows, "boxes"),
        made_by=made_by,
    )
    return replace(split.select(selected) if dropped else split, fragments=table)
