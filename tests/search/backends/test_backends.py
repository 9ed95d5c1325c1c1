"""Every backend that is installed answers as a naive loop over a dictionary does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from counterfoil.core.errors import ConfigError, DataError, MissingExtraError
from counterfoil.search import Vectors, backends

DIM = 8

needs_faiss = pytest.mark.skipif(not importlib.util.find_spec("faiss"), reason="faiss not there")
needs_qdrant = pytest.mark.skipif(
    not importlib.util.find_spec("qdrant_client"), reason="qdrant-client not there"
)
# small enough that graphs are built, grown, used and thrown away within a test
TINY = {"least": 12, "tail": 4}
WIDE = {"ef_search": 512, "refine": 50}
PROBE_ALL = {"probes": 4096, "code_bytes": 8, "refine": 50}

FORMS = [
    pytest.param(("exact", {}, False), id="exact"),
    pytest.param(("exact", {}, True), id="exact-maxsim"),
    pytest.param(
        ("faiss", {"kind": "hnsw", **TINY, **WIDE}, False), id="faiss-hnsw", marks=needs_faiss
    ),
    pytest.param(
        ("faiss", {"kind": "ivfpq", **TINY, **PROBE_ALL}, False),
        id="faiss-ivfpq",
        marks=needs_faiss,
    ),
    pytest.param(("qdrant", {}, False), id="qdrant", marks=needs_qdrant),
    pytest.param(("qdrant", {}, True), id="qdrant-maxsim", marks=needs_qdrant),
]


class Naive:
    """The same operations on a dictionary, scored one pair at a time."""

    def __init__(self) -> None:
        self.items: dict[int, np.ndarray] = {}

    def search(self, query: np.ndarray) -> dict[int, float]:
        return {
            name: float(sum(max(float(q @ row) for row in rows) for q in query))
            for name, rows in self.items.items()
        }


def some(rng: np.random.Generator, count: int, multi: bool) -> Vectors:
    def item() -> np.ndarray:
        rows = rng.normal(size=(int(rng.integers(1, 5)) if multi else 1, DIM))
        return rows.astype(np.float32)

    return Vectors.several([item() for _ in range(count)])


def agrees(index, naive: Naive, rng: np.random.Generator, multi: bool) -> None:
    assert len(index) == len(naive.items)
    assert index.ids().tolist() == sorted(naive.items)
    queries = some(rng, 3, multi)
    for k in (1, 5, len(naive.items) + 7):
        ids, scores = index.search(queries, k)
        assert ids.shape == scores.shape == (3, min(k, len(naive.items)))
        for row, query in enumerate(queries):
            truth = naive.search(query)
            best = sorted(truth.values(), reverse=True)[:k]
            assert scores[row] == pytest.approx(best, abs=1e-4)
            assert len(set(ids[row].tolist())) == ids.shape[1]
            result = [truth[int(name)] for name in ids[row]]
            assert scores[row] == pytest.approx(result, abs=1e-4)


def run(folder: Path, form: tuple, steps: list[tuple[str, int]], seed: int) -> None:
    name, options, multi = form
    rng = np.random.default_rng(seed)
    index = backends[name].create(folder, DIM, multi, "float32", options)
    naive, fresh = Naive(), 0
    for what, count in steps:
        chosen = rng.permutation(sorted(naive.items))[:count].astype(np.int64)
        if what == "add":
            ids = np.arange(fresh, fresh + count)
            fresh += count
            vectors = some(rng, count, multi)
            index.add(rng.permutation(ids) if count == 0 else ids, vectors)
            naive.items.update(zip(ids.tolist(), vectors, strict=True))
        elif what == "delete":
            index.delete(chosen)
            for item in chosen.tolist():
                del naive.items[item]
        elif what == "update":
            vectors = some(rng, len(chosen), multi)
            index.update(chosen, vectors)
            naive.items.update(zip(chosen.tolist(), vectors, strict=True))
        elif what == "compact":
            index.compact()
        else:
            index.close()
            index = backends[name].open(folder, options)
        agrees(index, naive, rng, multi)
    index.close()


SCRIPT = [
    ("add", 5), ("add", 30), ("delete", 9), ("update", 7), ("reopen", 0), ("add", 3),
    ("delete", 20), ("add", 40), ("compact", 0), ("update", 30), ("reopen", 0), ("delete", 999),
    ("add", 6), ("compact", 0), ("reopen", 0),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_the_same_operations_give_the_same_answers_on_every_backend(form, tmp_path) -> None:
    many = 10 if "kind" in form[1] and form[1]["kind"] == "ivfpq" else 1  # its codes need 256
    run(tmp_path / "index", form, [(what, many * count) for what, count in SCRIPT], seed=0)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "delete", "update", "compact", "reopen"]), st.integers(0, 9)
    ),
    max_size=8,
)


@pytest.mark.parametrize(
    "form", [*FORMS[:1], pytest.param(FORMS[1].values[0], marks=pytest.mark.slow)]
)
@given(steps=STEPS, seed=st.integers(0, 99))
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_sequence_of_operations_leaves_what_a_dictionary_would_hold(
    form, tmp_path_factory, steps, seed
) -> None:
    run(tmp_path_factory.mktemp("any") / "index", form, steps, seed)


def test_many_small_additions_do_not_leave_many_segments(tmp_path) -> None:
    index = backends["exact"].create(tmp_path / "index", DIM, False, "float16", {})
    rng = np.random.default_rng(0)
    for item in range(30):
        index.add([item], some(rng, 1, False))
    assert index.describe()["segments"] <= 17
    assert index.ids().tolist() == list(range(30))
    index.delete(range(1, 30))
    index.compact()
    assert index.describe()["bytes"] == DIM * 2 + 8


def test_half_precision_costs_little(tmp_path) -> None:
    rng = np.random.default_rng(0)
    vectors = some(rng, 200, False)
    answers = []
    for dtype in ("float16", "float32"):
        index = backends["exact"].create(tmp_path / dtype, DIM, False, dtype, {})
        index.add(range(200), vectors)
        answers.append(index.search(some(np.random.default_rng(1), 4, False), 10)[1])
    assert answers[0] == pytest.approx(answers[1], abs=2e-2)
    assert not np.array_equal(*answers)


@pytest.mark.parametrize("form", FORMS)
def test_what_cannot_be_in_an_index_is_refused_and_changes_nothing(form, tmp_path) -> None:
    name, options, multi = form
    index = backends[name].create(tmp_path / "index", DIM, multi, "float32", options)
    rng = np.random.default_rng(0)
    index.add(range(5), some(rng, 5, multi))
    bad = some(rng, 2, multi)
    bad.rows[-1, 3] = np.nan
    with pytest.raises(DataError, match=r"item 1: .*not finite"):
        index.add([7, 8], bad)
    with pytest.raises(DataError, match="not finite"):
        index.search(bad, 3)
    with pytest.raises(DataError, match="vectors of 8 numbers, got 3"):
        index.add([7], Vectors.single([[1.0, 2.0, 3.0]]))
    with pytest.raises(DataError, match="id 4 is in this index already"):
        index.add([9, 4], some(rng, 2, multi))
    with pytest.raises(DataError, match="no item with the id 77"):
        index.delete([1, 77])
    with pytest.raises(DataError, match="no item with the id 77"):
        index.update([1, 77], some(rng, 2, multi))
    with pytest.raises(DataError, match="stands twice"):
        index.add([7, 7], some(rng, 2, multi))
    with pytest.raises(DataError, match="3 item ids for the vectors of 2"):
        index.add([7, 8, 9], some(rng, 2, multi))
    with pytest.raises(DataError, match="k must be at least 1"):
        index.search(some(rng, 1, multi), 0)
    assert index.ids().tolist() == [0, 1, 2, 3, 4]
    index.close()


def test_several_vectors_need_an_index_for_them(tmp_path) -> None:
    index = backends["exact"].create(tmp_path / "index", DIM, False, "float32", {})
    with pytest.raises(DataError, match="exactly one vector"):
        index.add([0], Vectors.several([np.ones((2, DIM))]))


def test_numbers_beyond_half_precision_are_refused(tmp_path) -> None:
    index = backends["exact"].create(tmp_path / "index", DIM, False, "float16", {})
    with pytest.raises(DataError, match="not finite in float16"):
        index.add([0], Vectors.single(np.full((1, DIM), 1e5)))


def test_an_option_that_a_backend_does_not_have_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"no option 'knd'.*did you mean 'kind'"):
        backends["faiss"].create(tmp_path, DIM, False, "float16", {"knd": "hnsw"})


@pytest.mark.parametrize("name", ["faiss", "qdrant"])
def test_a_backend_that_is_not_installed_says_how_to_install_it(
    name, tmp_path, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, {"faiss": "faiss", "qdrant": "qdrant_client"}[name], None)
    with pytest.raises(MissingExtraError, match=rf"counterfoil\[{name}\]"):
        backends[name].create(tmp_path / "index", DIM, False, "float16", {})


@needs_faiss
@pytest.mark.slow
def test_faiss_finds_nearly_all_without_looking_at_all(tmp_path) -> None:
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(40, 32))
    rows = centers[rng.integers(40, size=3000)] + 0.4 * rng.normal(size=(3000, 32))
    vectors = Vectors.single(rows / np.linalg.norm(rows, axis=1, keepdims=True))
    exact = backends["exact"].create(tmp_path / "exact", 32, False, "float16", {})
    exact.add(range(3000), vectors)
    truth = exact.search(vectors[:50], 10)[0]
    for kind, least in (("hnsw", 0.97), ("ivfpq", 0.8)):
        options = {"kind": kind, "least": 1000, "probes": 8, "code_bytes": 8}
        index = backends["faiss"].create(tmp_path / kind, 32, False, "float16", options)
        index.add(range(3000), vectors)
        assert index.describe()["in_graph"] == 3000
        result = index.search(vectors[:50], 10)[0]
        share = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(result, truth, strict=True)])
        assert share >= least
        # what FAISS built is only a help: without it, or with a damaged one, nothing is lost
        for path in (tmp_path / kind).glob("graph-*.faiss"):
            path.write_bytes(path.read_bytes()[:100])
        again = backends["faiss"].open(tmp_path / kind, options)
        assert again.graph is None
        assert np.array_equal(again.search(vectors[:50], 10)[0], truth)


@needs_faiss
def test_faiss_refuses_several_vectors(tmp_path) -> None:
    with pytest.raises(DataError, match="one vector per item"):
        backends["faiss"].create(tmp_path / "index", DIM, True, "float16", {})


@needs_qdrant
def test_qdrant_refuses_what_it_cannot_open(tmp_path) -> None:
    index = backends["qdrant"].create(tmp_path / "index", DIM, False, "float32", {})
    with pytest.raises(DataError, match="cannot be opened"):
        backends["qdrant"].open(tmp_path / "index", {})
    index.close()
    (tmp_path / "index" / "qdrant.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        backends["qdrant"].open(tmp_path / "index", {})
    with pytest.raises(DataError, match="Qdrant"):
        backends["qdrant"].create(
            tmp_path / "other", DIM, False, "float32", {"url": "http://127.0.0.1:9"}
        )
