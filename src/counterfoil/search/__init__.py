"""Two-stage search: an index of vectors finds a shortlist, the model's own matcher ranks it."""

from __future__ import annotations

from counterfoil.search import exact, faiss_index, qdrant  # noqa: F401 - registers the backends
from counterfoil.search.backends import VectorIndex, backends
from counterfoil.search.index import SearchIndex
from counterfoil.search.search import Hit, Results
from counterfoil.search.vectors import Vectors

__all__ = ["Hit", "Results", "SearchIndex", "VectorIndex", "Vectors", "backends"]
