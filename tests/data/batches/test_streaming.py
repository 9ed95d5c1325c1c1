"""Streamed batches: every item once per epoch, near its place in the shards, bounded in memory."""

from __future__ import annotations

import shutil
from itertools import pairwise

import numpy as np
import pytest

from counterfoil.core.config import DataConfig, ModelConfig
from counterfoil.core.errors import DataError, RemoteError
from counterfoil.core.storage import remote
from counterfoil.data import convert, load_pairs
from counterfoil.data.batches import streaming
from counterfoil.data.batches.collate import Collate, PairBatch
from counterfoil.data.batches.dataset import Augmentation, CaptionItems
from counterfoil.data.batches.sampling import RankBatches
from counterfoil.data.batches.streaming import ReadFailure, StreamLoader, StreamPlan, find_layout
from counterfoil.models import create_model
from tests.range_server import range_server


@pytest.fixture(scope="module")
def folder(concepts, tmp_path_factory):
    """The concepts data set as shards of 15 images: seven for train."""
    folder = tmp_path_factory.mktemp("shards")
    convert(concepts, folder / "shards", "shards", shard_size=15)
    return folder / "shards"


@pytest.fixture(scope="module")
def local(folder):
    return load_pairs(folder).train


@pytest.fixture(scope="module")
def text(local):
    settings = ModelConfig(name="vse-fc", embed_size=8, text={"word_dim": 8})
    return create_model(settings, local, DataConfig(min_count=1)).text


@pytest.fixture
def server(folder, monkeypatch):
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.001)
    with range_server() as running:
        running.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        yield running


def plan_of(split, **options) -> StreamPlan:
    settings = {"batch_size": 12, "seed": 3, "buffer": 20, **options}
    return StreamPlan(split, layout=find_layout(split), **settings)


def loader_of(split, text, epoch=0, start=0, rank=0, threads=1, **options) -> StreamLoader:
    plan = plan_of(split, **options)
    items = CaptionItems(split, text, Augmentation(regions=0.3, words=0.2), 3)
    batches = RankBatches(plan, epoch, start, rank, plan.world)
    return StreamLoader(items, batches, Collate(text.pad), threads)


def plain(batch: PairBatch) -> list[np.ndarray]:
    tensors = (batch.images.fragments, batch.images.mask, batch.texts.ids, batch.image_ids)
    return [tensor.numpy() for tensor in (*tensors, batch.caption_ids)]


def check_same(some, others) -> None:
    for one, other in zip(some, others, strict=True):
        for a, b in zip(plain(one), plain(other), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("captions", ["all", "one", "grouped"])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [True, False])
def test_an_epoch_visits_every_item_once(local, captions, world, drop_last) -> None:
    plan = plan_of(local, captions=captions, world=world, drop_last=drop_last, batch_size=13)
    order = plan.order(1)
    assert len(order) == (len(plan) * 13 if drop_last else plan.items)
    assert len(np.unique(order)) == len(order)
    if captions != "all":
        assert len(np.unique(local.image_of[order])) == len(order)
    shares = [list(RankBatches(plan, 1, 0, rank, world)) for rank in range(world)]
    visited = sorted({e[1] for share in shares for batch in share for e in batch if e[2] == 0})
    assert visited == sorted(int(c) for c in order)


def test_the_order_is_a_function_of_seed_epoch_and_processes(local) -> None:
    orders = [plan_of(local).order(0), plan_of(local).order(1), plan_of(local, seed=4).order(0)]
    np.testing.assert_array_equal(orders[0], plan_of(local).order(0))
    assert (orders[0] != orders[1]).any()
    assert (orders[0] != orders[2]).any()


def test_an_item_moves_by_less_than_the_buffer(local) -> None:
    plan = plan_of(local, buffer=10)
    place = np.empty(len(local), dtype=np.int64)
    place[plan.images_in_order(0)] = np.arange(len(local))
    places = place[local.image_of[plan.order(0)]]
    seen_until = np.maximum.accumulate(places)
    assert (seen_until - places).max() < 10
    assert (seen_until - places).max() > 2  # it does shuffle
    shards = [int(plan.layout.archive_of[i]) for i in plan.images_in_order(0)]
    assert len([1 for a, b in pairwise(shards) if a != b]) == 6


def test_two_processes_read_their_own_shards(local) -> None:
    plan = plan_of(local, world=2, batch_size=8)
    read = []
    for rank in range(2):
        entries = [e for batch in RankBatches(plan, 0, 0, rank, 2) for e in batch]
        images = {int(local.image_of[caption]) for _, caption, _ in entries}
        read.append({int(plan.layout.archive_of[i]) for i in images})
    assert len(read[0] & read[1]) <= 1  # only the shard that the cut goes through
    assert read[0] | read[1] == set(range(7))


@pytest.mark.parametrize("threads", [1, 3])
def test_remote_batches_are_the_local_ones_whatever_the_threads(
    server, local, text, tmp_path, threads
) -> None:
    url = f"{server.url}/train-{{00000..00006}}.tar"
    split = load_pairs(url, cache_dir=tmp_path).train
    server.requests.clear()
    mine = list(loader_of(split, text, threads=threads))
    check_same(mine, loader_of(local, text))
    size = sum(len(data) for name, data in server.files.items() if name.startswith("train"))
    assert server.sent() < size  # nothing is read twice


def test_a_resumed_epoch_gives_the_rest_of_its_batches(server, local, text, tmp_path) -> None:
    split = load_pairs(f"{server.url}/train-{{00000..00006}}.tar", cache_dir=tmp_path).train
    whole = list(loader_of(local, text, epoch=2))
    for start in (1, 7, len(whole)):
        check_same(loader_of(split, text, epoch=2, start=start), whole[start:])


def test_memory_holds_the_buffer_and_no_more(server, text, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(streaming, "SPAN_BYTES", 3000)  # a few images
    split = load_pairs(f"{server.url}/train-{{00000..00006}}.tar", cache_dir=tmp_path).train
    loader = loader_of(split, text, buffer=8, batch_size=6)
    most = 0
    for _ in loader:
        most = max(most, loader.plan.layout.buffered_ranges())
    batches_ahead = (loader.threads + streaming.AHEAD + 1) * 6
    assert 0 < most <= 2 * (8 + batches_ahead + 6)  # features and boxes of each
    assert most < 2 * len(split) / 2
    assert loader.plan.layout.buffered_ranges() == 0


def test_a_broken_connection_takes_the_place_of_a_batch(server, local, text, tmp_path) -> None:
    split = load_pairs(f"{server.url}/train-{{00000..00006}}.tar", cache_dir=tmp_path).train
    server.requests.clear()
    server.down_after = 3
    *whole, last = loader_of(split, text)
    assert isinstance(last, ReadFailure)
    assert isinstance(last.error, RemoteError)
    assert 0 < len(whole) < 16
    check_same(whole, list(loader_of(local, text))[: len(whole)])
    server.down_after = None
    rest = list(loader_of(split, text, start=len(whole)))
    check_same(rest, list(loader_of(local, text))[len(whole) :])
    del server.files["train-00003.tar"]
    *_, last = loader_of(split, text)
    assert isinstance(last.error, RemoteError)
    assert "train-00003.tar: no such file (404)" in str(last.error)


def test_a_local_shard_of_another_size_changes_the_digest(folder, tmp_path) -> None:
    copy = shutil.copytree(folder, tmp_path / "shards")
    layout = find_layout(load_pairs(copy).train)
    before = layout.digest()
    assert before == find_layout(load_pairs(folder).train).digest()
    with (copy / "train-00003.tar").open("ab") as file:
        file.write(bytes(512))
    assert layout.digest() != before
    (copy / "train-00003.tar").unlink()
    with pytest.raises(DataError, match=r"train-00003\.tar: cannot be read"):
        layout.digest()


def test_a_loader_that_is_left_early_frees_its_memory(server, text, tmp_path) -> None:
    split = load_pairs(f"{server.url}/train-{{00000..00006}}.tar", cache_dir=tmp_path).train
    loader = loader_of(split, text)
    batches = iter(loader)
    next(batches)
    assert loader.plan.layout.buffered_ranges()
    batches.close()
    assert not loader.plan.layout.buffered_ranges()


def test_only_members_of_shards_can_be_streamed(concepts, local) -> None:
    assert find_layout(concepts.train) is None
    layout = find_layout(local)
    assert len(layout.archives) == 7
    assert not layout.is_remote
