"""An index folder of an embedded Qdrant is checked before its client unpickles it."""

from __future__ import annotations

import json
import os
import pickle
import sqlite3

import pytest

from counterfoil.core.errors import DataError
from counterfoil.search.backends.qdrant import POINT, STORE, check_points
from tests.data.hostile import doubled

TABLE = "TABLE points (id TEXT PRIMARY KEY, point BLOB)"


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


def store(folder, *points: bytes, table: str = TABLE, more: tuple[str, ...] = ()):
    place = folder / "collection" / "images"
    place.mkdir(parents=True)
    with sqlite3.connect(place / "storage.sqlite") as file:
        file.execute(f"CREATE {table}")
        if points:
            file.executemany("INSERT INTO points VALUES (?, ?)", enumerate(points))
        for statement in more:
            file.execute(statement)
    file.close()
    return place


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


@pytest.mark.parametrize(
    ("table", "more"),
    [
        ("VIEW points AS SELECT 1 AS id, x'80' AS point", ()),
        ("TABLE Points (id TEXT PRIMARY KEY, point BLOB)", ()),
        ("TABLE POINTS (id TEXT PRIMARY KEY, point BLOB)", ()),
        ("TABLE other (id TEXT PRIMARY KEY, point BLOB)", ()),
        ("TABLE points (id TEXT PRIMARY KEY, kept BLOB, point AS (kept))", ()),
        (TABLE, ("CREATE TABLE other (id)",)),
        (TABLE, ("CREATE VIEW other AS SELECT 1",)),
        (TABLE, ("CREATE TRIGGER t AFTER INSERT ON points BEGIN DELETE FROM points; END",)),
    ],
)
def test_a_store_with_anything_but_the_table_of_points_is_refused(tmp_path, table, more) -> None:
    store(tmp_path, table=table, more=more)
    with pytest.raises(DataError, match=r"storage\.sqlite: refused: .*other tables"):
        check_points(tmp_path)


def test_a_table_of_forged_points_in_capitals_is_refused_and_never_runs(tmp_path) -> None:
    marker = tmp_path / "marker"
    forged = point(id=2, payload={"a": Makes(marker)})
    store(tmp_path, forged, table=TABLE.replace("points", "Points"))
    with pytest.raises(DataError, match="refused"):
        check_points(tmp_path)
    assert not marker.exists()


def test_an_empty_store_is_refused(tmp_path) -> None:
    store(tmp_path, table=TABLE).joinpath("storage.sqlite").write_bytes(b"")
    with pytest.raises(DataError, match=r"storage\.sqlite: refused"):
        check_points(tmp_path)


@pytest.mark.parametrize("linked", ["collection", "collection/images", "storage.sqlite", ".lock"])
def test_a_link_in_an_index_folder_is_refused(tmp_path, linked) -> None:
    place = store(tmp_path / "elsewhere", point(id=1, vector=[0.5]))
    source = {"collection": place.parent, "collection/images": place}.get(linked, place / STORE)
    index = tmp_path / "index"
    link = index / (f"collection/images/{STORE}" if linked == STORE else linked)
    link.parent.mkdir(parents=True)
    link.symlink_to(source)
    with pytest.raises(DataError, match="refused: a link"):
        check_points(index)


@pytest.mark.parametrize(
    "name", ["../elsewhere", "..", ".", "", "/elsewhere", "a/b", "a\\b", "c:x", "a\0b"]
)
def test_a_collection_outside_the_index_folder_is_refused(tmp_path, name) -> None:
    store(tmp_path, point(id=1, vector=[0.5]))
    (tmp_path / "meta.json").write_text(json.dumps({"collections": {"images": {}}}))
    check_points(tmp_path)
    (tmp_path / "meta.json").write_text(json.dumps({"collections": {"images": {}, name: {}}}))
    with pytest.raises(DataError, match="is not the name of a collection"):
        check_points(tmp_path)


@pytest.mark.parametrize("text", ["5", "[", "{}", "[" * 100_000, '{"collections": 5}'])
def test_a_forged_list_of_collections_is_an_error_of_one_line(tmp_path, text) -> None:
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(DataError, match=r"meta\.json: damaged"):
        check_points(tmp_path)


def test_a_journal_beside_a_store_is_refused_as_it_would_change_the_points(tmp_path) -> None:
    place = store(tmp_path, point(id=1, vector=[0.5]))
    (place / f"{STORE}-journal").write_bytes(b"x")
    with pytest.raises(DataError, match="cut short"):
        check_points(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
@pytest.mark.parametrize("name", ["meta.json", ".lock", STORE])
def test_a_fifo_in_an_index_folder_is_refused_and_not_waited_for(tmp_path, name) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match="neither a file nor a folder"):
        check_points(tmp_path)


def test_a_point_with_a_key_that_takes_forever_to_hash_is_refused_at_once(tmp_path) -> None:
    module, name = POINT
    start = b"\x80\x04c" + f"{module}\n{name}\n".encode() + b")\x81}"
    store(tmp_path, start + doubled("tuple", 60) + b"K\x01sb.")
    with pytest.raises(DataError, match="dictionary key"):
        check_points(tmp_path)


@pytest.mark.parametrize("data", [b"\x80\x04N.", b"", "text", None, 5])
def test_a_value_that_is_not_a_pickled_point_is_refused(tmp_path, data) -> None:
    store(tmp_path, data)
    with pytest.raises(DataError, match=r"storage\.sqlite: refused"):
        check_points(tmp_path)


def test_a_store_of_the_real_client_is_accepted_until_it_is_forged(tmp_path) -> None:
    qdrant = pytest.importorskip("qdrant_client")
    client, models = qdrant.QdrantClient(path=str(tmp_path)), qdrant.models
    several = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
    for name, multi, vector in (("one", None, [0.5, 1.0]), ("many", several, [[0.5, 1.0]] * 3)):
        options = models.VectorParams(size=2, distance="Dot", multivector_config=multi)
        client.create_collection(name, vectors_config=options)
        points = [models.PointStruct(id=number, vector=vector) for number in range(3)]
        client.upsert(name, points=points)
    client.close()
    check_points(tmp_path)
    marker = tmp_path / "marker"
    with sqlite3.connect(tmp_path / "collection" / "one" / STORE) as file:
        forged = point(id=9, payload={"a": Makes(marker)})
        file.execute("INSERT INTO points VALUES ('9', ?)", (forged,))
    file.close()
    with pytest.raises(DataError, match="mkdir"):
        check_points(tmp_path)
    assert not marker.exists()
