"""Faults that show only when everything is read: images that do not decode, features not finite."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from counterfoil.data.fragments import FragmentTable
from counterfoil.data.images import ImageRef, MissingImage, open_image
from counterfoil.data.look_alikes import Look, look_at
from counterfoil.data.pairs import Pairs, Split
from counterfoil.data.problems import ProblemLog
from counterfoil.errors import DataError
from counterfoil.progress import Progress, Silent

_THREADS = 4
_AHEAD = 32


@dataclass
class DeepCheck:
    """What a full reading of a split found: images that cannot be used, sizes, and looks."""

    bad: set[int] = field(default_factory=set)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    looks: list[Look | None] = field(default_factory=list)


def check_split(split: Split, log: ProblemLog, progress: Progress | None = None) -> DeepCheck:
    """Decode every image and read every row of features of a split, a few at a time."""
    progress = progress or Silent()
    found = DeepCheck()
    if split.pixels is not None:
        decoded = progress.track(
            _decode_all(list(split.pixels)), f"decoding {split.name} images", len(split)
        )
        for index, result in enumerate(decoded):
            found.looks.append(None if isinstance(result, str) else result.look)
            if not isinstance(result, str):
                found.sizes.append(result.size)
            elif not isinstance(split.pixels[index], MissingImage):
                where = f"split '{split.name}', image '{split.ids[index]}'"
                log.skip("unreadable-image", where, result)
                found.bad.add(index)
    if split.fragments is not None:
        tracked = progress.track(range(len(split)), f"reading {split.name} features", len(split))
        for index in tracked:
            fault = _row_fault(split.fragments, index)
            if fault is not None:
                where = f"{split.fragments.features.path}: image '{split.ids[index]}'"
                log.skip(fault[0], where, fault[1])
                found.bad.add(index)
    return found


def drop_unreadable(pairs: Pairs, progress: Progress | None = None) -> Pairs:
    """The pairs without images that do not decode or whose features are not finite."""
    log = ProblemLog(list(pairs.problems))
    splits = {}
    for name, split in pairs.splits.items():
        bad = check_split(split, log, progress).bad
        good = [image for image in range(len(split)) if image not in bad]
        splits[name] = split.select(good) if bad else split
    return Pairs(pairs.name, splits, log.problems)


@dataclass(frozen=True)
class _Decoded:
    size: tuple[int, int]
    look: Look


def _decode_all(images: list[ImageRef]) -> Iterator[_Decoded | str]:
    """Size and look of each image, or why it cannot be read; decoding runs on threads."""
    with ThreadPoolExecutor(_THREADS) as pool:
        waiting: deque[Future[_Decoded | str]] = deque()
        try:
            for image in images:
                waiting.append(pool.submit(_decode, image))
                if len(waiting) > _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _decode(image: ImageRef) -> _Decoded | str:
    try:
        decoded = open_image(image)
        return _Decoded(decoded.size, look_at(decoded))
    except DataError as error:
        return str(error)


def _row_fault(table: FragmentTable, index: int) -> tuple[str, str] | None:
    try:
        stored = table.stored(index)
    except DataError as error:
        return "truncated-array", str(error)
    finite = np.isfinite(stored.features)
    if not finite.all():
        row = int(table.rows[index])
        return "non-finite", f"row {row}: {int((~finite).sum())} values are not finite numbers"
    if stored.boxes is not None and not np.isfinite(stored.boxes).all():
        return "non-finite", f"row {int(table.rows[index])}: a box is not finite numbers"
    return None
