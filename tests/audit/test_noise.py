"""Planted errors: their kinds, their rate, and what is told about them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from counterfoil.audit.noise import NOISES, nouns_of, one_caption_each, plant
from counterfoil.core.errors import ConfigError, DataError
from counterfoil.data.duplicates import spoken
from counterfoil.data.load import load_pairs
from counterfoil.data.text.words import words


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    return load_pairs("scenes", options={"images": [4, 4, 40]}, cache_dir=cache)["test"]


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    return load_pairs("scenes", options={"images": [4, 60, 4]}, cache_dir=cache)["dev"]


@pytest.mark.parametrize("noise", NOISES)
def test_the_stated_captions_are_wrong_and_no_others(scenes, noise) -> None:
    noisy = plant(scenes, noise, 0.3, seed=3)
    changed = np.array([a != b for a, b in zip(scenes.texts, noisy.split.texts, strict=True)])
    np.testing.assert_array_equal(changed, noisy.wrong)
    assert noisy.wrong.sum() == round(0.3 * (~noisy.clean).sum())
    assert [len(c) for c in noisy.split.captions] == [len(c) for c in scenes.captions]


@pytest.mark.parametrize("noise", ["random", "noun"])
@pytest.mark.parametrize("rate", [0.2, 0.6])
def test_captions_of_donors_have_no_copy(scenes, others, noise, rate) -> None:
    noisy = plant(scenes, noise, rate, 1, donors=others)
    wanted = round(rate * (~noisy.clean).sum())
    made = np.flatnonzero(noisy.wrong)
    assert len(made) == wanted if noise == "random" else 0.8 * wanted < len(made) <= wanted
    counts = Counter(map(spoken, noisy.split.texts))
    before = set(map(spoken, scenes.texts))
    for number in made:
        text = noisy.split.texts[number]
        assert text in others.texts
        assert counts[spoken(text)] == 1
        assert spoken(text) not in before
        if noise == "noun":
            assert set(nouns_of(text)) & set(nouns_of(scenes.texts[number]))
    right = np.flatnonzero(~noisy.wrong)
    assert all(noisy.split.texts[n] == scenes.texts[n] for n in right)
    again, other = (plant(scenes, noise, rate, seed, donors=others) for seed in (1, 2))
    assert again.split.texts == noisy.split.texts != other.split.texts


def test_donors_run_out_and_word_noise_takes_none(scenes, others) -> None:
    few = plant(scenes, "random", 0.5, 0, donors=others.select([0, 1]))
    assert 0 < few.wrong.sum() <= 10
    with pytest.raises(DataError, match="no caption can be made wrong"):
        plant(scenes, "random", 0.5, 0, donors=scenes)
    with pytest.raises(ConfigError, match="takes none from donors"):
        plant(scenes, "word", 0.5, 0, donors=others)


@pytest.mark.parametrize("noise", NOISES)
def test_the_same_seed_plants_the_same_errors(scenes, noise) -> None:
    one, same, other = (plant(scenes, noise, 0.3, seed) for seed in (3, 3, 4))
    assert one.split.texts == same.split.texts
    assert one.split.texts != other.split.texts


def test_a_clean_share_stays_clean_and_is_not_measured(scenes) -> None:
    noisy = plant(scenes, "random", 0.5, 0, clean=0.25, labeled=0.25)
    assert not (noisy.clean & noisy.wrong).any()
    assert (noisy.labeled & noisy.wrong).any()
    assert len(np.unique(scenes.image_of[noisy.clean])) == 10
    assert len(np.unique(scenes.image_of[noisy.labeled])) == 10
    assert noisy.measured.sum() == len(scenes.texts) - (noisy.clean | noisy.labeled).sum()


def test_a_random_error_is_a_caption_of_another_image(scenes) -> None:
    noisy = plant(scenes, "random", 0.3, 0)
    for number in np.flatnonzero(noisy.wrong):
        text, image = noisy.split.texts[number], scenes.image_of[number]
        donors = {
            int(i) for i, each in zip(scenes.image_of, scenes.texts, strict=True) if each == text
        }
        assert donors - {int(image)}


def test_a_noun_error_shares_a_noun_with_the_caption(scenes) -> None:
    noisy = plant(scenes, "noun", 0.3, 0)
    for number in np.flatnonzero(noisy.wrong):
        before, after = nouns_of(scenes.texts[number]), nouns_of(noisy.split.texts[number])
        assert set(before) & set(after)


def test_a_word_error_keeps_most_of_the_caption(scenes) -> None:
    noisy = plant(scenes, "word", 0.3, 0)
    for number in np.flatnonzero(noisy.wrong):
        before, after = (Counter(words(s.texts[number])) for s in (scenes, noisy.split))
        assert 0 < sum((before - after).values()) <= 5


def test_one_caption_is_drawn_per_image(scenes) -> None:
    single = one_caption_each(scenes, 1)
    assert [len(captions) for captions in single.captions] == [1] * len(scenes)
    assert all(a[0] in b for a, b in zip(single.captions, scenes.captions, strict=True))
    assert single.texts != one_caption_each(scenes, 2).texts


@pytest.mark.parametrize(
    ("noise", "rate", "shares", "message"),
    [
        ("nouns", 0.3, {}, "did you mean 'noun'"),
        ("noun", 0.0, {}, "rate"),
        ("noun", 1.0, {}, "rate"),
        ("noun", 0.3, {"clean": 0.5, "labeled": 0.5}, "shares"),
    ],
)
def test_impossible_noise_is_refused(scenes, noise, rate, shares, message) -> None:
    with pytest.raises(ConfigError, match=message):
        plant(scenes, noise, rate, 0, **shares)


def test_a_single_image_has_no_donor(scenes) -> None:
    with pytest.raises(DataError, match="two images"):
        plant(scenes.select([0]), "random", 0.3, 0)


def test_captions_of_a_single_image_cannot_be_exchanged(scenes) -> None:
    alone = replace(scenes, captions=[scenes.captions[0], *([] for _ in range(len(scenes) - 1))])
    with pytest.raises(DataError, match="captions of at least two images, got those of 1"):
        plant(alone, "random", 0.3, seed=0, clean=0.0, labeled=0.0)
