"""Refilling masked captions and keeping the hardest: what is drawn, where, and what is scored."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from counterfoil.core.errors import ConfigError, TrainingError
from counterfoil.foils.generation import (
    MaskedCaptions,
    MaskTokens,
    hardest_foils,
    mask_captions,
    own_tokens,
    refill,
    sample_tokens,
    sampling_numbers,
)

WORDS = 12
TOKENS = MaskTokens(mask=1, ordinary=np.arange(4, WORDS))
CAPTIONS = torch.tensor([[2, 4, 5, 6, 3], [2, 7, 8, 3, 0]])
UNITS = [[(1,), (2, 3)], []]


def masked(versions: int = 6) -> MaskedCaptions:
    return mask_captions(CAPTIONS, UNITS, versions, TOKENS, [np.random.default_rng(0)] * 2)


def test_a_caption_without_units_stays_as_it_is_in_every_version() -> None:
    result = masked()
    assert result.ids[1].equal(CAPTIONS[1].expand(6, 5))
    assert (result.labels[1] == -1).all()
    command = result.labels[0] != -1
    assert command.any(1).all()
    assert result.labels[0][command].equal(CAPTIONS[0].expand(6, 5)[command])


def test_the_masks_and_samples_of_a_caption_do_not_depend_on_the_others() -> None:
    captions = torch.cat([CAPTIONS, torch.tensor([[2, 9, 10, 3, 0]])])
    units = [*UNITS, [(1,), (2,)]]

    def drawn(rows: list[int], width: int) -> tuple[list[list[int]], list[list[float]]]:
        rngs = [np.random.default_rng([7, row]) for row in rows]
        result = mask_captions(
            captions[rows, :width], [units[row] for row in rows], 6, TOKENS, rngs
        )
        numbers = sampling_numbers(result, 3, rngs)
        own = int((result.labels[-1] != -1).sum())
        return result.ids[-1, :, :4].tolist(), numbers[len(numbers) - own :].tolist()

    together, alone = drawn([0, 1, 2], 5), drawn([2], 4)
    assert together == alone
    assert len(alone[1]) >= 6


def test_only_ordinary_tokens_are_drawn_and_only_where_asked() -> None:
    versions = masked()

    def fill(rows, ids, command):
        assert ids.equal(versions.ids.flatten(0, 1))
        assert rows.tolist() == [0] * 6 + [1] * 6
        logits = torch.zeros(int(command.sum()), WORDS)
        logits[:, :4] = 1e4  # what must not be drawn is by far the likeliest
        return logits

    torch.manual_seed(0)
    result = refill(versions, fill, torch.from_numpy(TOKENS.ordinary), 50, 1.0)
    assert result.shape == (2, 6 * 50, 5)
    assert result[1].equal(CAPTIONS[1].expand(300, 5))
    command = (versions.labels[0] != -1).repeat_interleave(50, 0)
    assert result[0][~command].equal(CAPTIONS[0].expand(300, 5)[~command])
    assert set(result[0][command].tolist()) == set(TOKENS.ordinary.tolist())


def test_each_asked_token_is_drawn_from_its_own_logits_tempered() -> None:
    versions = MaskedCaptions(
        torch.tensor([[[2, 1, 1, 6, 3]], [[2, 7, 1, 3, 0]]]),
        torch.tensor([[[-1, 4, 5, -1, -1]], [[-1, -1, 8, -1, -1]]]),
    )
    wanted = [9, 10, 11]
    logits = torch.zeros(3, WORDS)
    logits[range(3), wanted] = 2.0
    torch.manual_seed(0)
    ordinary = torch.from_numpy(TOKENS.ordinary)
    result = refill(versions, lambda *_: logits, ordinary, 4000, 2.0)
    share = float(np.e / (np.e + len(ordinary) - 1))
    drawn = [result[0, :, 1], result[0, :, 2], result[1, :, 2]]
    for tokens, token in zip(drawn, wanted, strict=True):
        assert float((tokens == token).float().mean()) == pytest.approx(share, abs=0.03)
    with pytest.raises(ConfigError, match="temperature"):
        refill(versions, lambda *_: logits, ordinary, 1, 0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error_and_not_a_word(value) -> None:
    versions = masked()
    logits = torch.zeros(int((versions.labels != -1).sum()), WORDS)
    logits[1, 5] = value
    with pytest.raises(TrainingError, match="not finite"):
        refill(versions, lambda *_: logits, torch.from_numpy(TOKENS.ordinary), 3, 1.0)


def test_a_token_of_chance_zero_is_never_drawn() -> None:
    chances = torch.tensor([[0.0, 0.4, 0.0, 0.6, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]])
    just_below = torch.tensor(1 - 2**-54, dtype=torch.float64).float()  # rounds to 1
    numbers = torch.stack([torch.zeros(()), torch.tensor(0.4), just_below]).expand(2, 3)
    assert sample_tokens(chances, numbers).tolist() == [[1, 3, 3], [2, 2, 2]]


def test_false_negatives_copies_and_duplicates_are_neither_scored_nor_kept() -> None:
    versions = masked(versions=2)
    copy, true, new, other = [2, 4, 5, 6, 3], [2, 7, 5, 6, 3], [2, 9, 5, 6, 3], [2, 8, 5, 6, 3]
    candidates = torch.tensor(
        [[copy, new, true, new, other, new], [[2, 7, 8, 3, 0]] * 6]
    )  # three samples of each version
    own = own_tokens([[2, 4, 5, 6, 3, 7, 7], [2, 7, 8, 3]], CAPTIONS.device)
    assert own[0].tolist() == [2, 3, 4, 5, 6, 7]
    command = []

    def score(rows, ids):
        command.extend(zip(rows.tolist(), map(tuple, ids.tolist()), strict=True))
        return ids[:, 1].float()

    result = hardest_foils(CAPTIONS, versions, candidates, own, score, most=3)
    assert command == [(0, tuple(new)), (0, tuple(other))]
    assert result.real.tolist() == [[True, True, False], [False] * 3]
    assert result.ids[0, :2].tolist() == [new, other]
    assert result.scores[0, :2].tolist() == [9.0, 8.0]
    assert result.labels[0, 0].equal(versions.labels[0, 0])
    assert result.labels[0, 1].equal(versions.labels[0, 1])
