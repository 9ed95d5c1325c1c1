"""The fragment files of one split: `{split}_ims.npy` and those that may stand beside it.

`{split}_ims.npy`
    features, float [images, fragments, dim] or [images, dim]
`{split}_ims_lens.npy`
    how many fragments of each image are real, integers [images], if that varies
`{split}_ims_bbx.npy`
    boxes x1, y1, x2, y2, numbers [images, fragments, 4]
`{split}_ims_size.npy`
    width and height, numbers [images, 2], if the boxes are in pixels
`{split}_ims_made_by.txt`
    name of the extractor, if it was one of ours
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from counterfoil.data.arrays import ArrayError, ArrayFile
from counterfoil.data.box_sizes import read_box_sizes
from counterfoil.data.fragments import FragmentTable
from counterfoil.data.problems import ProblemLog
from counterfoil.data.sources.text import read_lines

FEATURES, LENGTHS, BOXES, SIZES = "_ims.npy", "_ims_lens.npy", "_ims_bbx.npy", "_ims_size.npy"
MADE_BY = "_ims_made_by.txt"


def open_features(folder: Path, split: str, log: ProblemLog) -> FragmentTable | None:
    """All rows of a split's fragment files; None if there are none or they cannot be used."""
    path = folder / (split + FEATURES)
    if not path.exists():
        return None
    features = _open(path, log)
    if features is None:
        return None
    if features.dtype.kind != "f":
        log.fatal("wrong-dtype", path, f"expected float features, found {features.dtype}")
        return None
    if len(features.shape) not in (2, 3) or 0 in features.shape[1:]:
        log.fatal(
            "wrong-shape",
            path,
            f"expected [images, fragments, dim] or [images, dim], found {features.shape}",
        )
        return None
    count = len(features)
    fragments = features.shape[1] if len(features.shape) == 3 else 1
    return FragmentTable(
        features=features,
        rows=np.arange(count, dtype=np.int64),
        lengths=_lengths(folder / (split + LENGTHS), count, fragments, log),
        boxes=(boxes := _boxes(folder / (split + BOXES), count, fragments, log)),
        sizes=_sizes(folder / (split + SIZES), count, boxes, log),
        made_by=_made_by(folder / (split + MADE_BY), log),
    )


def _made_by(path: Path, log: ProblemLog) -> str | None:
    lines = [line.strip() for _, line in read_lines(path, log)] if path.exists() else []
    return lines[0] if lines and lines[0] else None


def _open(path: Path, log: ProblemLog) -> ArrayFile | None:
    try:
        return ArrayFile(path)
    except ArrayError as error:
        log.fatal(error.kind, path, str(error).removeprefix(f"{path}: "))
        return None


def _lengths(path: Path, count: int, fragments: int, log: ProblemLog) -> NDArray[np.int64] | None:
    if not path.exists():
        return None
    array = _open(path, log)
    if array is None:
        return None
    if array.shape != (count,) or array.dtype.kind not in "iu":
        log.fatal(
            "wrong-shape", path, f"expected {count} integers, found {array.dtype} {array.shape}"
        )
        return None
    lengths: NDArray[Any] = array.rows(range(count)).astype(np.int64)
    if count and not (lengths.min() >= 0 and lengths.max() <= fragments):
        log.fatal("wrong-shape", path, f"holds a count that is not within 0…{fragments}")
        return None
    return lengths


def _boxes(path: Path, count: int, fragments: int, log: ProblemLog) -> ArrayFile | None:
    if not path.exists():
        return None
    boxes = _open(path, log)
    if boxes is None:
        return None
    if boxes.shape != (count, fragments, 4) or boxes.dtype.kind not in "fiu":
        log.fatal(
            "wrong-shape",
            path,
            f"expected boxes {(count, fragments, 4)}, found {boxes.dtype} {boxes.shape}",
        )
        return None
    return boxes


def _sizes(
    path: Path, count: int, boxes: ArrayFile | None, log: ProblemLog
) -> NDArray[np.float32] | None:
    if boxes is None:
        return None
    if not path.exists():
        if len(boxes) and float(np.max(boxes.row(0))) > 1.5:
            log.note(
                "boxes-without-sizes",
                boxes.path,
                f"the boxes are in pixels, but there is no {path.name} to scale them by",
            )
        return None
    try:
        sizes = read_box_sizes(path)
    except ArrayError as error:
        log.fatal(error.kind, path, str(error).removeprefix(f"{path}: "))
        return None
    if len(sizes) != count:
        log.fatal("count-mismatch", path, f"{len(sizes)} sizes for {count} images")
        return None
    return sizes
