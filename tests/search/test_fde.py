"""Fixed-dimensional encodings are what their formula says, and estimate MaxSim."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.search import SearchIndex
from counterfoil.search.fde import FdeOptions, FixedEncoding

DIM = 12


def batch(seed: int, lengths: list[int], dim: int = DIM) -> tuple[torch.Tensor, torch.Tensor]:
    """Items of unit-length fragments, and their mask."""
    torch.manual_seed(seed)
    mask = torch.arange(max(lengths, default=0))[None] < torch.tensor(lengths)[:, None]
    rows = torch.nn.functional.normalize(torch.randn(*mask.shape, dim), dim=-1)
    return rows * mask[..., None], mask


def naive(encoding: FixedEncoding, fragments: list[torch.Tensor], role: str) -> torch.Tensor:
    """One item, fragment by fragment."""
    values = []
    for planes, projection in zip(encoding.planes, encoding.projections, strict=True):
        sides = [tuple((planes @ x > 0).tolist()) for x in fragments]
        for bucket in range(2 ** len(planes)):
            wanted = tuple(bool(bucket >> bit & 1) for bit in range(len(planes)))
            own = [x @ projection for x, s in zip(fragments, sides, strict=True) if s == wanted]
            total = sum(own, torch.zeros(projection.shape[1]))
            if role == "query":
                values.append(total / len(encoding.planes))
            elif own:
                values.append(total / len(own))
            elif fragments:
                far = [sum(a != b for a, b in zip(s, wanted, strict=True)) for s in sides]
                values.append(fragments[far.index(min(far))] @ projection)
            else:
                values.append(total)
    out = torch.zeros(encoding.dim)
    for value, column, sign in zip(
        torch.cat(values), encoding.columns.tolist(), encoding.signs, strict=True
    ):
        out[column] += sign * value
    return out


@pytest.mark.parametrize(
    "options", [{"bits": 3, "repetitions": 2, "width": 4, "dim": 30}, {"bits": 0, "repetitions": 1}]
)
@pytest.mark.parametrize("role", ["query", "item"])
def test_the_encoding_is_that_of_the_formula(role, options) -> None:
    encoding = FixedEncoding.draw(DIM, FdeOptions(**options))
    fragments, mask = batch(0, [5, 1, 0, 9])
    rows = encoding.encode(fragments, mask, role)
    for row, item, real in zip(rows, fragments, mask, strict=True):
        torch.testing.assert_close(row, naive(encoding, list(item[real]), role))
    assert rows[2].abs().max() == 0


@given(st.integers(0, 99), st.integers(0, 4))
def test_for_items_of_one_fragment_it_is_maxsim_itself(seed, bits) -> None:
    """All buckets are filled with the fragment, so every fragment of a query meets it."""
    encoding = FixedEncoding.draw(DIM, FdeOptions(bits=bits, repetitions=3, width=DIM, dim=9999))
    queries, query_mask = batch(seed, [4, 2])
    items, item_mask = batch(seed + 1, [1, 1, 1])
    guess = (
        encoding.encode(queries, query_mask, "query") @ encoding.encode(items, item_mask, "item").T
    )
    exact = (queries @ items[:, 0].T).sum(1)
    torch.testing.assert_close(guess, exact, atol=1e-5, rtol=1e-4)


def test_padding_changes_nothing() -> None:
    encoding = FixedEncoding.draw(DIM, FdeOptions())
    fragments, mask = batch(0, [3, 6])
    for role in ("query", "item"):
        alone = encoding.encode(fragments[:1, :3], mask[:1, :3], role)
        torch.testing.assert_close(alone, encoding.encode(fragments, mask, role)[:1])


def test_more_buckets_come_closer_to_maxsim() -> None:
    """Of fragments that repeat in queries with noise, as words name regions."""
    items, item_mask = batch(0, [8] * 60, 32)
    queries = torch.nn.functional.normalize(items[:, :3] + 0.1 * torch.randn(60, 3, 32), dim=-1)
    sims = torch.einsum("qwd,ird->qiwr", queries, items)
    truth = sims.amax(3).sum(2)
    shares = []
    for bits in (0, 2, 4):
        encoding = FixedEncoding.draw(32, FdeOptions(bits=bits, width=32, dim=65536))
        encoded = encoding.encode(queries, torch.ones(60, 3, dtype=torch.bool), "query")
        guess = encoded @ encoding.encode(items, item_mask, "item").T
        own = torch.corrcoef(torch.stack([guess.flatten(), truth.flatten()]))[0, 1]
        shares.append(float(own))
    assert shares[0] < shares[1] < shares[2]
    assert shares[2] > 0.8


def test_projections_estimate_without_bias() -> None:
    fragments, mask = batch(0, [6] * 20, 64)
    exact = FixedEncoding.draw(64, FdeOptions(bits=2, width=64, dim=65536, repetitions=1))
    truth = exact.encode(fragments, mask, "query") @ exact.encode(fragments, mask, "item").T
    total = torch.zeros_like(truth)
    for seed in range(200):
        drawn = FixedEncoding.draw(64, FdeOptions(bits=2, width=16, dim=48, repetitions=1), seed)
        # the same hyperplanes, so that only the projections are random
        one = FixedEncoding(exact.planes, drawn.projections, drawn.columns, drawn.signs)
        assert one.dim == 48
        total += one.encode(fragments, mask, "query") @ one.encode(fragments, mask, "item").T
    error = (total / 200 - truth).abs().mean() / truth.abs().mean()
    assert error < 0.35
    assert torch.corrcoef(torch.stack([total.flatten(), truth.flatten()]))[0, 1] > 0.9


def test_an_index_searches_with_encodings_and_keeps_them(models, concepts, tmp_path) -> None:
    options = {"bits": 2, "repetitions": 8, "width": 24, "dim": 256}
    index = SearchIndex.build(
        tmp_path / "index",
        models["naaf"],
        concepts.test.select(range(20)),
        first_stage="fde",
        first_stage_options=options,
        dtype="int8",
    )
    assert index.info()["first_stage_options"] == options
    index.add(concepts.test.select(range(20, 32)))
    index.remove(["test-3"])
    again = SearchIndex.open(tmp_path / "index", device="cpu")
    hits, before = (i.search("a dog and a cat", k=31).hits for i in (again, index))
    assert [(h.id, h.first_score) for h in hits] == [(h.id, h.first_score) for h in before]
    assert len(hits) == 31
    fde = FixedEncoding.draw(24, FdeOptions(**options))
    assert torch.equal(again.proxy.fde.planes, fde.planes)
    assert again.search(image="test-7", k=2).target == "captions"
    assert again.search("a dog", target="captions", k=2).hits[0].first_score is not None


def test_a_damaged_encoding_is_refused(models, concepts, tmp_path) -> None:
    folder = tmp_path / "index"
    SearchIndex.build(
        folder, models["naaf"], concepts.test.select(range(4)), first_stage="fde"
    ).close()
    path = folder / "first_stage.safetensors"
    parts = load_file(path)
    for name, value in {
        "columns": parts["columns"] * 10**9,
        "signs": parts["signs"][:-1],
        "planes": parts["planes"][..., :-1],
        "other": parts["signs"].clone(),
    }.items():
        save_file({**parts, name: value.contiguous()}, path)
        with pytest.raises(DataError, match="build the index again"):
            SearchIndex.open(folder, device="cpu")
    path.write_bytes(b"no tensors")
    with pytest.raises(DataError, match="build the index again"):
        SearchIndex.open(folder, device="cpu")


@pytest.mark.parametrize("bad", [{"bits": 9}, {"dim": 0}, {"width": 1.5}, {"buckets": 4}])
def test_options_that_cannot_be_are_named(bad) -> None:
    with pytest.raises(ConfigError, match=rf"first_stage_options.{next(iter(bad))}: .*got"):
        FdeOptions.read(bad)
    assert np.prod(list(FdeOptions.read({}).model_dump().values())) > 0
