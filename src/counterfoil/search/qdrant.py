"""Qdrant as the first stage: embedded in a folder, or a cluster by its address."""

from __future__ import annotations

import importlib
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from counterfoil.errors import DataError, MissingExtraError
from counterfoil.files import write_atomically
from counterfoil.reading import read_text
from counterfoil.search.backends import backends
from counterfoil.search.qdrant_points import check_points
from counterfoil.search.scan import Best
from counterfoil.search.table import Ids
from counterfoil.search.vectors import Floats, Vectors, checked, checked_ids

NOTE, FOLDER, BATCH = "qdrant.json", "qdrant", 256


@backends.register("qdrant")
class QdrantIndex:
    """Qdrant: embedded in the index folder, or the server or cluster at ``url``.

    One collection an index; its name is kept in the folder. ``api_key`` is never stored. With
    ``exact`` a server compares every vector instead of using its graph (the embedded form always
    does).
    """

    def __init__(
        self, folder: Path, *, url: str = "", api_key: str = "", exact: bool = False
    ) -> None:
        try:
            note = json.loads(read_text(folder / NOTE))
            self.dim, self.multi = int(note["dim"]), bool(note["multi"])
            self.dtype, self.collection = str(note["dtype"]), str(note["collection"])
        except FileNotFoundError:
            raise DataError(f"{folder}: not a Qdrant index (there is no {NOTE})") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{folder / NOTE}: damaged ({error})") from None
        self.exact = exact
        self.models = _qdrant().models
        self.client = _connect(folder, url, api_key)
        try:
            there = self.client.collection_exists(self.collection)
        except Exception as error:  # whatever the network and the server come up with
            raise DataError(f"{url or folder}: Qdrant does not answer ({error})") from None
        if not there:
            raise DataError(
                f"{url or folder}: Qdrant has no collection '{self.collection}'; restore it, or "
                "build the index again"
            )

    @classmethod
    def create(
        cls, folder: Path, dim: int, multi: bool, dtype: str, options: dict[str, Any]
    ) -> QdrantIndex:
        backends.check("qdrant", options, where="backend")
        models = _qdrant().models
        folder.mkdir(parents=True, exist_ok=True)
        client = _connect(folder, options.get("url", ""), options.get("api_key", ""))
        name = f"counterfoil-{uuid.uuid4().hex}"
        several = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
        try:
            client.create_collection(
                name,
                vectors_config=models.VectorParams(
                    size=dim,
                    distance=models.Distance.DOT,
                    datatype=models.Datatype(dtype),
                    multivector_config=several if multi else None,
                ),
            )
        except Exception as error:
            place = options.get("url") or folder
            raise DataError(f"{place}: Qdrant does not take the index ({error})") from None
        finally:
            client.close()
        note = {"collection": name, "dim": dim, "multi": multi, "dtype": dtype}
        write_atomically(folder / NOTE, json.dumps(note))
        return cls(folder, **options)

    @classmethod
    def open(cls, folder: Path, options: dict[str, Any]) -> QdrantIndex:
        backends.check("qdrant", options, where="backend")
        return cls(folder, **options)

    def __len__(self) -> int:
        return int(self.client.count(self.collection, exact=True).count)

    def ids(self) -> Ids:
        found: list[int] = []
        offset = None
        while True:
            points, offset = self.client.scroll(
                self.collection,
                limit=10_000,
                offset=offset,
                with_payload=False,
                with_vectors=False,
            )
            found += [int(point.id) for point in points]
            if offset is None:
                return np.sort(np.array(found, dtype=np.int64))

    def add(self, ids: ArrayLike, vectors: Vectors) -> None:
        vectors = checked(vectors, self.dim, self.multi, self.dtype)
        found = checked_ids(ids, vectors)
        there = self._there(found)
        if len(there):
            raise DataError(f"the id {there[0]} is in this index already; update it instead")
        self._upsert(found, vectors)

    def update(self, ids: ArrayLike, vectors: Vectors) -> None:
        vectors = checked(vectors, self.dim, self.multi, self.dtype)
        found = checked_ids(ids, vectors)
        self._require(found)
        self._upsert(found, vectors)

    def delete(self, ids: ArrayLike) -> None:
        found = checked_ids(ids)
        self._require(found)
        for part in _batches(found):
            self.client.delete(self.collection, points_selector=part.tolist(), wait=True)

    def search(self, queries: Vectors, k: int) -> tuple[Ids, Floats]:
        best = Best(len(queries), k)
        queries = checked(queries, self.dim, True)
        requests = [
            self.models.QueryRequest(
                query=query.tolist() if self.multi else query[0].tolist(),
                limit=k,
                params=self.models.SearchParams(exact=self.exact),
            )
            for query in queries
        ]
        if not self.multi and len(queries.rows) > len(queries):
            raise DataError("this index takes exactly one vector a query")
        for number in range(0, len(requests), BATCH):
            answers = self.client.query_batch_points(
                self.collection, requests=requests[number : number + BATCH]
            )
            for query, answer in enumerate(answers, start=number):
                best.hold(
                    query,
                    np.array([int(point.id) for point in answer.points], dtype=np.int64),
                    np.array([point.score for point in answer.points], dtype=np.float32),
                )
        return best.result()

    def compact(self) -> None:
        """Qdrant does that itself."""

    def check(self) -> list[str]:
        return []

    def describe(self) -> dict[str, Any]:
        return {"backend": "qdrant", "items": len(self), "collection": self.collection}

    def drop(self) -> None:
        self.client.delete_collection(self.collection)

    def close(self) -> None:
        self.client.close()

    def _there(self, ids: Ids) -> list[int]:
        found: list[int] = []
        for part in _batches(ids):
            points = self.client.retrieve(
                self.collection, part.tolist(), with_payload=False, with_vectors=False
            )
            found += [int(point.id) for point in points]
        return found

    def _require(self, ids: Ids) -> None:
        missing = np.setdiff1d(ids, np.array(self._there(ids), dtype=np.int64))
        if len(missing):
            raise DataError(f"no item with the id {int(missing[0])} in this index")

    def _upsert(self, ids: Ids, vectors: Vectors) -> None:
        for start in range(0, len(ids), BATCH):
            part = slice(start, start + BATCH)
            points = [
                self.models.PointStruct(
                    id=int(name), vector=item.tolist() if self.multi else item[0].tolist()
                )
                for name, item in zip(ids[part], vectors[part], strict=True)
            ]
            self.client.upsert(self.collection, points=points, wait=True)


def _batches(ids: Ids) -> Iterator[Ids]:
    for start in range(0, len(ids), BATCH):
        yield ids[start : start + BATCH]


def _connect(folder: Path, url: str, api_key: str) -> Any:
    client = _qdrant().QdrantClient
    if not url:
        check_points(folder / FOLDER)
    try:
        if url:
            return client(url=url, api_key=api_key or None)
        return client(path=str(folder / FOLDER))
    except Exception as error:
        raise DataError(f"{url or folder}: Qdrant cannot be opened ({error})") from None


def _qdrant() -> Any:
    try:
        return importlib.import_module("qdrant_client")
    except ImportError:
        raise MissingExtraError("qdrant-client", "qdrant", "the search backend 'qdrant'") from None
