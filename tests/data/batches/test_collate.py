"""Batches: padding, masks, augmentation, sampling; the same for any number of workers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.storage.arrays import ArrayFile
from counterfoil.data.batches.collate import Collate, Item, pad_fragments, pad_texts
from counterfoil.data.batches.dataset import Augmentation, CaptionItems, ExtraItems, drop_regions
from counterfoil.data.batches.sampling import BatchPlan, RankBatches
from counterfoil.data.fragments import Fragments, FragmentTable
from counterfoil.data.pairs import Split
from counterfoil.data.text.tokenizers import WordText
from counterfoil.data.text.vocabulary import Vocabulary


def test_padding_is_masked_and_boxes_travel_along() -> None:
    items = [
        Fragments(np.ones((n, 4), np.float32), np.full((n, 4), 0.5, np.float32)) for n in (1, 3)
    ]
    batch = pad_fragments(items)
    assert batch.fragments.shape == (2, 3, 4)
    assert batch.mask.sum(1).tolist() == [1, 3]
    assert batch.fragments[0, 1:].abs().max() == 0
    assert batch.boxes is not None
    assert batch.boxes.shape == (2, 3, 4)
    texts = pad_texts([[5, 6], [7]], pad=0)
    assert texts.ids.tolist() == [[5, 6], [7, 0]]
    assert texts.mask.tolist() == [[True, True], [True, False]]


def test_an_item_depends_on_seed_epoch_and_caption_alone(concepts) -> None:
    text = WordText(Vocabulary.build(concepts.train.texts, 1))
    items = CaptionItems(concepts.train, text, Augmentation(0.4, 0.4), seed=5)
    again = CaptionItems(concepts.train, text, Augmentation(0.4, 0.4), seed=5)
    for index in [(0, 7, 0), (3, 2, 0), (0, 0, 1)]:
        mine, other = items[index], again[index]
        assert np.array_equal(mine.fragments.features, other.fragments.features)
        assert (mine.ids, mine.image, mine.caption) == (other.ids, other.image, other.caption)

    def drawn(epoch: int, view: int) -> tuple[int, tuple[int, ...]]:
        item = items[epoch, 7, view]
        return len(item.fragments), tuple(item.ids)

    assert len({drawn(epoch, 0) for epoch in range(10)}) > 3
    assert len({drawn(0, view) for view in range(10)}) > 3


def test_dropping_regions_leaves_the_promised_share_and_at_least_one() -> None:
    rng = np.random.default_rng(0)
    whole = Fragments(np.zeros((100, 2), np.float32), np.zeros((100, 4), np.float32))
    kept = [drop_regions(whole, Augmentation(regions=0.2), rng) for _ in range(100)]
    assert np.mean([len(item) for item in kept]) == pytest.approx(80, abs=1.5)
    assert all(len(item.boxes) == len(item) for item in kept)
    varied = [len(drop_regions(whole, Augmentation(0.5, varying=True), rng)) for _ in range(200)]
    assert np.mean(varied) == pytest.approx(80, abs=4)
    assert sum(n == 100 for n in varied) >= 20
    one = Fragments(np.zeros((1, 2), np.float32))
    assert all(len(drop_regions(one, Augmentation(regions=0.99), rng)) == 1 for _ in range(50))


def test_every_caption_is_visited_once_an_epoch_and_in_another_order_the_next(concepts) -> None:
    plan = BatchPlan(concepts.train, 10, seed=1, drop_last=False)
    first, second = (
        [caption for batch in RankBatches(plan, epoch) for _, caption, _ in batch]
        for epoch in (0, 1)
    )
    assert sorted(first) == list(range(len(concepts.train.texts)))
    assert first != second
    assert sorted(second) == sorted(first)


def test_one_caption_per_image_visits_every_image_once(concepts) -> None:
    plan = BatchPlan(concepts.train, 10, seed=1, captions="one", drop_last=False)
    chosen = [caption for batch in RankBatches(plan, 0) for _, caption, _ in batch]
    images = concepts.train.image_of[chosen]
    assert sorted(images) == list(range(len(concepts.train)))
    later = [caption for batch in RankBatches(plan, 1) for _, caption, _ in batch]
    assert set(chosen) != set(later)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_shares_of_all_processes_make_up_the_global_batch(concepts, world) -> None:
    plan = BatchPlan(concepts.train, 10, seed=1)
    alone = list(RankBatches(plan, 2))
    shares = [list(RankBatches(plan, 2, rank=r, world=world)) for r in range(world)]
    for number, batch in enumerate(alone):
        assert [index for share in shares for index in share[number]] == batch


def test_a_resumed_epoch_continues_with_the_next_batch(concepts) -> None:
    plan = BatchPlan(concepts.train, 10, seed=1)
    assert list(RankBatches(plan, 0, start=4)) == list(RankBatches(plan, 0))[4:]


def test_a_batch_of_one_is_refused(concepts) -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        BatchPlan(concepts.train, 1)


def test_collate_counts_what_it_leaves_out() -> None:
    good = Item(Fragments(np.zeros((2, 3), np.float32)), [1, 2], 0, 0)
    batch = Collate(0)([good, "image x: bad", good])
    assert len(batch.image_ids) == 2
    assert batch.skipped == ("image x: bad",)
    assert Collate(0)(["image x: bad"]) == ("image x: bad",)
    moved = batch.to("cpu")
    assert torch.equal(moved.images.mask, batch.images.mask)


def test_views_show_an_item_several_times_side_by_side(concepts) -> None:
    plan = BatchPlan(concepts.train, 4, seed=1, views=2)
    once = BatchPlan(concepts.train, 4, seed=1)
    for double, single in zip(RankBatches(plan, 3), RankBatches(once, 3), strict=True):
        assert [index[:2] for index in double[::2]] == [index[:2] for index in single]
        assert [index[2] for index in double] == [0, 1] * 4


def test_grouped_captions_come_with_their_image_once(concepts) -> None:
    split = concepts.train
    plan = BatchPlan(split, 4, seed=1, captions="grouped", drop_last=False)
    items = CaptionItems(split, WordText(Vocabulary.build(split.texts, 1)), Augmentation(), 0)
    seen: list[int] = []
    for indices in RankBatches(plan, 0):
        batch = Collate(0)([items[index] for index in indices])
        assert len(set(batch.image_ids.tolist())) == len(batch.image_ids)
        assert batch.images.fragments.shape[0] == len(batch.image_ids)
        assert batch.owners.tolist() == split.image_of[batch.caption_ids.numpy()].tolist()
        assert set(batch.owners.tolist()) == set(batch.image_ids.tolist())
        seen += batch.caption_ids.tolist()
    assert sorted(seen) == list(range(len(split.texts)))


def test_grouped_captions_go_with_an_image_that_cannot_be_read() -> None:
    fragments = Fragments(np.zeros((2, 3), np.float32))
    batch = Collate(0)(
        ["image x: bad", Item(None, [1], 4, 9), Item(fragments, [2], 5, 10), Item(None, [3], 5, 11)]
    )
    assert batch.image_ids.tolist() == [5]
    assert batch.caption_ids.tolist() == [10, 11]
    assert batch.skipped == ("image x: bad",)


class Neighbor:
    """Each caption brings the next image twice and a sentence of its own."""

    def __init__(self, count: int) -> None:
        self.count = count

    def of(self, caption: int, rng: np.random.Generator) -> ExtraItems:
        return ExtraItems((caption % self.count,) * (caption % 3), ("a new word",))


def test_companions_travel_with_their_pair(concepts) -> None:
    split = concepts.train
    text = WordText(Vocabulary.build(split.texts, 1))
    extra_sources = {"mine": Neighbor(len(split))}
    items = CaptionItems(split, text, Augmentation(), 0, extra_sources)
    batch = Collate(text.pad)([items[0, caption, 0] for caption in (1, 3, 5)])
    extra = batch.to("cpu").extras["mine"]
    assert extra.image_owners.tolist() == [0, 2, 2]
    assert extra.text_owners.tolist() == [0, 1, 2]
    read = split.fragments.read(5 % len(split)).features
    assert np.array_equal(extra.images.fragments[1, : len(read)].numpy(), read)
    assert extra.texts.ids[0].tolist() == text.encode("a new word")


def stored(folder, features: np.ndarray, lengths: list[int] | None = None) -> FragmentTable:
    np.save(folder / "features.npy", features)
    counts = np.array(lengths) if lengths is not None else None
    return FragmentTable(ArrayFile(folder / "features.npy"), np.arange(len(features)), counts)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("lengths", [None, [2, 3, 1]])
def test_a_batch_of_compact_features_arrives_as_the_same_numbers(tmp_path, kind, lengths) -> None:
    features = np.random.default_rng(0).normal(size=(3, 3, 5)).astype(kind)
    table = stored(tmp_path, features, lengths)
    compact = pad_fragments([table.compact(image) for image in range(3)])
    plain = pad_fragments([table.read(image) for image in range(3)])
    assert compact.fragments.dtype == (torch.float16 if kind is np.float16 else torch.float32)
    assert plain.fragments.dtype == torch.float32
    arrived = compact.to("cpu")
    assert arrived.fragments.dtype == torch.float32
    assert torch.equal(arrived.fragments, plain.fragments)
    assert torch.equal(arrived.mask, plain.mask)
    counts = lengths or [3, 3, 3]
    assert arrived.mask.sum(1).tolist() == counts
    for image, count in enumerate(counts):
        expected = features[image, :count].astype(np.float32)
        assert np.array_equal(arrived.fragments[image, :count].numpy(), expected)
        assert not arrived.fragments[image, count:].any()


@pytest.mark.parametrize("kind", [np.float16, np.float32])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_none_is_found_in_any_precision(tmp_path, kind, value) -> None:
    features = np.full((2, 3, 4), np.finfo(kind).min, dtype=kind)
    features[1, 2, 3] = value
    table = stored(tmp_path, features)
    assert len(table.compact(0)) == 3
    with pytest.raises(DataError, match="row 1, fragment 2"):
        table.compact(1)


def test_workers_hand_over_the_batches_that_the_main_process_makes(tmp_path) -> None:
    features = np.random.default_rng(0).normal(size=(8, 3, 5)).astype(np.float16)
    captions = [[f"one {i}", f"two of {i}"] for i in range(8)]
    table = stored(tmp_path, features, [1, 2, 3, 3, 2, 1, 2, 3])
    split = Split("train", [str(i) for i in range(8)], captions, fragments=table)
    items = CaptionItems(split, WordText(Vocabulary.build(split.texts, 1)), Augmentation(), 0)
    batches = RankBatches(BatchPlan(split, 4, 0), 0)
    here, there = (
        list(DataLoader(items, batch_sampler=batches, num_workers=n, collate_fn=Collate(0)))
        for n in (0, 1)
    )
    assert len(here) == len(there) == 4
    for mine, theirs in zip(here, there, strict=True):
        assert mine.images.fragments.dtype == theirs.images.fragments.dtype == torch.float16
        assert torch.equal(mine.images.fragments, theirs.images.fragments)
        assert torch.equal(mine.images.mask, theirs.images.mask)
        assert torch.equal(mine.texts.ids, theirs.texts.ids)
