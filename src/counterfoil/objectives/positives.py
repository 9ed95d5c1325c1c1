"""Which pairs of a score matrix belong together: read from what a caller gives, and checked."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from counterfoil.core.errors import ArgumentError

Ids: TypeAlias = "Tensor | NDArray[Any] | Sequence[Hashable]"
"""One id per item: integers, or any other values that can be compared, such as file names."""


def read_positives(
    scores: Tensor,
    positives: Tensor | NDArray[Any] | Sequence[Hashable] | None = None,
    image_ids: Ids | None = None,
    text_ids: Ids | None = None,
) -> Tensor:
    """Positives [n_images, n_texts] (boolean) of some scores, on the scores' device.

    ``positives`` is such a matrix, or one id per pair: pairs with the same id belong to the same
    image. ``image_ids`` are the ids of the rows; ``text_ids`` say which image each column belongs
    to, by default those of the rows. Without any of them, the diagonal is positive.

    >>> read_positives(torch.zeros(3, 3), [7, 7, 8]).int().tolist()
    [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    check_scores(scores)
    if positives is not None and (image_ids is not None or text_ids is not None):
        raise ArgumentError("give either positives or image_ids (and text_ids), not both")
    if isinstance(positives, (Tensor, np.ndarray)) and positives.ndim == 2:
        matrix = torch.as_tensor(positives)
        _check_matrix(matrix, scores)
    elif positives is not None:
        matrix = _same_id(scores, positives, None)
    elif image_ids is not None or text_ids is not None:
        matrix = _same_id(scores, image_ids, text_ids)
    else:
        _require_square(scores, "without positives or ids")
        return torch.eye(len(scores), dtype=torch.bool, device=scores.device)
    _check_pairs(matrix)
    return matrix.to(scores.device)


def check_scores(scores: Tensor) -> None:
    """Raise unless there is a matrix of floating-point scores with at least one pair."""
    if not isinstance(scores, Tensor):
        raise ArgumentError(
            f"scores: expected a tensor [n_images, n_texts], got {type(scores).__name__}"
        )
    if scores.ndim != 2 or not scores.numel():
        raise ArgumentError(
            f"scores: expected a matrix [n_images, n_texts], got shape {list(scores.shape)}"
        )
    if not scores.is_floating_point():
        raise ArgumentError(f"scores: expected floating-point numbers, got {scores.dtype}")
    if missing := int(scores.isnan().sum()):  # some objectives would turn them into a loss of 0
        raise ArgumentError(f"scores: expected numbers, {missing} of {scores.numel()} are NaN")


def check_mask(mask: Tensor, scores: Tensor, name: str) -> None:
    """Raise unless a mask is boolean and has the shape of the scores."""
    if mask.dtype != torch.bool:
        raise ArgumentError(
            f"{name}: expected a boolean matrix, got {mask.dtype}; convert it with .bool()"
        )
    if mask.shape != scores.shape:
        raise ArgumentError(
            f"{name}: expected the shape of the scores {list(scores.shape)}, got {list(mask.shape)}"
        )


def _check_matrix(matrix: Tensor, scores: Tensor) -> None:
    check_mask(matrix, scores, "positives")
    if not bool(matrix.any()):
        raise ArgumentError("positives: expected at least one positive pair, all entries are False")


def _check_pairs(matrix: Tensor) -> None:
    """A square matrix is a batch of pairs: image ``k`` with text ``k``."""
    if matrix.shape[0] == matrix.shape[1] and not bool(matrix.diagonal().all()):
        row = int((~matrix.diagonal()).nonzero()[0])
        raise ArgumentError(
            f"positives: square scores are those of pairs on the diagonal, but [{row}, {row}] is "
            "not positive; put each text in the column of its image's row"
        )
    if not bool(matrix.any()):
        raise ArgumentError("image_ids and text_ids have no id in common: there is no positive")


def _require_square(scores: Tensor, when: str) -> None:
    if scores.shape[0] != scores.shape[1]:
        raise ArgumentError(
            f"scores: {when}, expected a square matrix with pairs on the diagonal, got shape "
            f"{list(scores.shape)}; pass image_ids (of rows) and text_ids (the image of each text)"
        )


def _same_id(scores: Tensor, rows: Ids | None, columns: Ids | None) -> Tensor:
    if rows is None:
        raise ArgumentError("text_ids: pass image_ids, too: the ids of the rows")
    if columns is None:
        _require_square(scores, "with one id per pair")
        columns = rows
    for ids, count, name in [(rows, scores.shape[0], "image"), (columns, scores.shape[1], "text")]:
        shape = list(ids.shape) if isinstance(ids, (Tensor, np.ndarray)) else [len(ids)]
        if shape != [count]:
            raise ArgumentError(f"ids: expected {count}, one per {name}, got shape {shape}")
    return _numbered(rows, columns, scores.device)


def _numbered(rows: Ids, columns: Ids, device: torch.device) -> Tensor:
    """Which ids of rows and columns are equal; values that are no tensor are numbered first."""
    if isinstance(rows, Tensor) and isinstance(columns, Tensor):
        if torch.bool in (rows.dtype, columns.dtype):
            raise ArgumentError("ids: expected numbers, got booleans")
        return rows.to(device)[:, None] == columns.to(device)[None, :]
    numbers: dict[Hashable, int] = {}
    coded = [
        torch.tensor([numbers.setdefault(one, len(numbers)) for one in _plain(ids)], device=device)
        for ids in (rows, columns)
    ]
    return coded[0][:, None] == coded[1][None, :]


def _plain(ids: Ids) -> Sequence[Hashable]:
    return ids.tolist() if isinstance(ids, (Tensor, np.ndarray)) else ids
