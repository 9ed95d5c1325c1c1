"""Fragments for every image of a data set, extracted once per image content and extractor."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from counterfoil.core.errors import DataError
from counterfoil.core.parallel import bounded_workers, usable_cores
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.storage.atomic import Scratch, write_atomically
from counterfoil.core.storage.reading import GIB, read_bytes
from counterfoil.data.formats.assemble import may_lack
from counterfoil.data.fragments import FragmentTable, PixelTable
from counterfoil.data.images import FileImage, ImageRef, MemberImage, RowImage
from counterfoil.data.pairs import Pairs, ProblemLog, Split
from counterfoil.features.backbone import Backbone
from counterfoil.features.cache import (
    DIGESTS,
    FOLDER,
    CachedRows,
    CacheUse,
    FeatureCache,
    Place,
    cache_bytes,
    reason,
)
from counterfoil.features.chunks import Chunk, Refs, chunks
from counterfoil.features.extractors import Extractor, extractors
from counterfoil.features.pixels import Pixels

_SIZE = 32
_UNREADABLE = bytes(_SIZE)
# So many images of a split are read in full before each run; of the others, size and dates must do.
_READ = 32
# A bar is worth its line for more images than this.
_CLEANUP_FROM_ENTRIES = 1000

_CHUNK = 64

_scratch: list[Scratch] = []
"""Features outside the cache are needed as long as a data set is, so until the process ends."""


def digest_of(ref: ImageRef) -> bytes:
    """SHA-256 of an image's encoded bytes (of its pixels if they are not encoded); or `DataError`.

    It is always read in full.
    """
    try:
        if isinstance(ref, RowImage):  # a PNG made of it would depend on the version of Pillow
            pixels = ref.array.row(ref.row)
            head = f"pixels {pixels.dtype.str} {pixels.shape}\n".encode()
            return hashlib.sha256(head + pixels.tobytes()).digest()
        return hashlib.sha256(ref.read()).digest()
    except OSError as error:
        raise DataError(f"{ref.name}: cannot be read ({error.strerror})") from None


@dataclass(frozen=True)
class CheckedImage:
    """An image that must still have the content that its digest was made of."""

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
    """The digest of each image of a split; a message for one that cannot be read.

    With a cache folder, they are written there. The next time, a split whose files have the same
    names, sizes and dates needs not be read again.
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
        made = pool.map(_try_digest, pixels)
        title = f"reading images ({split.name})"
        tracked = (
            progress.track(made, title, len(pixels))
            if len(pixels) > _CLEANUP_FROM_ENTRIES
            else made
        )
        digests = list(tracked)
    if path is not None:
        data = b"".join(d if isinstance(d, bytes) else _UNREADABLE for d in digests)
        with suppress(OSError):  # only time is lost
            write_atomically(path, data + hashlib.sha256(data).digest())
    return digests


def _try_digest(ref: ImageRef) -> bytes | str:
    try:
        return digest_of(ref)
    except DataError as error:
        return str(error)


def _try_read(path: Path, count: int) -> list[bytes] | None:
    """Digests that were written before; None if there are none, or not all of them are intact."""
    try:
        data = read_bytes(path, GIB)
    except OSError:
        return None
    body, checksum = data[:-_SIZE], data[-_SIZE:]
    if len(body) != count * _SIZE or hashlib.sha256(body).digest() != checksum:
        return None
    return [body[start : start + _SIZE] for start in range(0, len(body), _SIZE)]


def _fingerprint_of(split: Split) -> str:
    """Changes when images are added, removed, reordered or replaced."""
    digest = hashlib.sha256()
    pixels = split.pixels or ()
    for stamp in _stamps(pixels):
        digest.update(f"{stamp}\n".encode(errors="surrogatepass"))
    for index in range(0, len(pixels), max(1, len(pixels) // _READ)):
        made = _try_digest(pixels[index])
        digest.update(made if isinstance(made, bytes) else b"unreadable")
    return digest.hexdigest()


def _stamps(pixels: Sequence[ImageRef]) -> Iterator[str]:
    dated = lru_cache(maxsize=1024)(_dated)  # many images share an archive or an array
    for ref in pixels:
        if isinstance(ref, FileImage):
            yield f"{ref.path} {_dated(ref.path)}"
        elif isinstance(ref, MemberImage):
            yield f"{ref.archive} {dated(ref.archive)} {ref.name} {ref.offset} {ref.size}"
        elif isinstance(ref, RowImage):
            yield f"{ref.array.path} {dated(ref.array.path)} {ref.array.shape} {ref.row}"
        else:
            yield ref.name


def _dated(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return "missing"
    # The time of the last change of its inode shows also a file whose date was set back.
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

    They are cached in ``cache_dir`` by the content of each image and the extractor, and an image
    that is there is not extracted again; None: in a temporary folder, until the process ends. An
    image that cannot be decoded is left out with its captions, and recorded in the problems of the
    result. ``device`` is where a `Backbone` runs.
    Pixels are not extracted: images stay where they are, whatever features came with them.
    """
    tool: Extractor = extractors.create(extractor, options or {}, where="features")
    if isinstance(tool, Pixels):
        return with_pixels(pairs, tool)
    job = Job(extractor, options or {}, tool, progress or Silent(), workers, device)
    return extract_pairs(pairs, cache_dir, job).pairs


def with_pixels(pairs: Pairs, tool: Pixels) -> Pairs:
    """The data set with the patches of its images for fragments, decoded when they are read."""
    splits = {split.name: _pixels_of(pairs.name, split, tool) for split in pairs}
    return replace(pairs, splits=splits)


def _pixels_of(name: str, split: Split, tool: Pixels) -> Split:
    if split.pixels is not None:
        return replace(split, fragments=PixelTable.of(split.pixels, tool, tool.described()))
    table = split.fragments
    if table is not None and (table.max_fragments, table.dim) == (tool.max_fragments, tool.dim):
        return split  # patches that were written before: counterfoil features -b pixels
    raise DataError(
        f"data set '{name}': the model reads pixels, but split '{split.name}' has no images, only "
        "features that were made before; name the folder of images (see: counterfoil data inspect)"
    )


@dataclass(frozen=True)
class Job:
    """How to extract: an extractor by its name and options, and made of them.

    ``temporary`` is the folder for features that cannot be cached; None: that of the system.
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
    """A data set with fragments, and what came from the cache.

    ``scratch`` has those that could not be cached; the end of the process deletes it otherwise.
    """

    pairs: Pairs
    cache: CacheUse
    scratch: Scratch | None = None


def extract_pairs(pairs: Pairs, cache_dir: Path | None, job: Job) -> Extraction:
    """`with_fragments` with an extractor that is already made."""
    todo = [s for s in pairs if s.fragments is None and s.pixels is not None and len(s)]
    if not todo:
        return Extraction(pairs, CacheUse())
    store = _Store(cache_dir, job)
    digests = {split.name: digests_of(split, cache_dir, job.progress) for split in todo}
    images: dict[bytes, ImageRef] = {}
    for split in todo:
        for digest, ref in zip(digests[split.name], split.pixels or (), strict=True):
            if isinstance(digest, bytes):
                images.setdefault(digest, ref)
    store.find(images)
    listed = [digest for split in todo for digest in digests[split.name]]
    use = CacheUse(len(listed), sum(digest in store.places for digest in listed))
    if cache_dir is not None:
        job.progress.say(f"features: {use}")
    missing = [digest for digest in images if digest not in store.places]
    bad = store.extract([(digest, images[digest]) for digest in missing])
    log = ProblemLog(list(pairs.problems))
    splits = dict(pairs.splits)
    for split in todo:
        made = _attach(split, digests[split.name], store.places, bad, job.name, log)
        if len(made):
            splits[split.name] = made
        else:
            del splits[split.name]
    use = replace(
        use,
        extracted=len(missing) - len(bad),
        folder=cache_dir,
        bytes=cache_bytes(cache_dir) if cache_dir is not None else 0,
    )
    return Extraction(replace(pairs, splits=splits, problems=log.problems), use, store.scratch)


class _Store:
    """Where the features of a job are: in the cache or, if it cannot be written, elsewhere."""

    def __init__(self, cache_dir: Path | None, job: Job) -> None:
        self.job = job
        self.scratch: Scratch | None = None
        self.places: dict[bytes, Place] = {}
        if cache_dir is None:
            self.cache = self._elsewhere()
        else:
            self.cache = FeatureCache.of(cache_dir, job.tool.name, job.tool.fingerprint())

    def find(self, digests: Collection[bytes]) -> None:
        self.places.update(self.cache.find(digests))
        if self.cache.damaged:
            self.job.progress.say(
                f"warning: {self.cache.folder}: {len(self.cache.damaged)} damaged file(s) of the "
                "cache deleted; their images are extracted again"
            )

    def extract(self, images: list[tuple[bytes, ImageRef]]) -> dict[bytes, str]:
        """Extract and keep; returns messages about images that could not be used."""
        bad: dict[bytes, str] = {}
        if images and isinstance(self.job.tool, Backbone):
            from counterfoil.core.tensors.device import choose_device  # which imports torch

            self.job.tool.to(str(choose_device(self.job.device)))
        for digests, chunk in _work(images, self._bounded_job()):
            bad.update((digests[row], message) for row, message in chunk.bad.items())
            self.places.update(self._keep(digests, chunk))
        return bad

    def _bounded_job(self) -> Job:
        """Threads may wait for a disk; more processes than cores only take memory."""
        wanted = self.job.workers
        if wanted is None or isinstance(self.job.tool, Backbone):
            return self.job
        return replace(self.job, workers=bounded_workers(wanted, "workers", self.job.progress))

    def _keep(self, digests: list[bytes], chunk: Chunk) -> dict[bytes, Place]:
        try:
            return self.cache.add(digests, chunk)
        except OSError as error:
            if self.scratch is not None:
                raise
            self.job.progress.say(
                f"warning: {self.cache.folder}: the cache cannot be written ({reason(error)}); "
                "going on without it"
            )
        self.cache = self._elsewhere()
        return self.cache.add(digests, chunk)

    def _elsewhere(self) -> FeatureCache:
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
        # One step an image, so that the bar counts images; the last of a chunk carries it.
        made = chunks(job.tool, job.name, job.options, parts, job.workers)
        for start, chunk in zip(starts, made, strict=True):
            yield from [None] * (len(chunk.lengths) - 1)
            yield [digest for digest, _ in images[start : start + _CHUNK]], chunk

    if images:
        for step in job.progress.track(steps(), "extracting features", total=len(images)):
            if step is not None:
                yield step


def _attach(
    split: Split,
    digests: list[bytes | str],
    places: Mapping[bytes, Place],
    bad: Mapping[bytes, str],
    extractor: str,
    log: ProblemLog,
) -> Split:
    """The split with its fragments, less the images that could not be read."""
    dropped = {}
    for row, digest in enumerate(digests):
        if isinstance(digest, str):
            dropped[row] = digest
        elif digest not in places:
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
    rows = [places[digest] for digest in digests if isinstance(digest, bytes) and digest in places]
    table = FragmentTable(
        CachedRows(rows, "features"),
        np.arange(len(rows), dtype=np.int64),
        np.array([place.file.records[place.row]["length"] for place in rows], dtype=np.int64),
        CachedRows(rows, "boxes"),
        made_by=extractor,
    )
    return replace(split.select(selected) if dropped else split, fragments=table)
