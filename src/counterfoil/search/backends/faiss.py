"""Approximate search with FAISS beside the exact vectors, for hundreds of thousands of items."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from counterfoil.core.errors import DataError, MissingExtraError
from counterfoil.core.storage.atomic import sync_file, write_atomically
from counterfoil.core.storage.reading import read_text
from counterfoil.core.storage.segments import Ids
from counterfoil.search.backends import backends
from counterfoil.search.backends.exact import ExactIndex
from counterfoil.search.vectors import Floats, TopK, Vectors, checked

GRAPH = "graph.json"
PER_LIST = 64
"""Training vectors per list of an inverted file."""
CODES = 256
"""Codes per part of a vector; training needs at least as many vectors."""


@backends.register("faiss")
class FaissIndex(ExactIndex):
    """FAISS: an HNSW graph or an inverted file of product codes finds candidates.

    The vectors stay on disk as with "exact", so changes are crash-safe: the FAISS index can always
    be rebuilt from them. ``refine`` × k candidates are scored exactly. Up to ``tail`` rows added
    since the last build are searched exactly, and so is an index smaller than ``least``. An
    inverted file has ``lists`` lists, by default 4 √items; fewer are faster to build.
    """

    def __init__(
        self,
        folder: Path,
        *,
        kind: Literal["hnsw", "ivfpq"] = "hnsw",
        links: int = 32,
        ef_construction: int = 80,
        ef_search: int = 128,
        code_bytes: int = 32,
        lists: int = 0,
        probes: int = 64,
        refine: int = 4,
        least: int = 20_000,
        tail: int = 10_000,
    ) -> None:
        self.faiss = _faiss()
        super().__init__(folder)
        self.kind, self.links, self.ef_construction = kind, links, ef_construction
        self.ef_search, self.code_bytes, self.probes = ef_search, code_bytes, probes
        self.lists = lists
        self.refine, self.tail = max(1, refine), tail
        self.least = max(CODES if kind == "ivfpq" else 1, least)
        self.graph: Any = None
        self.covered: list[str] = []
        self._load()

    @classmethod
    def check_choices(cls, multi: bool, dtype: str) -> None:
        if multi:
            raise DataError(
                "the faiss backend holds one vector per item; for MaxSim use the backend exact or "
                "qdrant, or --first-stage pooled"
            )
        if dtype == "binary":
            raise DataError(
                "the faiss backend has codes of its own; store its vectors with --dtype int8, or "
                "use the backend exact for binary ones"
            )
        _faiss()

    @classmethod
    def create(
        cls, folder: Path, dim: int, multi: bool, dtype: str, options: dict[str, Any]
    ) -> FaissIndex:
        backends.check("faiss", options, where="backend")
        cls.check_choices(multi, dtype)
        ExactIndex.create(folder, dim, multi, dtype, {})
        return cls(folder, **options)

    @classmethod
    def open(cls, folder: Path, options: dict[str, Any]) -> FaissIndex:
        backends.check("faiss", options, where="backend")
        return cls(folder, **options)

    def search(self, queries: Vectors, k: int) -> tuple[Ids, Floats]:
        if self.graph is None or not len(queries):
            return super().search(queries, k)
        queries = checked(queries, self.dim, False)
        best = TopK(len(queries), k)
        for query, rows in enumerate(self._candidates(queries, k)):
            row_scores = self.vectors_of(rows).rows @ queries.rows[query]
            best.insert(query, self.table.ids[rows], row_scores)
        for segment in range(len(self.covered), len(self.table.mark.segments)):
            for rows, tail_scores in self.scores(queries, segment):
                best.update(self.table.ids[rows], tail_scores)
        ids, scores = best.result()
        if ids.shape[1] < min(k, len(self)) or (ids < 0).any():
            return super().search(queries, k)  # too few live candidates after many deletions
        return ids, scores

    def _candidates(self, queries: Vectors, k: int) -> list[Ids]:
        """Live rows that FAISS returns for each query."""
        wanted = min(k * self.refine, self.graph.ntotal)
        live = self.table.live[: self.graph.ntotal]
        options: dict[str, Any] = {}
        bits: NDArray[np.uint8] = np.packbits(live, bitorder="little")
        if not live.all():
            options["sel"] = self.faiss.IDSelectorBitmap(len(live), self.faiss.swig_ptr(bits))
        if self.kind == "hnsw":
            parameters = self.faiss.SearchParametersHNSW(
                efSearch=max(self.ef_search, wanted), **options
            )
        else:
            parameters = self.faiss.SearchParametersIVF(nprobe=self.probes, **options)
        _, rows = self.graph.search(queries.rows, wanted, params=parameters)
        return [row[row >= 0] for row in rows]

    def compact(self) -> None:
        self._drop()
        super().compact()
        self._add_rows()

    def describe(self) -> dict[str, Any]:
        rows = 0 if self.graph is None else self.graph.ntotal
        return {**super().describe(), "backend": "faiss", "kind": self.kind, "in_graph": rows}

    def _fixed_segments(self) -> int:
        return len(self.covered)

    def _commit(self, remove: Ids, ids: Ids | None, vectors: Vectors | None) -> None:
        super()._commit(remove, ids, vectors)
        if self.graph is not None:
            dead = self.graph.ntotal - int(self.table.live[: self.graph.ntotal].sum())
            if dead > self.graph.ntotal // 2:
                self.compact()
        self._add_rows()

    def _add_rows(self) -> None:
        """Add the rows that FAISS does not have yet, once there are enough of them."""
        total = len(self.table.ids)
        have = 0 if self.graph is None else int(self.graph.ntotal)
        if total < self.least or (self.graph is not None and total - have <= self.tail):
            return
        if self.graph is None:
            self.graph = self._create_graph(total)
        step = 1 << 16
        for start in range(have, total, step):
            rows = np.arange(start, min(start + step, total))
            self.graph.add(self.vectors_of(rows).rows)
        self._save()

    def _create_graph(self, total: int) -> Any:
        metric = self.faiss.METRIC_INNER_PRODUCT
        if self.kind == "hnsw":
            graph = self.faiss.index_factory(self.dim, f"HNSW{self.links}_SQfp16", metric)
            graph.hnsw.efConstruction = self.ef_construction
            graph.train(self.vectors_of(np.arange(1)).rows)
            return graph
        wanted = self.lists or 4 * total**0.5
        lists = int(np.clip(wanted, 1, max(1, total // PER_LIST)))
        codes = max(m for m in range(1, self.dim + 1) if self.dim % m == 0 and m <= self.code_bytes)
        count = min(total, max(4 * CODES, lists * PER_LIST))
        sample = np.sort(np.random.default_rng(0).choice(total, count, replace=False))
        # np: no polysemous reordering of codes, which takes minutes and is not used here
        graph = self.faiss.index_factory(self.dim, f"IVF{lists},PQ{codes}np", metric)
        graph.cp.min_points_per_centroid = 1
        graph.pq.cp.min_points_per_centroid = 1
        graph.train(self.vectors_of(sample).rows)
        return graph

    def _save(self) -> None:
        """Write the FAISS index under a new name, then the note that refers to it."""
        folder = self.store.folder
        name = f"graph-{self.store.manifest.generation:08d}.faiss"
        self.faiss.write_index(self.graph, str(folder / name))
        sync_file(folder / name)
        self.covered = [segment.name for segment in self.table.mark.segments]
        note = {"file": name, "kind": self.kind, "segments": self.covered}
        write_atomically(folder / GRAPH, json.dumps(note))
        self._remove_old(name)

    def _load(self) -> None:
        """Load the stored FAISS index if it belongs to these vectors; else search without it."""
        folder: Path = self.store.folder
        names = [segment.name for segment in self.table.mark.segments]
        try:
            note = json.loads(read_text(folder / GRAPH))
            covered: list[str] = note["segments"]
            if note["kind"] != self.kind or covered != names[: len(covered)]:
                return
            graph = self.faiss.read_index(str(folder / note["file"]))
        except (OSError, ValueError, KeyError, TypeError, RuntimeError):
            return
        if graph.ntotal == self.table.starts[len(covered)] and graph.d == self.dim:
            self.graph, self.covered = graph, covered

    def _drop(self) -> None:
        self.graph, self.covered = None, []
        (self.store.folder / GRAPH).unlink(missing_ok=True)
        self._remove_old(None)

    def _remove_old(self, current: str | None) -> None:
        for path in self.store.folder.glob("graph-*.faiss"):
            if path.name != current:
                path.unlink(missing_ok=True)


def _faiss() -> Any:
    try:
        return importlib.import_module("faiss")
    except ImportError:
        raise MissingExtraError("faiss-cpu", "faiss", "the search backend 'faiss'") from None
