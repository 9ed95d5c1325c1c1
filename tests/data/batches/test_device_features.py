"""Training features held on the device: the same batches, the same runs, less to send."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from counterfoil.core.config import build_config
from counterfoil.core.progress import Silent
from counterfoil.core.storage.arrays import ArrayFile
from counterfoil.core.tensors.device import room_for
from counterfoil.data.batches import device_features as module
from counterfoil.data.batches.collate import Collate, PairBatch
from counterfoil.data.batches.dataset import Augmentation, CaptionItems, ExtraItems
from counterfoil.data.batches.device_features import copy_to_device, features_on_device
from counterfoil.data.batches.sampling import BatchPlan, RankBatches
from counterfoil.data.fragments import FragmentTable
from counterfoil.data.pairs import Pairs, Split
from counterfoil.data.text.tokenizers import WordText
from counterfoil.data.text.vocabulary import Vocabulary
from counterfoil.models import create_model
from counterfoil.reproduce.plan import digest_of, recipe_of
from counterfoil.training.run_folder import resumed_config, write_config
from counterfoil.training.trainer import Trainer
from tests.conftest import make_split

CPU = torch.device("cpu")


class Neighbors:
    """Every caption brings the next image along."""

    def of(self, caption: int, rng: np.random.Generator) -> ExtraItems:
        return ExtraItems(images=(caption // 2 % 5,))


def odd_split(folder: Path, dtype: type, *, boxes: bool, vectors: bool = False) -> Split:
    """Nine images of unlike numbers of fragments, stored in another order; the fourth is bad."""
    rng = np.random.default_rng(3)
    shape = (11, 6) if vectors else (11, 4, 6)
    features = rng.standard_normal(shape).astype(dtype)
    order = rng.permutation(11)[:9]
    lengths = None if vectors else rng.integers(1, 5, 11)
    features[order[3]] = np.nan
    if lengths is not None:
        features[order[5], lengths[order[5]] :] = np.nan  # beyond what is real: of no account
    np.save(folder / "features.npy", features)
    framed = sizes = None
    if boxes:
        np.save(folder / "boxes.npy", rng.uniform(0, 50, (11, 4, 4)).astype(np.float32))
        framed, sizes = ArrayFile(folder / "boxes.npy"), np.full((11, 2), 50.0, np.float32)
    table = FragmentTable(ArrayFile(folder / "features.npy"), order, lengths, framed, sizes)
    captions = [[f"word{i} of {i % 3}", f"another word{i}"] for i in range(9)]
    return Split("train", [str(i) for i in range(9)], captions, fragments=table)


def batches(
    split: Split, held: np.ndarray | None, workers: int = 0, drop: float = 0.0
) -> list[PairBatch]:
    text = WordText(Vocabulary.build(split.texts, 1))
    augmentation = Augmentation(drop, varying=drop > 0)
    items = CaptionItems(split, text, augmentation, 5, {"next": Neighbors()}, held)
    loader = DataLoader(
        items,
        batch_sampler=RankBatches(BatchPlan(split, 6, 0), 0),
        collate_fn=Collate(text.pad),
        num_workers=workers,
    )
    return [batch for batch in loader if isinstance(batch, PairBatch)]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("boxes", [False, True])
@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_batches_are_those_that_are_read(tmp_path, monkeypatch, dtype, boxes, drop) -> None:
    monkeypatch.setattr(module, "CHUNK", 4)
    split = odd_split(tmp_path, dtype, boxes=boxes)
    here = copy_to_device(split.fragments, CPU, Silent())
    assert here.usable.tolist() == [place != 3 for place in range(9)]
    read = batches(split, None, drop=drop)
    sent = batches(split, here.usable, drop=drop)
    assert len(read) == len(sent) == 3
    for expected, travelled in zip(read, sent, strict=True):
        assert travelled.images.fragments.shape[2] == 0
        assert travelled.skipped == expected.skipped
        result, expected = here.fill(travelled.to(CPU)), expected.to(CPU)
        for mine, theirs in (
            (result.images, expected.images),
            (result.extras["next"].images, expected.extras["next"].images),
        ):
            assert torch.equal(mine.fragments, theirs.fragments)
            assert mine.fragments.dtype == torch.float32
            assert torch.equal(mine.mask, theirs.mask)
            assert mine.table_rows is None
            assert (mine.boxes is None) == (theirs.boxes is None) == (not boxes)
            if boxes:
                assert torch.equal(mine.boxes, theirs.boxes)
    assert sum(len(batch.skipped) for batch in sent) > 0


def test_one_vector_an_image(tmp_path) -> None:
    split = odd_split(tmp_path, np.float32, boxes=False, vectors=True)
    here = copy_to_device(split.fragments, CPU, Silent())
    for travelled, expected in zip(batches(split, here.usable), batches(split, None), strict=True):
        assert torch.equal(here.fill(travelled).images.fragments, expected.images.fragments)


def test_workers_send_the_same(tmp_path) -> None:
    split = odd_split(tmp_path, np.float16, boxes=True)
    here = copy_to_device(split.fragments, CPU, Silent())
    for mine, theirs in zip(
        batches(split, here.usable, workers=2), batches(split, here.usable), strict=True
    ):
        assert torch.equal(mine.images.table_rows, theirs.images.table_rows)
        assert torch.equal(mine.texts.ids, theirs.texts.ids)


def test_a_batch_goes_to_another_process_without_shared_memory(tmp_path) -> None:
    split = odd_split(tmp_path, np.float16, boxes=False)
    here = copy_to_device(split.fragments, CPU, Silent())
    batch = batches(split, here.usable)[0]
    back = ForkingPickler.loads(bytes(ForkingPickler.dumps(batch)))
    assert torch.equal(back.texts.mask, batch.texts.mask)
    assert torch.equal(back.extras["next"].image_owners, batch.extras["next"].image_owners)
    assert not back.texts.ids.is_shared()
    back.texts.ids[0, 0] = 7  # its own memory, writable


def runs(pairs: Pairs, folder: Path, held: bool, **model: object) -> bytes:
    config = build_config(
        {
            "model": {"embed_size": 16, "text": {"word_dim": 8}, **model},
            "data": {"min_count": 1, "drop_regions": 0.3, "features_on_gpu": held},
            "train": {"epochs": 2, "batch_size": 16, "device": "cpu"},
        }
    )
    torch.manual_seed(0)
    trainer = Trainer(create_model(config.model, pairs.train, config.data), pairs, config, folder)
    assert (trainer.batches.device_features is not None) == held
    trainer.run()
    return (folder / "last" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["rvse-mlp", "naaf"])
def test_a_run_is_the_same_to_the_bit(tmp_path, name) -> None:
    for part in ("data", "a", "b"):
        (tmp_path / part).mkdir()
    pairs = Pairs(
        "c", {part: make_split(tmp_path / "data", part, 20, 0) for part in ("train", "dev")}
    )
    assert runs(pairs, tmp_path / "a", False, name=name) == runs(
        pairs, tmp_path / "b", True, name=name
    )


@pytest.mark.parametrize("held", [False, True])
def test_memory_is_pinned_only_where_fragments_travel(tmp_path, held) -> None:
    pairs = Pairs("c", {part: make_split(tmp_path, part, 20, 0) for part in ("train", "dev")})
    config = build_config(
        {
            "model": {"name": "rvse-mlp", "embed_size": 16, "text": {"word_dim": 8}},
            "data": {"min_count": 1, "features_on_gpu": held},
            "train": {"batch_size": 16, "device": "cpu"},
        }
    )
    model = create_model(config.model, pairs.train, config.data)
    batches = Trainer(model, pairs, config, tmp_path / "run").batches
    assert not batches.loader(0, 0).pin_memory
    batches.close()
    batches.device = torch.device("cuda")  # as far as a loader asks
    assert batches.loader(0, 0).pin_memory == (not held)


def test_by_default_only_a_gpu_with_room_holds_them(tmp_path, monkeypatch) -> None:
    table = odd_split(tmp_path, np.float16, boxes=False).fragments
    assert features_on_device(table, None, CPU, Silent()) is None
    assert features_on_device(table, True, CPU, Silent()) is not None
    assert features_on_device(table, False, CPU, Silent()) is None
    assert features_on_device(None, True, CPU, Silent()) is None
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 100))
    assert room_for(10, gpu)
    assert not room_for(11, gpu)


def test_where_features_are_held_makes_no_other_run_of_it(tmp_path) -> None:
    plain, *others = (
        build_config({"data": {} if held is None else {"features_on_gpu": held}})
        for held in (None, False, True)
    )
    write_config(tmp_path, plain)
    for other in others:
        assert digest_of(other) == digest_of(plain)
        assert recipe_of(other) == recipe_of(plain)
        assert resumed_config(tmp_path, other).data.features_on_gpu == other.data.features_on_gpu


def test_an_image_that_is_not_held_is_left_out_although_it_can_be_read(tmp_path) -> None:
    split = odd_split(tmp_path, np.float32, boxes=False)
    held = copy_to_device(split.fragments, CPU, Silent()).usable
    held[1] = False  # as where a disk failed for a while
    text = WordText(Vocabulary.build(split.texts, 1))
    items = CaptionItems(split, text, Augmentation(), 5, resident=held)
    batch = Collate(text.pad)([items[0, caption, 0] for caption in range(8)])
    assert isinstance(batch, PairBatch)
    assert batch.image_ids.tolist() == [0, 0, 2, 2]
    assert len(batch.images.mask) == 4
    assert ["not a finite" in problem for problem in batch.skipped] == [False] * 2 + [True] * 2
