"""The Qdrant backend on Qdrant's own engine: its Rust core, without a server around it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from counterfoil.core.errors import DataError
from counterfoil.search import Vectors, backends
from counterfoil.search.backends import qdrant
from tests.search.backends.test_backends import SCRIPT, needs_qdrant, run

pytestmark = needs_qdrant
edge = pytest.importorskip("qdrant_edge")


class EngineClient:
    """The calls that the backend makes of a client, passed on to the engine.

    A server is the same engine behind a network; what it is asked for, and how it counts and ranks,
    is what is tested here.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "engine"
        self.shard = edge.EdgeShard.load(str(self.folder)) if self.folder.exists() else None

    def collection_exists(self, name: str) -> bool:
        return (self.folder / name).exists()

    def create_collection(self, name: str, vectors_config: Any) -> None:
        wanted = vectors_config
        self.folder.mkdir(parents=True)
        parameters = edge.EdgeVectorParams(
            wanted.size,
            getattr(edge.Distance, wanted.distance.value),
            on_disk=wanted.on_disk,
            multivector_config=edge.MultiVectorConfig(edge.MultiVectorComparator.MaxSim)
            if wanted.multivector_config
            else None,
            datatype=getattr(edge.VectorStorageDatatype, wanted.datatype.value.capitalize()),
            quantization_config=_quantization(wanted.quantization_config),
        )
        # graphs and codes are made of segments of any size, not only of 10 MB and more
        small = edge.EdgeOptimizersConfig(default_segment_number=1, indexing_threshold=1)
        config = edge.EdgeConfig(vectors=parameters, optimizers=small)
        self.shard = edge.EdgeShard.create(str(self.folder), config)
        (self.folder / name).touch()

    def upsert(self, name: str, points: list[Any], wait: bool) -> None:
        rows = [edge.Point(point.id, point.vector) for point in points]
        self.shard.update(edge.UpdateOperation.upsert_points(rows))

    def delete(self, name: str, points_selector: list[int], wait: bool) -> None:
        self.shard.update(edge.UpdateOperation.delete_points(points_selector))

    def count(self, name: str, exact: bool) -> Any:
        return SimpleNamespace(count=self.shard.count(edge.CountRequest(exact)))

    def retrieve(self, name: str, ids: list[int], **what: bool) -> list[Any]:
        return self.shard.retrieve(ids, False, False)

    def scroll(self, name: str, limit: int, offset: Any, **what: bool) -> tuple[list[Any], Any]:
        return self.shard.scroll(edge.ScrollRequest(offset=offset, limit=limit))

    def query_batch_points(self, name: str, requests: list[Any]) -> list[Any]:
        return [
            SimpleNamespace(
                points=self.shard.query(
                    edge.QueryRequest(
                        limit=request.limit,
                        query=edge.Query.Nearest(request.query),
                        params=_parameters(request.params),
                    )
                )
            )
            for request in requests
        ]

    def close(self) -> None:
        if self.shard is not None:
            self.shard.close()


def _parameters(wanted: Any) -> Any:
    codes = wanted.quantization
    if codes is not None:
        codes = edge.QuantizationSearchParams(
            rescore=codes.rescore, oversampling=codes.oversampling
        )
    return edge.SearchParams(exact=wanted.exact, quantization=codes)


def _quantization(config: Any) -> Any:
    if hasattr(config, "scalar"):
        scalar = config.scalar
        assert scalar.type.value == "int8"
        kind = edge.ScalarType.Int8
        return edge.ScalarQuantizationConfig(kind, scalar.quantile, scalar.always_ram)
    if hasattr(config, "binary"):
        return edge.BinaryQuantizationConfig(config.binary.always_ram)
    return None


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(qdrant, "_connect", lambda folder, url, api_key: EngineClient(folder))


@pytest.mark.parametrize("multi", [False, True])
def test_the_engine_answers_as_a_dictionary_does(multi, engine, tmp_path) -> None:
    run(tmp_path / "index", ("qdrant", {}, multi), SCRIPT, seed=0)


@pytest.mark.parametrize("dtype", ["float16", "int8", "binary"])
def test_the_engine_takes_codes_and_scores_candidates_again(dtype, engine, tmp_path) -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(600, 128)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    queries = rows[:20] + 0.03 * rng.normal(size=(20, 128)).astype(np.float32)
    index = backends["qdrant"].create(tmp_path / "index", 128, False, dtype, {"refine": 1})
    index.add(range(600), Vectors.single(rows))
    index.client.shard.optimize()  # codes are made now
    index.close()
    truth = np.argsort(-(queries @ rows.T), axis=1)[:, :5]
    shares = {}
    for refine in (1, 60):
        again = backends["qdrant"].open(tmp_path / "index", {"refine": refine})
        ids, scores = again.search(Vectors.single(queries), 5)
        again.close()
        pairs = zip(ids, truth, strict=True)
        shares[refine] = np.mean([len(set(a) & set(b)) / 5 for a, b in pairs])
        # scores are those of half precision, not of the codes
        exact = np.take_along_axis(queries @ rows.T, ids, axis=1)
        assert scores == pytest.approx(exact, abs=1e-3)
    assert shares[60] >= 0.97
    assert (dtype == "binary") == (shares[1] < 0.8)


def test_half_precision_is_the_limit_of_what_the_engine_stores(engine, tmp_path) -> None:
    index = backends["qdrant"].create(tmp_path / "index", 8, False, "int8", {})
    with pytest.raises(DataError, match="not finite in float16"):
        index.add([0], Vectors.single(np.full((1, 8), 1e5)))
    index.close()
