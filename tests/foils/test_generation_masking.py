"""Masked versions: which tokens are chosen, how often, and what becomes of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.core.errors import ConfigError
from counterfoil.data.text.tokenizers import HuggingFaceText, WordText, words_of_tokens
from counterfoil.data.text.vocabulary import SPECIALS, Vocabulary
from counterfoil.data.text.words import caption_words
from counterfoil.foils.generation import (
    MaskTokens,
    expected_share,
    graph_units,
    mask_versions,
    sentence_rate,
    token_units,
    unit_chances,
)
from counterfoil.foils.scene_graph import RuleExtractor, SceneGraph, Unit
from tests.data.text.test_text import save_tiny_tokenizer

TOKENS = MaskTokens(mask=4, ordinary=np.arange(5, 1000))
CAPTION = "a small dog and a doggy near the house"
UNIT = st.sets(st.integers(1, 8), min_size=1, max_size=4).map(lambda s: tuple(sorted(s)))
UNITS = st.lists(UNIT, min_size=1, max_size=6)


@pytest.fixture(scope="module")
def word_pieces(tmp_path_factory) -> HuggingFaceText:
    folder = save_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return HuggingFaceText.from_pretrained(str(folder))


def ids(length: int = 10) -> list[int]:
    return list(range(100, 100 + length))


@given(UNITS, st.integers(1, 9), st.integers(0, 10**6))
def test_only_whole_units_are_chosen_and_always_one(units, versions, seed) -> None:
    masked = mask_versions(ids(), units, versions, TOKENS, np.random.default_rng(seed))
    assert masked.ids.shape == masked.labels.shape == (versions, 10)
    for row, labels in zip(masked.ids, masked.labels, strict=True):
        chosen = {place for place, label in enumerate(labels) if label != -1}
        assert chosen
        whole = [set(unit) for unit in units if set(unit) <= chosen]
        assert set().union(*whole) == chosen
        for place, true in enumerate(ids()):
            assert labels[place] == (true if place in chosen else -1)
            if place in chosen:
                assert row[place] == true or TOKENS.mask <= row[place] < 1000
            else:
                assert row[place] == true


@given(UNITS, st.integers(0, 10**6))
def test_the_same_generator_gives_the_same_versions(units, seed) -> None:
    one, other = (mask_versions(ids(), units, 3, TOKENS, np.random.default_rng(seed)) for _ in "ab")
    assert np.array_equal(one.ids, other.ids)
    assert np.array_equal(one.labels, other.labels)


@given(UNITS, st.floats(0.01, 1.0))
def test_a_unit_has_the_mean_chance_of_its_places(units, rate) -> None:
    chances = unit_chances(units, rate)
    for chance, unit in zip(chances, units, strict=True):
        shares = [rate / sum(place in other for other in units) for place in unit]
        assert chance == pytest.approx(sum(shares) / len(shares))


@pytest.mark.parametrize(
    "units",
    [
        [(place,) for place in range(1, 9)],
        [(1, 2), (2, 3), (3,), (5, 6, 7)],
        [(1, 2, 3, 4)],
        [(1,), (1,), (1, 2)],
    ],
)
def test_each_token_is_chosen_as_often_as_its_units_allow(units) -> None:
    versions = 40_000
    masked = mask_versions(ids(), units, versions, TOKENS, np.random.default_rng(0))
    chances = unit_chances(units)
    nothing = math.prod(1 - chance for chance in chances)
    for place in range(10):
        mine = [chance for chance, unit in zip(chances, units, strict=True) if place in unit]
        expected = 1 - math.prod(1 - chance for chance in mine)
        expected += nothing * len(mine) / len(units)
        share = np.mean(masked.labels[:, place] != -1)
        assert share == pytest.approx(expected, abs=5 * math.sqrt(0.25 / versions))


def test_fifteen_in_a_hundred_tokens_are_chosen_and_eight_in_ten_of_them_masked() -> None:
    true = np.arange(100, 160)
    units = [(place, place + 1) for place in range(0, 60, 2)]
    masked = mask_versions(true, units, 5_000, TOKENS, np.random.default_rng(1))
    chosen = masked.labels != -1
    assert chosen.mean() == pytest.approx(0.15, abs=0.004)
    given_true = np.broadcast_to(true, chosen.shape)[chosen]
    written = masked.ids[chosen]
    assert np.mean(written == TOKENS.mask) == pytest.approx(0.8, abs=0.01)
    # one exchange in a thousand draws the true token again
    assert np.mean(written == given_true) == pytest.approx(0.1, abs=0.01)
    others = written[(written != TOKENS.mask) & (written != given_true)]
    assert len(others) / len(written) == pytest.approx(0.1, abs=0.01)
    assert set(others) <= set(TOKENS.ordinary)
    assert len(set(others)) > 900


# Units over sentences of so many words: few, many, overlapping, of several words, one that is all.
SENTENCES = [
    ([(1,), (2,)], 12),
    ([(place,) for place in range(0, 20, 2)], 20),
    ([(0, 1), (1, 2), (2,), (5, 6, 7)], 14),
    ([(0, 1, 2, 3)], 30),
    ([(3,), (3, 4), (3, 4, 5), (8,)], 16),
]


@pytest.mark.parametrize(("units", "words"), SENTENCES)
@pytest.mark.parametrize("rate", [0.0, 0.15, 0.6])
def test_the_expected_share_is_what_drawing_finds(units, words, rate) -> None:
    masked = mask_versions(np.arange(words), units, 40_000, TOKENS, np.random.default_rng(3), rate)
    share = (masked.labels != -1).mean()
    assert share == pytest.approx(expected_share(units, words, rate), abs=0.004)


@pytest.mark.parametrize(("units", "words"), SENTENCES)
def test_a_graphs_masks_reach_fifteen_percent_of_the_sentence_where_units_allow_it(
    units, words
) -> None:
    rate = sentence_rate(units, words)
    least, most = expected_share(units, words, 0.0), len({p for u in units for p in u}) / words
    share = expected_share(units, words, rate)
    assert share == pytest.approx(min(max(0.15, least), most), abs=1e-6)


def test_fifteen_percent_of_graph_words_are_fewer_of_the_sentence() -> None:
    """Why masking as the public code does it stays below the paper's 15 % of all tokens."""
    units = [(place,) for place in range(0, 20, 2)]  # every second word is in a unit
    drawn_anyway = 0.85 ** len(units) / 20  # one unit is masked even if none was chosen
    assert expected_share(units, 20) == pytest.approx(0.15 / 2 + drawn_anyway)


def test_words_and_their_tokens_are_masked_together(word_pieces) -> None:
    graph = RuleExtractor().extract(CAPTION)
    assert [unit.positions for unit in graph.units()] == [(1,), (2,), (5,), (6,), (8,)]
    plain = WordText(Vocabulary.build([CAPTION], min_count=1))
    words = caption_words(CAPTION)
    assert graph_units(graph, words_of_tokens(plain, CAPTION, words)) == [
        (2,), (3,), (6,), (7,), (9,),
    ]  # fmt: skip
    pieces = words_of_tokens(word_pieces, CAPTION, words)
    assert graph_units(graph, pieces) == [(2,), (3,), (6, 7), (8,), (10,)]
    assert token_units(pieces) == [(place,) for place in range(1, 11)]


def test_a_caption_without_units_is_masked_token_by_token() -> None:
    assert graph_units(SceneGraph(), [None, 0, 1, None]) == [(1,), (2,)]


def test_units_that_the_tokenizer_cut_off_are_left_out() -> None:
    graph = SceneGraph.of([Unit((0,), "object"), Unit((1, 2), "relation"), Unit((3,), "object")])
    assert graph_units(graph, [None, 0, 1, None]) == [(1,), (2,)]


def test_nothing_to_mask_gives_no_version() -> None:
    masked = mask_versions([1, 2], token_units([None, None]), 3, TOKENS, np.random.default_rng(0))
    assert masked.ids.shape == masked.labels.shape == (0, 2)


def test_special_tokens_are_never_drawn(word_pieces) -> None:
    text = WordText(Vocabulary(["a", *SPECIALS[:4], "dog"]))  # the mask comes last, as in SCAN's
    tokens = MaskTokens.of(text)
    assert (tokens.mask, tokens.ordinary.tolist()) == (6, [0, 5])
    tokens = MaskTokens.of(word_pieces)
    assert tokens.mask == 4
    assert tokens.ordinary.tolist() == list(range(5, len(word_pieces)))


def test_a_tokenizer_without_a_mask_is_refused(tmp_path) -> None:
    text = HuggingFaceText.from_pretrained(str(save_tiny_tokenizer(tmp_path)))
    text.tokenizer.mask_token = None
    with pytest.raises(ConfigError, match="mask token"):
        MaskTokens.of(text)
