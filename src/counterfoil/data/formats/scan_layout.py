"""Which captions and which row of features belong to which image of a plain SCAN split.

The files only hold counts. Where there are fewer rows than captions, every image has equally many
captions. Where there are as many rows as captions, either every image has one caption, or images
are stored once per caption (the published dev and test files are stored five times).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from counterfoil.core.storage.arrays import ArrayFile

USUAL_CAPTIONS = 5


@dataclass(frozen=True)
class Layout:
    """Captions ``starts[i]`` to ``starts[i + 1]`` belong to image ``i``, stored in ``rows[i]``."""

    starts: list[int]
    rows: list[int]
    ids: list[str] | None
    fault: str | None = None
    collapsed: int = 1

    def __len__(self) -> int:
        return len(self.rows)


def find_layout(captions: int, ids: Sequence[str] | None, features: ArrayFile | None) -> Layout:
    """The layout of a split, with a fault where its counts do not fit together."""
    if features is None:
        return _without_features(captions, ids)
    rows = len(features)
    if rows == captions:
        return _one_row_a_caption(rows, ids, features)
    if rows and captions > rows and captions % rows == 0:
        return _even(captions, rows, ids)
    fault = f"{captions} captions for {rows} images: expected the same number for every image"
    guess = min(rows, -(-captions // USUAL_CAPTIONS)) if captions > rows else captions
    known = list(ids[:guess]) if ids is not None and len(ids) in (rows, guess) else None
    return Layout(_starts(captions, guess), list(range(guess)), known, fault)


def _even(captions: int, images: int, ids: Sequence[str] | None) -> Layout:
    each = captions // images
    fault = None
    if ids is not None and len(ids) == captions:
        ids = ids[::each]
    elif ids is not None and len(ids) != images:
        fault, ids = f"{len(ids)} ids for {images} images", None
    starts = list(range(0, captions + 1, each))
    return Layout(starts, list(range(images)), list(ids) if ids is not None else None, fault)


def _one_row_a_caption(rows: int, ids: Sequence[str] | None, features: ArrayFile) -> Layout:
    if ids is not None and len(ids) == rows:
        runs = [len(list(run)) for _, run in groupby(ids)]
        if len(runs) < rows and _runs_are_equal(runs, features):
            return _from_runs(runs, ids)
        if _stored_five_times(features, must_differ=True):
            return _from_runs([USUAL_CAPTIONS] * (rows // USUAL_CAPTIONS), ids)
        return Layout(list(range(rows + 1)), list(range(rows)), list(ids))
    if ids is not None and ids and rows % len(ids) == 0:
        each = rows // len(ids)
        if _runs_are_equal([each] * len(ids), features):
            starts = list(range(0, rows + 1, each))
            return Layout(starts, starts[:-1], list(ids), collapsed=each)
    fault = f"{len(ids)} ids for {rows} images" if ids is not None else None
    if _stored_five_times(features, must_differ=False):
        layout = _from_runs([USUAL_CAPTIONS] * (rows // USUAL_CAPTIONS), None)
        return Layout(layout.starts, layout.rows, None, fault, USUAL_CAPTIONS)
    return Layout(list(range(rows + 1)), list(range(rows)), None, fault)


def _from_runs(runs: Sequence[int], ids: Sequence[str] | None) -> Layout:
    starts = [0]
    for run in runs:
        starts.append(starts[-1] + run)
    rows = starts[:-1]
    return Layout(starts, rows, [ids[row] for row in rows] if ids else None, None, max(runs))


def _without_features(captions: int, ids: Sequence[str] | None) -> Layout:
    if ids is None:
        each = USUAL_CAPTIONS if captions % USUAL_CAPTIONS == 0 else 1
        return _even(captions, captions // each, None) if captions else Layout([0], [], None)
    if len(ids) == captions:
        return (
            _from_runs([len(list(run)) for _, run in groupby(ids)], ids)
            if ids
            else Layout([0], [], [])
        )
    if ids and captions and captions % len(ids) == 0:
        return _even(captions, len(ids), ids)
    guess = min(len(ids), captions)
    fault = f"{captions} captions for {len(ids)} ids: expected the same number for every image"
    return Layout(_starts(captions, guess), list(range(guess)), list(ids[:guess]), fault)


def _starts(captions: int, images: int) -> list[int]:
    return [image * captions // max(images, 1) for image in range(images + 1)]


def _runs_are_equal(runs: Sequence[int], features: ArrayFile) -> bool:
    start = 0
    for run in runs:
        head = features.head(start)
        if any(features.head(start + step) != head for step in range(1, run)):
            return False
        start += run
    return True


def _stored_five_times(features: ArrayFile, *, must_differ: bool) -> bool:
    """Whether rows come in fives; with ids that say otherwise, only if the fives differ."""
    rows = len(features)
    if rows == 0 or rows % USUAL_CAPTIONS:
        return False
    previous = None
    for start in range(0, rows, USUAL_CAPTIONS):
        head = features.head(start)
        if any(features.head(start + step) != head for step in range(1, USUAL_CAPTIONS)):
            return False
        if must_differ and head == previous:
            return False
        previous = head
    return not must_differ or rows > USUAL_CAPTIONS
