"""`VectorIndex`: the interface of first-stage backends, and their registry."""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import ArrayLike

from counterfoil.core.registry import Registry
from counterfoil.core.storage.segments import Ids
from counterfoil.search.vectors import Floats, Vectors


class VectorIndex(Protocol):
    """Vectors by item id, searched by MaxSim (inner product, for single vectors).

    Every change is on disk when its call returns. Adding an existing id, or deleting or updating a
    missing one, is a `DataError` and changes nothing.
    """

    dim: int
    multi: bool

    def __len__(self) -> int:
        """Number of items."""
        ...

    def ids(self) -> Ids:
        """Ids of all items, in increasing order."""
        ...

    def add(self, ids: ArrayLike, vectors: Vectors) -> None: ...

    def delete(self, ids: ArrayLike) -> None: ...

    def update(self, ids: ArrayLike, vectors: Vectors) -> None: ...

    def search(self, queries: Vectors, k: int) -> tuple[Ids, Floats]:
        """Ids and scores [Q, min(k, items)], best first; short rows are padded with id −1."""
        ...

    def compact(self) -> None:
        """Free the disk space of deleted items."""
        ...

    def check(self) -> list[str]:
        """Descriptions of damage."""
        ...

    def describe(self) -> dict[str, Any]:
        """Plain values for a report."""
        ...

    def drop(self) -> None:
        """Delete data outside the folder of the index; the folder itself stays."""
        ...

    def close(self) -> None: ...


backends: Registry[Any] = Registry("search backend")
"""Classes with `check_choices`, `create` and `open`.

Their keyword-only arguments are the user's options.
"""
