"""An index folder of an embedded Qdrant is checked before its client unpickles it."""

from __future__ import annotations

import os
import pickle
import sqlite3

import pytest

from counterfoil.errors import DataError
from counterfoil.search.qdrant_points import POINT, check_points


class Makes:
    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def point(**values) -> bytes:
    """A point as the client pickles it; its class need not be installed."""
    module, name = POINT
    state = pickle.dumps(values, 4)[2:-1]
    return b"\x80\x04c" + f"{module}\n{name}\n".encode() + b")\x81" + state + b"b."


def store(folder, *points: bytes, table: str = "TABLE points (id TEXT, point BLOB)"):
    place = folder / "collection" / "images"
    place.mkdir(parents=True)
    with sqlite3.connect(place / "storage.sqlite") as file:
        file.execute(f"CREATE {table}")
        if table.startswith("TABLE"):
            file.executemany("INSERT INTO points VALUES ('1', ?)", [(data,) for data in points])
    file.close()


def test_points_of_an_index_are_accepted(tmp_path) -> None:
    check_points(tmp_path / "nothing yet")
    store(tmp_path, point(id=1, vector=[0.5, 1.0]), point(id=2, vector=[[0.5]], payload=None))
    check_points(tmp_path)


def test_a_forged_point_of_an_embedded_qdrant_is_refused_and_never_runs(tmp_path) -> None:
    marker = tmp_path / "marker"
    store(tmp_path, point(id=1, vector=[0.5]), point(id=2, payload={"a": Makes(marker)}))
    with pytest.raises(DataError, match=r"storage\.sqlite: refused: .*mkdir"):
        check_points(tmp_path)
    assert not marker.exists()


def test_a_view_in_the_place_of_the_points_is_refused(tmp_path) -> None:
    store(tmp_path, table="VIEW points AS SELECT 1 AS id, x'80' AS point")
    with pytest.raises(DataError, match="not a table"):
        check_points(tmp_path)
