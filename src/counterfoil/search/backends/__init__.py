"""`VectorIndex`: the few things the first stage asks of a backend, and the backends by name."""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import ArrayLike

from counterfoil.core.registry import Registry
from counterfoil.core.storage.segments import Ids
from counterfoil.search.vectors import Floats, Vectors


class VectorIndex(Protocol):
    """Vectors by item id, searched by MaxSim (inner product, for single vectors).

    Every change is on the disk when its call returns. An id that is added twice, or deleted or
    updated without being there, is a `DataError`, and nothing is changed.
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
        """Ids and scores [Q, min(k, items)], best first; a row that fell short ends in id −1."""
        ...

    def compact(self) -> None:
        """Give the room of deleted items back."""
        ...

    def check(self) -> list[str]:
        """What is damaged, in words."""
        ...

    def describe(self) -> dict[str, Any]:
        """Plain values for a report."""
        ...

    def drop(self) -> None:
        """Delete what lies outside the folder of the index; the folder itself stays."""
        ...

    def close(self) -> None: ...


backends: Registry[Any] = Registry("search backend")
"""Classes with `create` and `open`; their keyword-only arguments are the user's options."""
