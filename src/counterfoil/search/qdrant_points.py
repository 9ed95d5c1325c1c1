"""The store of an embedded Qdrant, checked before its client opens it.

The client keeps each point as a pickle and loads it as Python does, so a forged index folder could
run code. Here every point is read as data (see `data.pickles`); names other than that of a point
are refused. What the client would read differently from this check is refused as well: links,
journals of SQLite, and tables other than the one that the client makes.
"""

from __future__ import annotations

import io
import json
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from counterfoil.data.pickle_values import Global, PickleRefusedError, StandIn, resolve
from counterfoil.data.pickles import OPERATIONS, PickleReader
from counterfoil.errors import DataError
from counterfoil.reading import read_text

META, STORE = "meta.json", "storage.sqlite"
POINT = ("qdrant_client.http.models.models", "PointStruct")
TABLE = "create table points (id text primary key, point blob)"
SCHEMA = [("index", "sqlite_autoindex_points_1", None), ("table", "points", TABLE)]


def check_points(folder: Path) -> None:
    """Refuse a folder whose stored points hold anything but points."""
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
    point = PickleReader(io.BytesIO(data), len(data), _find).load()
    if type(point) is not _Point:
        raise ValueError("a pickle is not a point")
    resolve(point, frozenset(), 4 * OPERATIONS)


class _Point(StandIn):
    """Stands in for a point of Qdrant."""

    def finish(self, content: Any) -> Any:
        return content


def _make(*arguments: Any) -> _Point:
    if arguments:
        raise PickleRefusedError("it makes a point with arguments")
    return _Point()


def _find(name: str) -> Global | None:
    return Global(name, _make) if name == ".".join(POINT) else None
