"""Score matrices of any make (numpy, memory-mapped, torch), read a few rows at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from counterfoil.errors import DataError
from counterfoil.parallel import usable_cores

Floats = NDArray[np.floating[Any]]
Indices = NDArray[np.int64]


class ScoreMatrix(Protocol):
    """Scores ``[n_queries, n_targets]``: a numpy array, a ``memmap``, a torch tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, key: Any, /) -> Any: ...


def as_floats(part: Any) -> Floats:
    """A piece of a matrix as a numpy array that compares fast; half precision becomes single."""
    # Looked up, not imported: whoever hands over a tensor has already paid for importing torch.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(part, torch.Tensor):
        part = part.detach().cpu()
        if part.dtype in (torch.float16, torch.bfloat16):
            part = part.float()
        part = part.numpy()
    array = np.asarray(part)
    if array.dtype in (np.float32, np.float64):
        return np.ascontiguousarray(array)
    return np.ascontiguousarray(array, dtype=np.float32 if array.dtype == np.float16 else float)


def read_rows(scores: ScoreMatrix, start: int, stop: int) -> Floats:
    """Rows ``start`` to ``stop`` of ``scores``, or an error that names the first NaN in them."""
    rows = as_floats(scores[start:stop])
    # The maximum of anything with a NaN in it is NaN, and costs one fast pass.
    if rows.size and np.isnan(rows.max()):
        row, column = np.argwhere(np.isnan(rows))[0]
        raise DataError(
            f"score matrix {tuple(scores.shape)} has NaN at row {start + row}, column {column}: "
            "a model that scores NaN cannot be ranked; look for a division by a zero norm"
        )
    return rows


def read_cells(scores: ScoreMatrix, rows: Indices, columns: Indices) -> Floats:
    """The scores at the given rows and columns, in the type `read_rows` gives."""
    return as_floats(scores[rows, columns])


def row_chunks(
    start: int, stop: int, width: int, cells: int, rows: int | None = None
) -> Iterator[tuple[int, int]]:
    """Split rows into chunks of about ``cells`` cells (or of ``rows`` rows, where given)."""
    step = rows if rows is not None else max(1, cells // max(1, width))
    for first in range(start, stop, step):
        yield first, min(first + step, stop)


def check_matrix(scores: ScoreMatrix) -> tuple[int, int]:
    """The two sizes of a score matrix, or an error that says what was given instead."""
    if len(scores.shape) != 2:
        raise DataError(
            f"scores must be a matrix [n_images, n_texts], got shape {tuple(scores.shape)}"
        )
    return int(scores.shape[0]), int(scores.shape[1])


def check_image_of(image_of: ArrayLike, shape: tuple[int, int]) -> Indices:
    """``image_of`` as indices: one image of the matrix for every text of the matrix."""
    indices = np.asarray(image_of)
    if indices.shape != (shape[1],):
        raise DataError(
            f"image_of must name the image of each of the {shape[1]} texts, "
            f"got shape {indices.shape}"
        )
    if indices.size and not np.issubdtype(indices.dtype, np.integer):
        raise DataError(f"image_of must hold integers, got {indices.dtype}")
    wrong = np.flatnonzero((indices < 0) | (indices >= shape[0]))
    if wrong.size:
        raise DataError(
            f"image_of[{wrong[0]}] is {indices[wrong[0]]}, but the matrix has {shape[0]} images"
        )
    return indices.astype(np.int64)


def processors() -> int:
    """How many processors this process may use, at most 8: beyond, memory is the limit."""
    return min(8, usable_cores())
