"""Batches from shards that are read in order: a random order of shards, then a shuffle buffer.

The order is a function of seed, epoch and number of processes, so a resumed run gets the same
batches. Each process reads its own consecutive piece of the shards. Remote bytes are fetched ahead
in large ranges and stay in memory until the last batch that needs them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from counterfoil.core.errors import CounterfoilError, DataError, RemoteError
from counterfoil.core.storage.reading import MIB
from counterfoil.core.storage.remote import MAX_GAP, RemoteFile
from counterfoil.data.batches.collate import Collate, PairBatch
from counterfoil.data.batches.dataset import CaptionItems
from counterfoil.data.batches.sampling import BatchPlan, RankBatches
from counterfoil.data.formats.tar_files import Archive, MemberRows
from counterfoil.data.fragments import FragmentTable, PictureRows
from counterfoil.data.images import MemberImage
from counterfoil.data.pairs import Split

SPAN_BYTES = 8 * MIB
"""Bytes per request; a single image may have more."""

FETCHERS = 4
"""Requests at the same time."""

AHEAD = 2
"""Batches that are fetched before they are needed, besides one per building thread."""

Integers = NDArray[np.int64]
Range = tuple[int, int]


@dataclass(frozen=True)
class ShardLayout:
    """Where the images of a split are: their shard, and the byte ranges that a batch reads."""

    archives: list[Archive]
    archive_of: Integers
    ranges: list[tuple[Range, ...]]

    @property
    def is_remote(self) -> bool:
        return any(isinstance(one, RemoteFile) for one in self.archives)

    def digest(self) -> str:
        """A digest that differs if shards are added, removed or replaced."""
        parts = [
            f"{one.url} {one.size} {one.stamp}"
            if isinstance(one, RemoteFile)
            else f"{one.name} {_size(one)}"
            for one in self.archives
        ]
        return sha256("\n".join([*parts, str(len(self.ranges))]).encode()).hexdigest()

    def evict(self, image: int) -> None:
        """Free the fetched bytes of an image."""
        archive = self.archives[int(self.archive_of[image])]
        if isinstance(archive, RemoteFile):
            for offset, _ in self.ranges[image]:
                archive.buffered.pop(offset, None)

    def buffered_ranges(self) -> int:
        """Number of fetched byte ranges in memory: one or two per image."""
        return sum(len(one.buffered) for one in self.archives if isinstance(one, RemoteFile))


def _size(shard: Path) -> int:
    try:
        return shard.stat().st_size
    except OSError as error:
        raise DataError(f"{shard}: cannot be read ({error.strerror})") from None


def find_layout(split: Split) -> ShardLayout | None:
    """The layout of a split whose images or features are members of shards; None for others."""
    table = split.fragments
    if table is None or not len(split):
        return None
    numbers: dict[Archive, int] = {}
    archive_of, ranges = [], []
    for image in range(len(split)):
        location = _location(table, image)
        if location is None:
            return None
        archive, own = location
        archive_of.append(numbers.setdefault(archive, len(numbers)))
        ranges.append(own)
    return ShardLayout(list(numbers), np.array(archive_of, dtype=np.int64), ranges)


def _location(table: FragmentTable, image: int) -> tuple[Archive, tuple[Range, ...]] | None:
    row = int(table.rows[image])
    if isinstance(table.features, PictureRows):
        ref = table.features.refs[row]
        if not isinstance(ref, MemberImage):
            return None
        return ref.archive, ((ref.offset, ref.size),)
    if not isinstance(table.features, MemberRows) or table.features.members[row] is None:
        return None
    boxes = table.boxes.members[row] if isinstance(table.boxes, MemberRows) else None
    members = [one for one in (table.features.members[row], boxes) if one is not None]
    return members[0].archive, tuple((one.offset, one.size) for one in members)


@dataclass(frozen=True)
class StreamPlan(BatchPlan):
    """A `BatchPlan` that visits images shard by shard, shuffled within ``buffer`` images.

    An epoch permutes the shards and cuts the sequence of their images into ``world`` pieces, one
    per process. In a piece, an item moves by less than ``buffer`` images.
    """

    layout: ShardLayout = field(kw_only=True)
    buffer: int = field(kw_only=True)
    world: int = field(default=1, kw_only=True)

    def images_in_order(self, epoch: int) -> Integers:
        """All images in the order in which an epoch reads them, before the buffer."""
        rng = np.random.default_rng([self.seed, epoch, 1])
        position = np.empty(len(self.layout.archives), dtype=np.int64)
        position[rng.permutation(len(position))] = np.arange(len(position))
        offsets = np.array([own[0][0] for own in self.layout.ranges], dtype=np.int64)
        return np.lexsort((offsets, position[self.layout.archive_of]))

    def order(self, epoch: int) -> Integers:
        captions = self._sequence(epoch)
        full, rest = divmod(len(captions), self.batch_size)
        if self.drop_last and full:
            captions, rest = captions[: full * self.batch_size], 0
        shares, last = _shares(self.batch_size, self.world), _shares(rest, self.world)
        rng = np.random.default_rng([self.seed, epoch, 2])
        pieces, start = [], 0
        for share, tail in zip(shares, last, strict=True):
            length = full * share + tail
            pieces.append(self._shuffled(captions[start : start + length], rng))
            start += length
        whole = [p[: full * s].reshape(full, s) for p, s in zip(pieces, shares, strict=True)]
        tails = [p[full * s :] for p, s in zip(pieces, shares, strict=True)]
        return np.concatenate([np.concatenate(whole, axis=1).ravel(), *tails])

    def _sequence(self, epoch: int) -> Integers:
        """The captions of an epoch in the order of their images."""
        image_of = self.split.image_of
        counts = np.bincount(image_of, minlength=len(self.split))
        first = np.cumsum(counts) - counts
        images = self.images_in_order(epoch)
        images = images[counts[images] > 0]
        if self.captions == "all":
            own = counts[images]
            within = np.arange(own.sum()) - np.repeat(np.cumsum(own) - own, own)
            return np.repeat(first[images], own) + within
        if self.captions == "grouped":
            return first[images]
        rng = np.random.default_rng([self.seed, epoch, 3])
        return first[images] + (rng.random(len(images)) * counts[images]).astype(np.int64)

    def _shuffled(self, captions: Integers, rng: np.random.Generator) -> Integers:
        """The captions sorted by the number of their image plus a random share of the buffer."""
        images = self.split.image_of[captions]
        position = np.cumsum(np.diff(images, prepend=images[:1]) != 0)
        return captions[
            np.argsort(position + self.buffer * rng.random(len(captions)), kind="stable")
        ]


def _shares(count: int, world: int) -> list[int]:
    """Sizes of the shares of a batch, as `RankBatches` divides it."""
    return [len(part) for part in np.array_split(np.arange(count), world)]


@dataclass(frozen=True)
class ReadFailure:
    """Takes the place of a batch that could not be read."""

    error: CounterfoilError


Built = PairBatch | tuple[str, ...]


class StreamLoader:
    """The batches of this process, in order, built by ``threads`` threads.

    Threads, not processes: all of them read the same fetched bytes.
    """

    def __init__(
        self, items: CaptionItems, batches: RankBatches, collate: Collate, threads: int
    ) -> None:
        if not isinstance(batches.plan, StreamPlan):
            raise TypeError("a stream needs a StreamPlan")
        self.plan, self.items, self.batches, self.collate = batches.plan, items, batches, collate
        self.threads = max(1, threads)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Built | ReadFailure]:
        """Batches; after a `ReadFailure` nothing follows."""
        pending: deque[tuple[list[tuple[int, int, int]], Future[Built]]] = deque()
        copies: SimpleQueue[CaptionItems] = SimpleQueue()
        for _ in range(self.threads):
            copies.put(self.items.for_thread())
        fetching = _Fetcher(self.plan, self.batches)
        builders = ThreadPoolExecutor(self.threads)
        try:
            for entries in self.batches:
                needed = fetching.request(self._images(entries))
                build = builders.submit(_build, copies, self.collate, entries, needed)
                pending.append((entries, build))
                if len(pending) > self.threads + AHEAD:
                    yield from self._next(pending, fetching)
            while pending:
                yield from self._next(pending, fetching)
        except (RemoteError, DataError) as error:
            yield ReadFailure(error)
        finally:
            builders.shutdown(wait=True, cancel_futures=True)
            fetching.close()

    def _next(self, pending: deque[Any], fetching: _Fetcher) -> Iterator[Built]:
        entries, build = pending.popleft()
        batch = build.result()
        fetching.release(self._images(entries))
        yield batch

    def _images(self, entries: Sequence[tuple[int, int, int]]) -> list[int]:
        image_of = self.plan.split.image_of
        return list(dict.fromkeys(int(image_of[caption]) for _, caption, _ in entries))


def _build(
    copies: SimpleQueue[CaptionItems],
    collate: Collate,
    entries: list[tuple[int, int, int]],
    needed: list[Future[None]],
) -> Built:
    for fetch in needed:
        fetch.result()
    items = copies.get()
    try:
        return collate([items[index] for index in entries])
    finally:
        copies.put(items)


@dataclass
class _Span:
    """Consecutive bytes of a remote shard, and the ranges in it that images need."""

    archive: RemoteFile
    start: int
    end: int
    ranges: list[Range]

    def fetch(self) -> None:
        data = self.archive.fetch(self.start, self.end - self.start)
        for offset, size in self.ranges:
            begin = offset - self.start
            self.archive.buffered[offset] = data[begin : begin + size]


class _Fetcher:
    """Fetches the shards of a process in order, as far as the requested batches need it."""

    def __init__(self, plan: StreamPlan, batches: RankBatches) -> None:
        self.layout = plan.layout
        self.pool = ThreadPoolExecutor(FETCHERS)
        self.fetches: dict[int, Future[None]] = {}
        self.uses = self._count_uses(plan, batches)
        images = plan.images_in_order(batches.epoch)
        self.spans = self._spans(int(image) for image in images if self.uses[image])

    def _count_uses(self, plan: StreamPlan, batches: RankBatches) -> Integers:
        """Number of the remaining batches of this process that need each image."""
        uses = np.zeros(len(plan.split), dtype=np.int64)
        order = plan.order(batches.epoch)
        for number in range(batches.start, len(plan)):
            share = np.array_split(plan.batch(order, number), batches.world)[batches.rank]
            uses[np.unique(plan.split.image_of[share])] += 1
        return uses

    def request(self, images: Sequence[int]) -> list[Future[None]]:
        """Begin to fetch all that these images need; the futures to wait for."""
        for image in images:
            while image not in self.fetches and self._is_remote(image):
                span, members = next(self.spans)
                future = self.pool.submit(span.fetch)
                self.fetches.update(dict.fromkeys(members, future))
        return list({id(f): f for i in images if (f := self.fetches.get(i)) is not None}.values())

    def release(self, images: Sequence[int]) -> None:
        """Free the bytes of images that no later batch needs."""
        for image in images:
            self.uses[image] -= 1
            if not self.uses[image]:
                self.layout.evict(image)
                self.fetches.pop(image, None)

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)
        for archive in self.layout.archives:
            if isinstance(archive, RemoteFile):
                archive.buffered.clear()

    def _is_remote(self, image: int) -> bool:
        return isinstance(self.layout.archives[int(self.layout.archive_of[image])], RemoteFile)

    def _spans(self, images: Iterator[int]) -> Iterator[tuple[_Span, list[int]]]:
        """Requests for images in order: near ranges of one shard are fetched together."""
        span: _Span | None = None
        members: list[int] = []
        for image in images:
            if not self._is_remote(image):
                continue
            archive = self.layout.archives[int(self.layout.archive_of[image])]
            own = self.layout.ranges[image]
            start, end = min(o for o, _ in own), max(o + size for o, size in own)
            near = (
                span is not None
                and span.archive is archive
                and 0 <= start - span.end <= MAX_GAP
                and end - span.start <= SPAN_BYTES
            )
            if span is not None and near:
                span.end = end
                span.ranges += own
                members.append(image)
                continue
            if span is not None:
                yield span, members
            assert isinstance(archive, RemoteFile)  # noqa: S101 - for the type checker
            span, members = _Span(archive, start, end, list(own)), [image]
        if span is not None:
            yield span, members
