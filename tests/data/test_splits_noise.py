"""Noisy captions: how many move, that they move to other images, and that it can be repeated."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.data.pairs import Split
from counterfoil.data.splits import shuffled_captions, with_noise_index

COUNTS = st.lists(st.integers(0, 6), min_size=0, max_size=12)


def make_split(counts: list[int]) -> Split:
    captions = [[f"caption {i}.{k}" for k in range(count)] for i, count in enumerate(counts)]
    extras = [{"sentids": list(range(count))} for count in counts]
    return Split("train", [f"image-{i}" for i in range(len(counts))], captions, extras=extras)


def drawn_places(split: Split, ratio: float, seed: int) -> np.ndarray:
    """The draw is the first use of the generator."""
    n = len(split.texts)
    return np.random.default_rng(seed).choice(n, size=round(ratio * n), replace=False)


@given(COUNTS, st.floats(0, 1), st.integers(0, 2**32))
@example([6, 1], 1.0, 0)
@example([5, 5, 5], 1.0, 0)
@example([], 0.5, 0)
@settings(deadline=None)
def test_none_of_the_captions_drawn_stays_with_its_image_unless_it_must(
    counts, ratio, seed
) -> None:
    split = make_split(counts)
    noisy, index = shuffled_captions(split, ratio, seed)
    owner = split.image_of
    drawn = drawn_places(split, ratio, seed)
    assert len(drawn) == round(ratio * len(split.texts))
    untouched = np.setdiff1d(np.arange(len(owner)), drawn)
    assert (index[untouched] == untouched).all()
    assert sorted(index[drawn]) == sorted(drawn)
    most = max(Counter(owner[drawn].tolist()).values(), default=0)
    unavoidable = max(0, 2 * most - len(drawn))
    assert (owner[index[drawn]] == owner[drawn]).sum() == unavoidable
    assert [len(captions) for captions in noisy.captions] == counts
    assert noisy.texts == [split.texts[place] for place in index]
    assert noisy.ids == split.ids


@given(COUNTS, st.floats(0, 1), st.integers(0, 1000))
@settings(deadline=None)
def test_the_same_seed_gives_the_same_noise_and_a_saved_index_gives_it_again(
    tmp_path_factory, counts, ratio, seed
) -> None:
    split = make_split(counts)
    noisy, index = shuffled_captions(split, ratio, seed)
    again, same = shuffled_captions(split, ratio, seed)
    assert np.array_equal(index, same)
    path = tmp_path_factory.getbasetemp() / "noise.npy"
    np.save(path, index)
    read = with_noise_index(split, np.load(path))
    assert read.captions == again.captions == noisy.captions


def test_another_seed_gives_other_noise() -> None:
    split = make_split([5] * 20)
    indices = {tuple(shuffled_captions(split, 0.4, seed)[1].tolist()) for seed in range(10)}
    assert len(indices) == 10


def test_captions_of_an_image_do_not_travel_together() -> None:
    split = make_split([5] * 50)
    noisy, _ = shuffled_captions(split, 1.0, seed=0)
    origins = [len({text.split(".")[0] for text in texts}) for texts in noisy.captions]
    assert np.mean(origins) > 4


def test_what_the_source_said_of_its_captions_is_not_kept() -> None:
    noisy, _ = shuffled_captions(make_split([2, 2]), 0.5, seed=0)
    assert noisy.extras is None


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([0, 1, 2], "4 captions.*shape \\[3\\]"),
        ([0, 1, 2, 2], "exactly once"),
        ([0, 1, 2, 4], "exactly once"),
        ([-1, 0, 1, 2], "exactly once"),
        ([0.0, 1.0, 2.0, 3.0], "integers"),
        ([[0, 1, 2, 3]], "shape"),
    ],
)
def test_an_index_for_other_data_is_refused(index, message) -> None:
    with pytest.raises(DataError, match=message):
        with_noise_index(make_split([2, 2]), np.array(index))


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_a_ratio_is_a_share(ratio) -> None:
    with pytest.raises(ConfigError, match="from 0 to 1"):
        shuffled_captions(make_split([2]), ratio, seed=0)
