"""The best wrong candidates, kept while scores stream by, are those of the whole matrix."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.core.config import build_config
from counterfoil.core.errors import DataError, TrainingError
from counterfoil.core.progress import Silent
from counterfoil.data.pairs import Pairs, Split
from counterfoil.models import create_model
from counterfoil.models.store import save_pretrained
from counterfoil.scoring.encode import score_split
from counterfoil.training.extra_negatives import NO_CANDIDATE, best_wrong, mine
from counterfoil.training.services import TrainingRunSetup
from tests.conftest import make_split


def brute_force(scores: np.ndarray, own: np.ndarray, count: int) -> list[list[int]]:
    """Best wrong columns of each row by sorting all of them."""
    result = []
    for row, mine_ in zip(scores, own, strict=True):
        order = np.argsort(-row, kind="stable")
        best = [int(column) for column in order if not mine_[column]][:count]
        result.append(best + [NO_CANDIDATE] * (count - len(best)))
    return result


def stream(scores: torch.Tensor, image_of: torch.Tensor, count: int, side: int):
    rows = [slice(first, first + side) for first in range(0, len(scores), side)]
    blocks = ((r, c, scores[r, c]) for r in rows for c in torch.arange(len(image_of)).split(side))
    return best_wrong(blocks, image_of, len(scores), count)


@given(
    images=st.integers(1, 9),
    owners=st.lists(st.integers(0, 8), min_size=1, max_size=20),
    levels=st.sampled_from([1, 3, 1000]),
    count=st.integers(1, 25),
    side=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_streaming_keeps_what_sorting_the_whole_matrix_finds(
    images, owners, levels, count, side, seed
) -> None:
    image_of = torch.tensor(owners) % images
    generator = torch.Generator().manual_seed(seed)
    shape = (images, len(owners))
    scores = torch.randint(-levels, levels + 1, shape, generator=generator) / levels
    own = image_of.numpy() == np.arange(images)[:, None]
    of_image, of_text = stream(scores, image_of, count, side)
    assert of_image.tolist() == brute_force(scores.numpy(), own, count)
    assert of_text.tolist() == brute_force(scores.numpy().T, own.T, count)


def test_scores_of_any_size_and_sign_are_ordered_as_numbers() -> None:
    values = [0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, float("inf"), float("-inf"), 1.0, -1.0]
    scores = torch.tensor([values, values])
    of_image, _ = stream(scores, torch.ones(10, dtype=torch.long), 10, 4)
    assert of_image[0].tolist() == brute_force(scores.numpy(), np.zeros((2, 10), bool), 10)[0]
    assert of_image[1].tolist() == [NO_CANDIDATE] * 10


def test_a_score_that_is_not_a_number_is_refused() -> None:
    scores = torch.tensor([[0.0, float("nan")], [0.0, 0.0]])
    with pytest.raises(TrainingError, match="nan"):
        stream(scores, torch.tensor([0, 1]), 1, 2)


def small_model(split: Split, name: str = "vse-fc"):
    config = build_config({"model": {"name": name, "embed_size": 16}, "data": {"min_count": 1}})
    torch.manual_seed(0)
    return create_model(config.model, split, config.data).eval()


@pytest.fixture
def patchy(tmp_path) -> Split:
    """Image 3 cannot be read, image 5 has no caption."""
    split = make_split(tmp_path, "train", 30, seed=4)
    features = np.load(tmp_path / "train_ims.npy", mmap_mode="r+")
    features[3, 0, 0] = np.nan
    features.flush()
    captions = [[] if image == 5 else texts for image, texts in enumerate(split.captions)]
    return Split("train", split.ids, captions, fragments=split.fragments)


@pytest.mark.parametrize("name", ["vse-fc", "scan-t2i"])
def test_a_model_mines_what_its_score_matrix_says(patchy, name) -> None:
    model = small_model(patchy, name)
    of_image, of_text = mine(model, patchy, 7)
    assert of_image.shape == (30, 7)
    assert of_text.shape == (58, 7)
    whole = score_split(model, patchy)
    scores = np.full((30, 58), -np.inf)
    scores[np.ix_(whole.images, whole.texts)] = whole.scores.numpy()
    own = patchy.image_of == np.arange(30)[:, None]
    scores[own] = -np.inf
    scores[5] = -np.inf
    for table, matrix in ((of_image, scores), (of_text, scores.T)):
        for row, values in zip(table, matrix, strict=True):
            best = np.sort(values)[::-1][:7]
            if np.isinf(best).all():
                assert (row == NO_CANDIDATE).all()
            else:
                assert len(set(row)) == 7
                assert np.allclose(values[row], best, atol=1e-6)


def test_unreadable_and_captionless_images_are_nobodys_candidates(patchy) -> None:
    of_image, of_text = mine(small_model(patchy), patchy, 100)
    assert not np.isin(of_text, [3, 5]).any()
    assert not np.isin(of_image, np.flatnonzero(patchy.image_of == 3)).any()
    readable = of_image[[i for i in range(30) if i not in (3, 5)]]
    assert ((readable >= 0).sum(1) == 54).all()  # 58 captions less two own and two unreadable
    assert (readable[:, 54:] == NO_CANDIDATE).all()


def test_mining_twice_finds_the_same(patchy) -> None:
    first, second = (mine(small_model(patchy), patchy, 5) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def preparation(split: Split, **model) -> TrainingRunSetup:
    config = build_config({"model": {"name": "vse-fc", "embed_size": 8, **model}})
    new = create_model(config.model, split, config.data)
    return TrainingRunSetup(split, new, config, torch.device("cpu"), Silent())


def test_another_run_reads_the_captions_by_its_own_vocabulary(tmp_path) -> None:
    split = make_split(tmp_path, "train", 20, seed=0)
    others = make_split(tmp_path, "other", 3, seed=9)
    first = small_model(others)  # its vocabulary lacks most of the words
    save_pretrained(first, tmp_path / "first")
    run = preparation(split)
    assert len(run.text) != len(first.text)
    result = run.nearest(str(tmp_path / "first"), 4)
    assert all(np.array_equal(a, b) for a, b in zip(result, mine(first, split, 4), strict=True))


def test_a_run_on_other_fragments_is_refused(tmp_path) -> None:
    split = make_split(tmp_path, "train", 20, seed=0)
    wide = make_split(tmp_path, "wide", 4, seed=0, dim=24)
    save_pretrained(small_model(wide), tmp_path / "wide")
    with pytest.raises(DataError, match="24 numbers, the data have 16"):
        preparation(split).nearest(str(tmp_path / "wide"), 4)


def test_a_run_on_fragments_of_another_extractor_is_refused(tmp_path) -> None:
    from dataclasses import replace

    split = make_split(tmp_path, "train", 20, seed=0)
    model = small_model(split)
    model.fragments_from = "zones"
    save_pretrained(model, tmp_path / "first")
    run = preparation(replace(split, fragments=replace(split.fragments, made_by="segments")))
    with pytest.raises(DataError, match="fragments of 'zones', the data have those of"):
        run.nearest(str(tmp_path / "first"), 4)


def test_progress_is_shown_row_block_by_row_block(tmp_path) -> None:
    class Heard(Silent):
        def __init__(self) -> None:
            self.labels: list[str] = []

        def track(self, items, description, total=None, done=0):
            self.labels.append(description)
            return super().track(items, description, total, done)

    split = Pairs("c", {"train": make_split(tmp_path, "train", 8, 0)}).train
    heard = Heard()
    mine(small_model(split), split, 2, heard)
    assert heard.labels[-1] == "looking for hard negatives"
