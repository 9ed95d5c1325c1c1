"""Pairs as packed sequences: what a cross-encoder that is asked reads, and in which order."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from counterfoil.encoders import Encoded
from counterfoil.matchers import cross_encoder, cross_pairs
from counterfoil.matchers.cross_encoder import CrossEncoder
from counterfoil.matchers.cross_pairs import PairTokens, chunks
from counterfoil.scoring.engine import score_matrix
from tests.matchers.test_conformance import assert_same, batch
from tests.matchers.test_cross_encoder import make

ROUGH = 0.03
"""Of the largest score: what bfloat16, which knows 8 bits of a number, may be off by."""


def with_holes(items: int, longest: int, seed: int) -> Encoded:
    """Fragments that are real here and there, and some items with none at all."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(items, longest, generator=generator) < 0.6
    mask[0] = False
    return Encoded(torch.randn(items, longest, 4, generator=generator) * mask[..., None], mask)


def rounded(encoded: Encoded) -> Encoded:
    return replace(encoded, fragments=encoded.fragments.bfloat16())


@given(seed=st.integers(0, 999), equal=st.booleans())
def test_a_sequence_is_the_words_of_a_text_and_the_regions_of_an_image(seed, equal) -> None:
    images, texts = with_holes(3, 5, seed), with_holes(4, 6, seed + 1)
    pairs = PairTokens.of(images, texts)
    rows, columns = torch.arange(3).repeat_interleave(4), torch.arange(4).repeat(3)
    lengths = pairs.lengths(rows, columns)
    length = 0
    if equal:
        length = int(lengths.mode().values)
        rows, columns = rows[lengths == length], columns[lengths == length]
    tokens, packing = pairs.sequences(rows, columns, length)
    parts = tokens.split(pairs.lengths(rows, columns).tolist())
    for k, (row, column) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
        words = texts.fragments[column]
        there = texts.mask[column].clone()
        there[0] |= ~there.any()  # a text without tokens has one of zeros
        expected = torch.cat([words[there], images.fragments[row][images.mask[row]]])
        assert torch.equal(parts[k], expected)
        assert torch.equal(tokens[packing.starts[k]], expected[0])
    assert (packing.mask is None) == (len({len(part) for part in parts}) == 1)


@given(
    lengths=st.lists(st.integers(1, 9), max_size=40),
    most=st.integers(1, 60),
    most_sequences=st.integers(1, 12),
    enough=st.integers(1, 80),
)
def test_chunks_hold_every_sequence_once_and_no_more_than_they_may(
    lengths, most, most_sequences, enough
) -> None:
    given_lengths = torch.tensor(lengths, dtype=torch.long)
    with mock.patch.object(cross_pairs, "MIN_GROUP_TOKENS", enough):
        result = chunks(given_lengths, most, most_sequences)
    taken = [int(k) for chunk in result for k in chunk.index]
    assert sorted(taken) == list(range(len(lengths)))
    for chunk in result:
        mine = given_lengths[chunk.index]
        assert len(mine) <= most_sequences
        assert len(mine) == 1 or len(mine) * int(mine.max()) <= most
        assert not chunk.length or set(mine.tolist()) == {chunk.length}
    for length in set(lengths):
        if lengths.count(length) * length >= enough:  # these are never padded
            assert all(
                chunk.length == length for chunk in result if length in given_lengths[chunk.index]
            )


@pytest.mark.parametrize("enough", [1, 40, 1 << 14])
@pytest.mark.parametrize("most", [1, 50, 1 << 17])
def test_asked_scores_are_those_with_gradients(enough, most) -> None:
    images, texts = batch(21)
    matcher = make()
    expected = matcher(images, texts).detach()
    pairs = torch.tensor([0, 3, 2, 0, 1]), torch.arange(5)
    with (
        torch.inference_mode(),
        mock.patch.object(cross_pairs, "MIN_GROUP_TOKENS", enough),
        mock.patch.object(cross_encoder, "MAX_TOKENS", most),
    ):
        assert_same(matcher(images, texts), expected)
        assert_same(matcher.paired(images[pairs[0]], texts[pairs[1]]), expected[pairs])


def test_nothing_is_scored_where_a_side_is_empty() -> None:
    images, texts = batch(22)
    with torch.inference_mode():
        assert make()(images[:0], texts).shape == (0, 5)
        assert make()(images, texts[:0]).shape == (4, 0)


def test_sequences_of_one_length_are_attended_without_a_mask() -> None:
    images, texts = batch(23)
    masks, real = [], F.scaled_dot_product_attention

    def attend(q, k, v, mask, *rest):
        masks.append(mask)
        return real(q, k, v, mask, *rest)

    with torch.inference_mode(), mock.patch.object(F, "scaled_dot_product_attention", attend):
        with mock.patch.object(cross_pairs, "MIN_GROUP_TOKENS", 1):
            make()(images, texts)
        assert masks == [None] * len(masks)
        assert len(masks) > 2
        make()(images, texts)
    assert masks[-1] is not None


def test_half_precision_is_that_of_the_fragments_or_of_the_run() -> None:
    images, texts = batch(24)
    matcher = make()
    with torch.inference_mode():
        expected = matcher(images, texts)
        rough = matcher(rounded(images), rounded(texts))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(matcher(images, texts), rough)
    assert rough.dtype == torch.float32
    assert not torch.equal(rough, expected)
    assert_same(rough, expected, ROUGH)
    assert all(weight.dtype == torch.float32 for weight in matcher.parameters())


def test_weights_are_not_touched_while_pairs_are_scored_in_half_precision() -> None:
    """Another thread may be using them."""
    images, texts = (rounded(side) for side in batch(27))
    matcher = make()
    layer = matcher.transformer.layers[0]
    before, seen = layer.widen.weight, []

    def look(module, _) -> None:
        seen.append((module.widen.weight.dtype, layer.widen.weight is before))

    layer.register_forward_pre_hook(look)
    with torch.inference_mode():
        matcher(images, texts)
    assert set(seen) == {(torch.bfloat16, True)}


def test_weights_that_changed_are_read_anew() -> None:
    images, texts = (rounded(side) for side in batch(25))
    matcher = make()
    with torch.inference_mode():
        before = matcher(images, texts)
    with torch.no_grad():
        matcher.transformer.layers[0].widen.weight.mul_(-1.0)
    with torch.inference_mode():
        assert (matcher(images, texts) - before).abs().max() > 0.1


def test_all_pairs_are_scored_in_half_precision_where_that_is_fast() -> None:
    images, texts = batch(26)
    matcher = make()
    full = score_matrix(matcher, images, texts)
    assert not matcher.rounds(torch.device("cpu"))
    with mock.patch.object(CrossEncoder, "rounds", return_value=True):
        rough = score_matrix(matcher, images, texts)
    with torch.inference_mode():
        assert torch.equal(rough, matcher(rounded(images), rounded(texts)))
    assert_same(rough, full, ROUGH)
