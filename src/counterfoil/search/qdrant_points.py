"""The points of an embedded Qdrant, looked at before its client opens them.

The client keeps each point as a pickle and loads it as Python does, so a forged index folder could
run code. Here every pickle is read once with a class that does nothing; names other than that of a
point are refused.
"""

from __future__ import annotations

import io
import pickle
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from counterfoil.errors import DataError

POINT = ("qdrant_client.http.models.models", "PointStruct")


class _Inert:
    def __setstate__(self, state: Any) -> None:
        pass


class _PointsOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != POINT:
            raise pickle.UnpicklingError(f"it names '{module}.{name}'")
        return _Inert


def check_points(folder: Path) -> None:
    """Refuse a folder whose stored points hold anything but points."""
    for path in folder.rglob("storage.*"):
        if path.name != "storage.sqlite":
            raise DataError(f"{path}: a store of an old Qdrant client; build the index again")
        try:
            _check_store(path)
        except Exception as error:  # a damaged store or pickle may fail anywhere
            raise DataError(
                f"{path}: refused: its points are not those of an index ({error}; nothing was "
                "run); build the index again"
            ) from None


def _check_store(path: Path) -> None:
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as store:
        kinds = store.execute("SELECT type FROM sqlite_master WHERE name = 'points'").fetchall()
        if not kinds:
            return
        if kinds != [("table",)]:  # a view may show different rows each time
            raise ValueError("'points' is not a table")
        for (point,) in store.execute("SELECT point FROM points"):
            _PointsOnly(io.BytesIO(point)).load()
