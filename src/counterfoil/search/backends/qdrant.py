"""Qdrant as the first stage: embedded in a folder, or a server or cluster by its URL."""

from __future__ import annotations

import importlib
import io
import json
import os
import sqlite3
import stat
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from counterfoil.core.errors import DataError, MissingExtraError
from counterfoil.core.storage.atomic import write_atomically
from counterfoil.core.storage.reading import read_text
from counterfoil.core.storage.segments import Ids
from counterfoil.data.pickle_values import Global, PickleRefusedError, StandIn, resolve
from counterfoil.data.pickles import OPERATIONS, PickleReader
from counterfoil.search.backends import backends
from counterfoil.search.vectors import Floats, TopK, Vectors, checked, checked_ids

META, STORE = "meta.json", "storage.sqlite"
POINT = ("qdrant_client.http.models.models", "PointStruct")
TABLE = "create table points (id text primary key, point blob)"
SCHEMA = [("index", "sqlite_autoindex_points_1", None), ("table", "points", TABLE)]

NOTE, FOLDER, BATCH = "qdrant.json", "qdrant", 256
QUANTIZED = ("int8", "binary")


# The client stores each point as a pickle and unpickles it, so a forged index folder could run
# code. Here every point is first read as data (see `data.pickles`), and names other than that of a
# point are refused. So is anything that the client would read differently from this check: links,
# journals of SQLite, and tables other than the client's own.
def check_points(folder: Path) -> None:
    """Refuse a folder whose stored points contain anything but points."""
    stores = [path for path in _regular_files(folder) if path.name.lower().startswith("storage.")]
    _check_names(folder / META)
    for path in stores:
        if path.name != STORE:
            raise DataError(
                f"{path}: left by an old Qdrant client or by a write that was cut short; build "
                "the index again"
            )
        try:
            _check_store(path)
        except Exception as error:  # a damaged store or pickle may fail anywhere
            raise DataError(
                f"{path}: refused: its points are not those of an index ({error}; nothing was "
                "run); build the index again"
            ) from None


def _regular_files(folder: Path) -> Iterator[Path]:
    """All files in a folder; links are refused, as the client would follow them."""
    for root, folders, files in os.walk(folder):
        for path in (Path(root, name) for name in (*folders, *files)):
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                raise DataError(f"{path}: refused: a link; an index folder holds its own files")
            if stat.S_ISREG(mode):
                yield path
            elif not stat.S_ISDIR(mode):
                raise DataError(f"{path}: refused: neither a file nor a folder")


def _check_names(path: Path) -> None:
    """Refuse collections that the client would look for outside its folder."""
    try:
        names = list(json.loads(read_text(path))["collections"])
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: damaged ({type(error).__name__})") from None
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\:\0"):
            raise DataError(f"{path}: refused: {name!r} is not the name of a collection")


def _check_store(path: Path) -> None:
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as store:
        schema = store.execute("SELECT type, name, sql FROM sqlite_master ORDER BY type").fetchall()
        if [_normalized(*row) for row in schema] != SCHEMA:
            raise ValueError("it holds other tables than the one of Qdrant's points")
        if store.execute("PRAGMA quick_check").fetchall() != [("ok",)]:
            raise ValueError("SQLite finds it damaged")
        for (point,) in store.execute("SELECT point FROM points"):
            _check_point(point)


def _normalized(kind: Any, name: Any, sql: Any) -> tuple[Any, Any, Any]:
    """An entry of the schema with its SQL in lower case, spaces as one."""
    return kind, name, " ".join(sql.lower().split()) if isinstance(sql, str) else sql


def _check_point(data: Any) -> None:
    if type(data) is not bytes:
        raise ValueError("a point is not a pickle")
    point = PickleReader(io.BytesIO(data), len(data), _find_point).load()
    if type(point) is not _Point:
        raise ValueError("a pickle is not a point")
    resolve(point, frozenset(), 4 * OPERATIONS)


class _Point(StandIn):
    """Stands in for a point of Qdrant."""

    def finish(self, content: Any) -> Any:
        return content


def _make_point(*arguments: Any) -> _Point:
    if arguments:
        raise PickleRefusedError("it makes a point with arguments")
    return _Point()


def _find_point(name: str) -> Global | None:
    return Global(name, _make_point) if name == ".".join(POINT) else None


@backends.register("qdrant")
class QdrantIndex:
    """Qdrant: embedded in the index folder, or the server or cluster at ``url``.

    There is one collection per index, with its name stored in the folder. ``api_key`` is never
    stored. With ``exact``, a server compares every vector instead of using its graph; the embedded
    form always does. For int8 and binary vectors a server keeps codes in memory and half-precision
    vectors on disk, from which it rescores ``refine`` × k candidates; the embedded form has the
    latter only.
    """

    def __init__(
        self,
        folder: Path,
        *,
        url: str = "",
        api_key: str = "",
        exact: bool = False,
        refine: int = 4,
    ) -> None:
        try:
            note = json.loads(read_text(folder / NOTE))
            self.dim, self.multi = int(note["dim"]), bool(note["multi"])
            self.dtype, self.collection = _datatype(note["dtype"]), str(note["collection"])
            quantized = note["dtype"] in QUANTIZED
        except FileNotFoundError:
            raise DataError(f"{folder}: not a Qdrant index (there is no {NOTE})") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{folder / NOTE}: damaged ({error})") from None
        self.models = _qdrant().models
        self.parameters = self.models.SearchParams(exact=exact)
        if quantized:  # a server scores again only on request
            self.parameters.quantization = self.models.QuantizationSearchParams(
                rescore=True, oversampling=float(max(1, refine))
            )
        self.client = _connect(folder, url, api_key)
        try:
            there = self.client.collection_exists(self.collection)
        except Exception as error:  # the client passes on errors of the network and the server
            raise DataError(f"{url or folder}: Qdrant does not answer ({error})") from None
        if not there:
            raise DataError(
                f"{url or folder}: Qdrant has no collection '{self.collection}'; restore it, or "
                "build the index again"
            )

    @classmethod
    def check_choices(cls, multi: bool, dtype: str) -> None:
        """Refuse to begin without the client; it holds vectors of any kind."""
        _qdrant()

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
                    datatype=models.Datatype(_datatype(dtype)),
                    multivector_config=several if multi else None,
                    quantization_config=_quantization(models, dtype),
                    on_disk=dtype in QUANTIZED or None,
                ),
            )
        except Exception as error:
            location = options.get("url") or folder
            raise DataError(f"{location}: Qdrant does not take the index ({error})") from None
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
        ids: list[int] = []
        offset = None
        while True:
            points, offset = self.client.scroll(
                self.collection,
                limit=10_000,
                offset=offset,
                with_payload=False,
                with_vectors=False,
            )
            ids += [int(point.id) for point in points]
            if offset is None:
                return np.sort(np.array(ids, dtype=np.int64))

    def add(self, ids: ArrayLike, vectors: Vectors) -> None:
        vectors = checked(vectors, self.dim, self.multi, self.dtype)
        keys = checked_ids(ids, vectors)
        existing = self._existing(keys)
        if len(existing):
            raise DataError(f"the id {existing[0]} is in this index already; update it instead")
        self._upsert(keys, vectors)

    def update(self, ids: ArrayLike, vectors: Vectors) -> None:
        vectors = checked(vectors, self.dim, self.multi, self.dtype)
        keys = checked_ids(ids, vectors)
        self._require(keys)
        self._upsert(keys, vectors)

    def delete(self, ids: ArrayLike) -> None:
        keys = checked_ids(ids)
        self._require(keys)
        for part in _batches(keys):
            self.client.delete(self.collection, points_selector=part.tolist(), wait=True)

    def search(self, queries: Vectors, k: int) -> tuple[Ids, Floats]:
        best = TopK(len(queries), k)
        queries = checked(queries, self.dim, True)
        requests = [
            self.models.QueryRequest(
                query=query.tolist() if self.multi else query[0].tolist(),
                limit=k,
                params=self.parameters,
            )
            for query in queries
        ]
        if not self.multi and len(queries.rows) > len(queries):
            raise DataError("this index takes exactly one vector per query")
        for number in range(0, len(requests), BATCH):
            answers = self.client.query_batch_points(
                self.collection, requests=requests[number : number + BATCH]
            )
            for query, answer in enumerate(answers, start=number):
                best.insert(
                    query,
                    np.array([int(point.id) for point in answer.points], dtype=np.int64),
                    np.array([point.score for point in answer.points], dtype=np.float32),
                )
        return best.result()

    def compact(self) -> None:
        """Nothing to do: Qdrant compacts its storage."""

    def check(self) -> list[str]:
        return []

    def describe(self) -> dict[str, Any]:
        return {"backend": "qdrant", "items": len(self), "collection": self.collection}

    def drop(self) -> None:
        self.client.delete_collection(self.collection)

    def close(self) -> None:
        self.client.close()

    def _existing(self, ids: Ids) -> list[int]:
        existing: list[int] = []
        for part in _batches(ids):
            points = self.client.retrieve(
                self.collection, part.tolist(), with_payload=False, with_vectors=False
            )
            existing += [int(point.id) for point in points]
        return existing

    def _require(self, ids: Ids) -> None:
        missing = np.setdiff1d(ids, np.array(self._existing(ids), dtype=np.int64))
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


def _datatype(dtype: Any) -> str:
    """The type of Qdrant's own vectors, beside which it keeps codes."""
    return "float32" if dtype == "float32" else "float16"


def _quantization(models: Any, dtype: str) -> Any:
    if dtype == "int8":
        kind = models.ScalarType.INT8
        scalar = models.ScalarQuantizationConfig(type=kind, quantile=1.0, always_ram=True)
        return models.ScalarQuantization(scalar=scalar)
    if dtype == "binary":
        return models.BinaryQuantization(binary=models.BinaryQuantizationConfig(always_ram=True))
    return None


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
