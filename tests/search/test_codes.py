"""Vectors in 8 bits and in 1 bit: how far scores are from exact ones, and what an index keeps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from counterfoil.core.errors import DataError
from counterfoil.encoders.stored import dequantize, quantize
from counterfoil.search import Vectors, backends
from counterfoil.search import codes as coded_vectors
from counterfoil.search.codes import Coded, map_coded, popcount, rotate, write_coded

ROWS = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 6), st.integers(1, 130)),
    elements=st.floats(-(2.0**100), 2.0**100, width=32),
)


def unit(rng: np.random.Generator, count: int, dim: int) -> np.ndarray:
    rows = rng.normal(size=(count, dim)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def clustered(count: int, dim: int, spread: float = 0.7) -> np.ndarray:
    rng = np.random.default_rng(0)
    centers = unit(rng, 20, dim)[rng.integers(20, size=count)]
    rows = centers + spread * unit(rng, count, dim)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@given(ROWS)
@example(np.zeros((2, 3), dtype=np.float32))
@example(np.full((1, 3), 1e-40, dtype=np.float32))
def test_a_code_of_8_bits_is_within_half_a_scale_of_its_number(rows) -> None:
    codes, scales = quantize(rows)
    assert codes.dtype == np.int8
    assert np.abs(codes.astype(int)).max() <= 127
    bound = scales[:, None] * np.float32(0.5 + 1e-4) + np.float32(1e-35)
    assert (np.abs(dequantize(codes, scales) - rows) <= bound).all()
    # what was decoded is coded as it was: merging segments changes nothing
    again, _ = quantize(dequantize(codes, scales))
    assert np.array_equal(again, codes)


@given(st.integers(0, 999), st.integers(1, 300), st.integers(1, 8))
def test_scores_from_8_bits_are_within_their_bound(seed, dim, count) -> None:
    rng = np.random.default_rng(seed)
    rows = (unit(rng, count, dim) * rng.lognormal(0, 3, (count, 1))).astype(np.float32)
    queries = unit(rng, 3, dim)
    stored = Coded.encode(rows, "int8")
    exact = queries.astype(np.float64) @ rows.T.astype(np.float64)
    bound = np.abs(queries).sum(1)[:, None] * stored.scales[None] / 2
    error = np.abs(stored.products(queries).numpy() - exact)
    assert (error <= bound + 1e-5 * np.linalg.norm(rows, axis=1)).all()


@given(st.integers(0, 999), st.sampled_from([1, 3, 64, 100, 384, 1000]))
def test_the_rotation_keeps_inner_products(seed, dim) -> None:
    rows = unit(np.random.default_rng(seed), 4, dim)
    rotated = rotate(rows)
    assert rotated.shape[1] % 64 == 0
    assert rotated @ rotated.T == pytest.approx(rows @ rows.T, abs=1e-5)


def test_the_rotation_spreads_one_number_over_all_signs() -> None:
    for dim in (128, 384):
        one = np.eye(dim, dtype=np.float32)[5:6]
        assert np.abs(rotate(one)).max() < 6 / dim**0.5


def test_the_rotation_is_the_same_on_every_machine() -> None:
    """Its signs are stored: another rotation would make every index of signs useless."""
    rotated = rotate(np.arange(1.0, 101, dtype=np.float32)[None])[0]
    assert "".join("01"[int(number > 0)] for number in rotated[:32]) == EXPECTED_SIGNS


EXPECTED_SIGNS = "00000000001001000001111000100110"


@pytest.mark.parametrize("dim", [64, 200, 384])
def test_signs_estimate_inner_products_without_bias(dim) -> None:
    rng = np.random.default_rng(dim)
    rows, queries = 3 * unit(rng, 400, dim), unit(rng, 50, dim)
    queries[:25] = queries[:25] + rows[:25]  # near one another, too
    exact = queries @ rows.T
    guess = Coded.encode(rows, "binary").products(queries).numpy()
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(queries, axis=1)[:, None]
    error = (guess - exact) / lengths
    # of a random direction, the error is π / 2 - 1 of the variance of a sign, or less
    assert np.sqrt((error**2).mean()) < 0.8 / dim**0.5
    assert abs(error.mean()) < 0.01
    own = Coded.encode(rows, "binary").products(rows[:9]).numpy()[np.arange(9), np.arange(9)]
    assert own == pytest.approx(np.full(9, 9.0), rel=0.08)


def test_signs_are_compared_as_the_definition_says() -> None:
    rng = np.random.default_rng(0)
    rows, query = unit(rng, 300, 100), unit(rng, 1, 100)
    stored = Coded.encode(rows, "binary")
    turned = rotate(query)[0]
    spacing = 2 * np.abs(turned).max() / 15
    rounded = (np.rint(turned / spacing + 7.5) - 7.5) * spacing
    signs = np.where(rotate(rows) > 0, 1, -1)
    factors = (rows**2).sum(1) / np.abs(rotate(rows)).sum(1)
    expected = factors * (signs @ rounded)
    assert stored.products(query).numpy()[0] == pytest.approx(expected, abs=1e-5)


def test_zeros_and_extremes_have_finite_scores() -> None:
    rows = np.array([[0.0] * 8, [3e38] * 8, [1e-42] * 8], dtype=np.float32)
    for dtype in ("int8", "binary"):
        scores = Coded.encode(rows, dtype).products(np.ones((1, 8), dtype=np.float32) / 100)
        assert np.isfinite(scores.numpy()).all()
        assert scores[0, 0] == 0


def test_ones_are_counted_without_numpy_2(monkeypatch) -> None:
    words = np.random.default_rng(0).integers(0, 2**63, size=(3, 50), dtype=np.uint64)
    expected = [[int(word).bit_count() for word in row] for row in words]
    assert popcount(words).tolist() == expected
    monkeypatch.delattr(np, "bitwise_count", raising=False)
    assert popcount(words).tolist() == expected


@pytest.mark.parametrize("dtype", ["float16", "int8", "binary"])
def test_stored_vectors_are_read_back_from_blocks(dtype, tmp_path) -> None:
    stored = Coded.encode(unit(np.random.default_rng(0), 50, 70), dtype)
    write_coded(tmp_path, [stored[:20], stored[20:20], stored[20:]], 50)
    again = map_coded(tmp_path, 70, dtype)
    for name, value in vars(stored).items():
        assert (value is None) == (getattr(again, name) is None)
        assert value is None or np.array_equal(value, getattr(again, name))
    (tmp_path / "rows.bin").write_bytes(b"x" * 71)
    with pytest.raises(DataError, match="damaged, build the index again"):
        map_coded(tmp_path, 70, dtype)


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "delete", "update", "compact", "reopen"]),
              st.integers(0, 9)),
    max_size=8,
)  # fmt: skip


@pytest.mark.parametrize("multi", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "binary"])
@given(steps=STEPS, seed=st.integers(0, 99))
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_sequence_of_changes_keeps_scores_within_the_bound(
    dtype, multi, tmp_path_factory, steps, seed
) -> None:
    """A dictionary of exact vectors beside it; merges must not add to the error of the codes."""
    rng, dim = np.random.default_rng(seed), 70
    folder = tmp_path_factory.mktemp("any") / "index"
    # every item is a candidate, so that only the codes make a difference
    index = backends["exact"].create(folder, dim, multi, dtype, {"refine": 100})
    exact: dict[int, np.ndarray] = {}
    fresh = 0
    for what, count in steps:
        chosen = rng.permutation(sorted(exact))[:count].astype(np.int64)
        keys = np.arange(fresh, fresh + count) if what == "add" else chosen
        rows = [unit(rng, int(rng.integers(1, 4)) if multi else 1, dim) for _ in keys]
        if what == "add":
            fresh += count
            index.add(keys, Vectors.several(rows))
        elif what == "update":
            index.update(keys, Vectors.several(rows))
        elif what == "delete":
            index.delete(keys)
        elif what == "compact":
            index.compact()
        else:
            index.close()
            index = backends["exact"].open(folder, {"refine": 100})
        if what in ("add", "update"):
            exact.update(zip(keys.tolist(), rows, strict=True))
        elif what == "delete":
            exact = {key: value for key, value in exact.items() if key not in set(keys.tolist())}
        assert index.ids().tolist() == sorted(exact)
        query = unit(rng, 3 if multi else 1, dim)
        ids, scores = index.search(Vectors.several([query]), 99)
        assert sorted(ids[0].tolist()) == sorted(exact)
        for key, score in zip(ids[0].tolist(), scores[0].tolist(), strict=True):
            truth = sum(max(float(q @ row) for row in exact[key]) for q in query)
            scale = max(float(np.abs(row).max()) for row in exact[key]) / 127
            assert abs(score - truth) <= float(np.abs(query).sum()) * scale / 2 + 1e-5
    index.close()


def test_compacting_keeps_the_bytes_of_what_is_left(tmp_path) -> None:
    rows = unit(np.random.default_rng(0), 40, 100)
    index = backends["exact"].create(tmp_path / "index", 100, False, "binary", {})
    for start in range(0, 40, 8):
        index.add(range(start, start + 8), Vectors.single(rows[start : start + 8]))
    index.delete(range(0, 40, 2))
    index.compact()
    (left,) = index._maps.values()
    direct = Coded.encode(rows[1::2], "binary")
    for name, value in vars(direct).items():
        assert np.array_equal(value, getattr(left[0], name))
    assert index.describe()["bytes"] == 20 * (100 + 4 + 16 + 4 + 8)


@pytest.mark.parametrize(("dtype", "floor"), [("float16", 0.99), ("int8", 0.97), ("binary", 0.95)])
def test_few_of_the_best_are_lost(dtype, floor, tmp_path) -> None:
    rows = clustered(3000, 128)
    index = backends["exact"].create(tmp_path / "index", 128, False, dtype, {})
    index.add(range(3000), Vectors.single(rows))
    queries = clustered(3000, 128)[:40] + 0.3 * unit(np.random.default_rng(1), 40, 128)
    truth = np.argsort(-(queries @ rows.T), axis=1)[:, :10]
    best, _ = index.search(Vectors.single(queries), 100)  # a short shortlist
    pairs = zip(best[:, :10], truth, strict=True)
    share = np.mean([len(set(a) & set(b)) / 10 for a, b in pairs])
    assert share >= floor


def test_more_candidates_find_more(tmp_path) -> None:
    rows = clustered(2000, 64)
    index = backends["exact"].create(tmp_path / "index", 64, False, "binary", {})
    index.add(range(2000), Vectors.single(rows))
    truth = np.argsort(-(rows[:40] @ rows.T), axis=1)[:, :10]
    shares = []
    for refine in (1, 4, 200):
        again = backends["exact"].open(tmp_path / "index", {"refine": refine})
        best, _ = again.search(Vectors.single(rows[:40]), 10)
        pairs = zip(best, truth, strict=True)
        shares.append(np.mean([len(set(a) & set(b)) / 10 for a, b in pairs]))
    assert shares[0] < shares[1] < shares[2]
    assert shares[2] >= 0.98  # the codes of 8 bits alone


def test_an_index_of_an_unknown_precision_is_refused(tmp_path) -> None:
    backends["exact"].create(tmp_path / "index", 8, False, "float16", {})
    manifest = tmp_path / "index" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("float16", "object"))
    with pytest.raises(DataError, match="its dtype is 'object'"):
        backends["exact"].open(tmp_path / "index", {})


def test_wide_vectors_do_not_overflow_the_counts() -> None:
    """15 times 4,416 ones do not fit into 16 bits."""
    rows = np.abs(unit(np.random.default_rng(0), 3, 4400))
    guess = Coded.encode(rows, "binary").products(rows).numpy()
    assert guess == pytest.approx(rows @ rows.T, abs=0.05)
    assert coded_vectors.PLANES == 4
