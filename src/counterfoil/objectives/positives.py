"""Matching pairs of a batch: positives from ids or a mask, and images with identical captions."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from counterfoil.core.errors import ArgumentError
from counterfoil.data.duplicates import identical_groups, images_of_groups, with_twin
from counterfoil.data.pairs import Split

Ids: TypeAlias = "Tensor | NDArray[Any] | Sequence[Hashable]"
"""One id per item: integers, or any other values that can be compared, such as file names."""

Mask: TypeAlias = "Tensor | NDArray[Any] | Sequence[Sequence[bool]]"
"""A boolean matrix [n_images, n_texts]: a tensor, an array or nested lists."""

ALONE, NO_GROUP = -1, -2
"""Group of a caption that no other image has; padding of an image's groups."""


def read_positives(
    scores: Tensor,
    positives: Mask | Ids | None = None,
    image_ids: Ids | None = None,
    text_ids: Ids | None = None,
) -> Tensor:
    """The boolean matrix of positives [n_images, n_texts], on the scores' device.

    ``positives`` is such a matrix, or one id per pair: pairs with the same id belong to the same
    image. ``image_ids`` are the ids of the rows, ``text_ids`` the image id of each column (default:
    those of the rows). Without any of them, the diagonal is positive.

    >>> read_positives(torch.zeros(3, 3), [7, 7, 8]).int().tolist()
    [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    check_scores(scores)
    if positives is not None and (image_ids is not None or text_ids is not None):
        raise ArgumentError("give either positives or image_ids (and text_ids), not both")
    if _is_matrix(positives):
        matrix = read_mask(positives, scores, "positives")
        if not bool(matrix.any()):
            raise ArgumentError("positives: expected at least one positive pair, all are False")
    elif positives is not None:
        matrix = _same_id(scores, positives, None)
    elif image_ids is not None or text_ids is not None:
        matrix = _same_id(scores, image_ids, text_ids)
        if not bool(matrix.any()):
            raise ArgumentError("image_ids and text_ids have no id in common: there is no positive")
    else:
        _require_square(scores, "without positives or ids")
        return torch.eye(len(scores), dtype=torch.bool, device=scores.device)
    return matrix


def check_scores(scores: Tensor) -> None:
    """Raise unless ``scores`` is a non-empty matrix of finite floating-point numbers."""
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
    # some objectives would turn them into a loss of 0, or into gradients of NaN
    if not bool(scores.isfinite().all()):
        if missing := int(scores.isnan().sum()):
            raise ArgumentError(f"scores: expected numbers, {missing} of {scores.numel()} are NaN")
        raise ArgumentError(
            f"scores: expected finite numbers, {int(scores.isinf().sum())} of {scores.numel()} are "
            "infinite; exclude pairs by protected=, a boolean matrix"
        )


def read_mask(given: Any, scores: Tensor, name: str) -> Tensor:
    """A boolean matrix of the scores' shape, on their device; raise if it is not one."""
    try:
        mask = torch.as_tensor(given, device=scores.device)
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentError(
            f"{name}: expected a boolean matrix {list(scores.shape)} (a tensor, an array or lists "
            f"of equal length), got {type(given).__name__}"
        ) from None
    if mask.dtype != torch.bool:
        raise ArgumentError(
            f"{name}: expected a boolean matrix, got {mask.dtype}; convert it with .bool()"
        )
    if mask.shape != scores.shape:
        raise ArgumentError(
            f"{name}: expected the shape of the scores {list(scores.shape)}, got {list(mask.shape)}"
        )
    return mask


def _is_matrix(positives: Any) -> bool:
    """Whether positives are a matrix, not ids; tuples are ids, unless they hold booleans."""
    if isinstance(positives, (Tensor, np.ndarray)):
        return positives.ndim == 2
    if not isinstance(positives, (list, tuple)) or not positives:
        return False
    first = positives[0]
    if isinstance(first, tuple):
        return _are_booleans(first)
    return isinstance(first, list) or (isinstance(first, (np.ndarray, Tensor)) and first.ndim > 0)


def _require_square(scores: Tensor, when: str) -> None:
    if scores.shape[0] != scores.shape[1]:
        raise ArgumentError(
            f"scores: {when}, expected a square matrix with pairs on the diagonal, got shape "
            f"{list(scores.shape)}; pass image_ids (of rows) and text_ids (the image of each text)"
        )


def _has_nan(ids: Ids) -> bool:
    if isinstance(ids, Tensor):
        return ids.is_floating_point() and bool(ids.isnan().any())
    return any(isinstance(each, (float, np.floating)) and each != each for each in ids)


def _same_id(scores: Tensor, rows: Ids | None, columns: Ids | None) -> Tensor:
    if rows is None:
        raise ArgumentError("text_ids: pass image_ids, too: the ids of the rows")
    if columns is None:
        _require_square(scores, "with one id per pair")
        columns = rows
    for ids, count, name in [(rows, scores.shape[0], "image"), (columns, scores.shape[1], "text")]:
        if isinstance(ids, str) or not isinstance(ids, (Tensor, np.ndarray, Sequence)):
            raise ArgumentError(
                f"ids: expected a tensor, an array or a list with one id per {name}, got "
                f"{type(ids).__name__}"
            )
        shape = list(ids.shape) if isinstance(ids, (Tensor, np.ndarray)) else [len(ids)]
        if shape != [count]:
            raise ArgumentError(f"ids: expected {count}, one per {name}, got shape {shape}")
        if _has_nan(ids):
            raise ArgumentError("ids: an id is NaN, which equals no id, not even itself")
    return _equal_ids(rows, columns, scores.device)


def _equal_ids(rows: Ids, columns: Ids, device: torch.device) -> Tensor:
    """Where ids of rows and columns are equal; other values than tensors are numbered first."""
    if any(_are_booleans(ids) for ids in (rows, columns)):
        raise ArgumentError("ids: expected numbers, got booleans")
    if isinstance(rows, Tensor) and isinstance(columns, Tensor):
        return rows.to(device)[:, None] == columns.to(device)[None, :]
    numbers: dict[Hashable, int] = {}

    def numbered(ids: Ids) -> Tensor:
        values = ids.tolist() if isinstance(ids, (Tensor, np.ndarray)) else map(_id_value, ids)
        return torch.tensor([numbers.setdefault(x, len(numbers)) for x in values], device=device)

    try:
        return numbered(rows)[:, None] == numbered(columns)[None, :]
    except TypeError as error:
        raise ArgumentError(
            f"ids: expected numbers, names or other hashable ids: {error}"
        ) from None


def _are_booleans(ids: Ids) -> bool:
    if isinstance(ids, (Tensor, np.ndarray)):
        return ids.dtype in (torch.bool, np.bool_)
    return len(ids) > 0 and all(isinstance(x, (bool, np.bool_)) for x in ids)


def _id_value(value: Any) -> Any:
    """The number in a tensor of one: as keys, tensors are equal only to themselves."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise ArgumentError(f"ids: expected one number per id, got a tensor {list(value.shape)}")
    return value.item()


class Twins(nn.Module):
    """Images that have a caption identical to one of another image: such pairs are not negatives.

    ``captions`` is the number of captions of the split that another image has as well. The buffers
    are the group of each caption (equal for identical ones) and the groups of each image.
    """

    group: Tensor
    owned: Tensor

    def __init__(self, split: Split) -> None:
        super().__init__()
        groups = identical_groups(split.texts)
        shared = with_twin(groups, split.image_of)
        self.captions, self.total = int(shared.sum()), len(groups)
        owned, owners = images_of_groups(groups[shared], split.image_of[shared])
        order = np.argsort(owners, kind="stable")
        index = own_captions(owners[order], len(split))  # of groups instead of captions
        self.owned_on_host = np.append(owned[order], NO_GROUP)[index]
        self.group_on_host = np.where(shared, groups, ALONE)
        self.register_buffer("owned", torch.tensor(self.owned_on_host), persistent=False)
        self.register_buffer("group", torch.tensor(self.group_on_host), persistent=False)

    def forward(self, image_ids: Tensor, caption_ids: Tensor) -> Tensor:
        """Pairs [images, texts] in which the image has that caption, its own pairs included."""
        groups = self.group[caption_ids]
        has = torch.zeros(len(image_ids), len(caption_ids), dtype=torch.bool, device=groups.device)
        for owned in self.owned[image_ids].unbind(1):
            has |= owned[:, None] == groups
        return has

    def has(self, image: int, caption: int) -> bool:
        """Whether an image also has this caption of another image; for data-loading processes."""
        return bool((self.owned_on_host[image] == self.group_on_host[caption]).any())

    def note(self, protected: bool) -> str:
        """A line for the start of a run."""
        count = (
            f"{self.captions:,} of {self.total:,} training captions also belong to another image"
        )
        if protected:
            return f"{count}; such pairs are never used as negatives"
        return f"{count}; such pairs are used as negatives (objective.protect.identical=false)"


def find_twins(split: Split | None, device: torch.device | None = None) -> Twins | None:
    """The twins of a split; None if it has none, so that batches need no mask."""
    twins = Twins(split) if split is not None and split.texts else None
    return twins.to(device) if twins is not None and twins.captions else None


def twin_pairs(
    twins: Twins | None, image_ids: Tensor, caption_ids: Tensor, positives: Tensor
) -> Tensor | None:
    """Pairs of a batch that are not annotated as positive, although the image has that caption."""
    return None if twins is None else twins(image_ids, caption_ids) & ~positives


def own_captions(image_of: NDArray[np.int64], images: int) -> Tensor:
    """Caption indices [images, highest count] of each image, padded with -1."""
    counts = np.bincount(image_of, minlength=images)
    table = np.full((images, max(1, int(counts.max(initial=0)))), -1, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    table[image_of, np.arange(len(image_of)) - starts[image_of]] = np.arange(len(image_of))
    return torch.from_numpy(table)
