"""Two-stage search: a vector index finds a shortlist, the model's matcher re-ranks it."""

from __future__ import annotations

from counterfoil.search.backends import (
    VectorIndex,
    backends,
    exact,  # noqa: F401
    faiss,  # noqa: F401
    qdrant,  # noqa: F401
)
from counterfoil.search.index import SearchIndex
from counterfoil.search.query import Hit, Results
from counterfoil.search.vectors import Vectors

__all__ = ["Hit", "Results", "SearchIndex", "VectorIndex", "Vectors", "backends"]
