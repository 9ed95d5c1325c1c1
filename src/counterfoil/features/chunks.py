"""Parallel extraction in chunks of images: by processes, or by threads that feed a network."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from counterfoil.core.errors import DataError
from counterfoil.core.parallel import ordered_map, usable_cores
from counterfoil.data.fragments import Fragments
from counterfoil.data.images import ImageRef, open_image
from counterfoil.features.extractors import Backbone, Extractor, extractors
from counterfoil.features.views import View

_MAX_FLOAT16 = float(np.finfo(np.float16).max)
_MAX_THREADS = 16

Refs = list[ImageRef]
_Task = tuple[str, str, Refs]


@dataclass(frozen=True)
class Chunk:
    """Padded fragments of a few images, and error messages by row in ``bad``."""

    features: NDArray[np.float16]
    boxes: NDArray[np.float32]
    lengths: NDArray[np.int64]
    bad: dict[int, str]


def chunks(
    tool: Extractor, name: str, options: dict[str, Any], parts: Sequence[Refs], workers: int | None
) -> Iterator[Chunk]:
    """The chunk of each part, in order, computed a few parts ahead.

    A `Backbone` stays in this process with its weights, and ``workers`` threads decode for it. Any
    other extractor is created in each of ``workers`` processes.
    """
    if isinstance(tool, Backbone):
        return _by_threads(tool, parts, workers)
    text = json.dumps(options, sort_keys=True)
    return ordered_map(_in_process, [(name, text, refs) for refs in parts], workers)


def _in_process(task: _Task) -> Chunk:
    name, options, refs = task
    tool = _tool(name, options)
    return _fill(tool, [_extract(tool, ref) for ref in refs])


@lru_cache(maxsize=4)
def _tool(name: str, options: str) -> Extractor:
    tool: Extractor = extractors.create(name, json.loads(options))
    return tool


def _extract(tool: Extractor, ref: ImageRef) -> Fragments | str:
    try:
        return tool.extract(open_image(ref))
    except DataError as error:
        return str(error)


def _by_threads(tool: Backbone, parts: Sequence[Refs], workers: int | None) -> Iterator[Chunk]:
    """Pillow releases the GIL to decode and resize, so threads suffice, without copies."""
    pool = ThreadPoolExecutor(workers or min(usable_cores(), _MAX_THREADS))
    waiting: deque[list[Future[list[View] | str]]] = deque()
    try:
        for refs in parts:
            waiting.append([pool.submit(_views, tool, ref) for ref in refs])
            if len(waiting) > 1:
                yield _run(tool, waiting.popleft())
        while waiting:
            yield _run(tool, waiting.popleft())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _views(tool: Backbone, ref: ImageRef) -> list[View] | str:
    try:
        return tool.views(open_image(ref))
    except DataError as error:
        return str(error)


def _run(tool: Backbone, decoding: list[Future[list[View] | str]]) -> Chunk:
    decoded = [future.result() for future in decoding]
    good = iter(tool.run(_whole_batches(tool, [v for v in decoded if not isinstance(v, str)])))
    return _fill(tool, [views if isinstance(views, str) else next(good) for views in decoded])


def _whole_batches(tool: Backbone, images: list[list[View]]) -> list[list[View]]:
    """Images, padded with copies of the last one to full batches.

    Convolutions may differ in the last bits between batch sizes. With one batch size, the features
    of an image do not depend on the other images.
    """
    return [*images, *([images[-1]] * (-len(images) % tool.views_per_batch))] if images else []


def _fill(tool: Extractor, results: list[Fragments | str]) -> Chunk:
    """Pad to arrays; features are clipped to the range of float16."""
    most = tool.max_fragments
    features = np.zeros((len(results), most, tool.dim), dtype=np.float16)
    boxes = np.zeros((len(results), most, 4), dtype=np.float32)
    lengths = np.zeros(len(results), dtype=np.int64)
    bad = {}
    for row, fragments in enumerate(results):
        if isinstance(fragments, str):
            bad[row] = fragments
        elif not np.isfinite(fragments.features).all():
            bad[row] = f"the extractor '{tool.name}' gave numbers that are not finite"
        else:
            count = lengths[row] = len(fragments)
            features[row, :count] = fragments.features.clip(-_MAX_FLOAT16, _MAX_FLOAT16)
            if fragments.boxes is not None:
                boxes[row, :count] = fragments.boxes
    return Chunk(features, boxes, lengths, bad)
