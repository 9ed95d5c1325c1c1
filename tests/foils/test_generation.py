"""Selection of synthetic captions, against loops that spell it out and the public code."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.core.errors import ConfigError
from counterfoil.foils.generation import NONE, is_best_copy, is_new, penalized_scores, select_foils
from tests.conftest import load_fixture

WIDTH = 3
ROW = st.lists(st.integers(0, 4), min_size=WIDTH, max_size=WIDTH)


@st.composite
def cases(draw):
    """A batch with few tokens and few scores, so that copies, duplicates and ties are common."""
    batch, count = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    rows = draw(
        st.lists(st.lists(ROW, min_size=count, max_size=count), min_size=batch, max_size=batch)
    )
    captions = draw(st.lists(ROW, min_size=batch, max_size=batch))
    score = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=count, max_size=count)
    scores = draw(st.lists(score, min_size=batch, max_size=batch))
    own = draw(st.lists(st.sets(st.integers(0, 4)), min_size=batch, max_size=batch))
    own = [mine | set(caption) for mine, caption in zip(own, captions, strict=True)]
    widest = max(len(mine) for mine in own)
    padded = [[*mine, *[NONE] * (widest - len(mine))] for mine in own]
    return (
        torch.tensor(rows), torch.tensor(captions), torch.tensor(scores), torch.tensor(padded)
    )  # fmt: skip


def by_loop(rows, caption, scores, own, most) -> list[int]:
    """Best first; each sentence once; at least one replaced token must be new to the image."""
    chosen: list[int] = []
    for index in sorted(range(len(rows)), key=lambda i: (-scores[i], i)):
        replaced = [
            token for token, true in zip(rows[index], caption, strict=True) if token != true
        ]
        is_false_negative = all(token in own for token in replaced)
        if not is_false_negative and rows[index] not in [rows[other] for other in chosen]:
            chosen.append(index)
    return chosen[:most]


@given(cases(), st.integers(1, 9))
def test_the_selection_is_what_a_loop_over_candidates_selects(case, most) -> None:
    selected = select_foils(*case, most)
    assert selected.shape == (len(case[0]), most)
    for number, row in enumerate(selected.tolist()):
        one = [part[number] for part in case]
        expected = by_loop(*(part.tolist() for part in one), most)
        assert row == [*expected, *[NONE] * (most - len(expected))]


def test_a_sentence_is_kept_if_one_of_its_new_tokens_is_new_to_the_image() -> None:
    caption = torch.tensor([[1, 2, 3]])
    candidates = torch.tensor([[[1, 5, 3], [1, 9, 3], [5, 9, 3], [1, 2, 3], [2, 1, 3]]])
    own = torch.tensor([[1, 2, 3, 5]])
    assert is_new(candidates, caption, own).tolist() == [[False, True, True, False, False]]


def test_of_equal_sentences_the_best_stays() -> None:
    candidates = torch.tensor([[[1], [2], [1], [1]], [[1], [1], [1], [2]]])
    scores = torch.tensor([[0.1, 0.2, 0.7, 0.7], [3.0, 1.0, 2.0, 0.0]])
    assert is_best_copy(candidates, scores).tolist() == [
        [False, True, True, False],
        [True, False, False, True],
    ]


def test_an_image_without_tokens_of_its_own_keeps_all_but_copies() -> None:
    candidates = torch.tensor([[[1, 2], [1, 3], [1, 2]]])
    own = torch.empty(1, 0, dtype=torch.long)
    chosen = select_foils(candidates, torch.tensor([[1, 2]]), torch.zeros(1, 3), own, 3)
    assert chosen.tolist() == [[1, NONE, NONE]]


@given(cases())
def test_penalties_fall_on_copies_and_on_what_comes_again(case) -> None:
    candidates, captions, scores, _ = case
    lowered = penalized_scores(candidates, captions, scores, identical=3, duplicated=2)
    for b, rows in enumerate(candidates.tolist()):
        for i, row in enumerate(rows):
            penalty = 3 * (row == captions[b].tolist()) + 2 * (row in rows[i + 1 :])
            assert lowered[b, i] == scores[b, i] - penalty


def test_the_reference_form_selects_as_the_public_code_does() -> None:
    fixture = load_fixture("tags-filter")
    true = fixture["in.gt_input_ids"]
    # the first row there is the caption itself, which the public code always keeps in front
    candidates, scores = (
        fixture["in.candidate_ids"][None, 1:],
        fixture["in.rank_scores"][None, 1:, 0],
    )
    most = fixture.hyper["hard_size"]
    nothing = torch.full((1, 1), NONE)
    selected = select_foils(candidates, true, scores, nothing, most, form="reference")
    assert (selected[0] + 1).tolist() == fixture["out.clean.selected_index"][1:].tolist()
    assert torch.equal(candidates[0, selected[0]], fixture["out.clean.selected_ids"][1:])
    every = fixture["in.candidate_ids"][None], true, fixture["in.rank_scores"][None, :, 0]
    names = ("penalty_identical_to_truth", "penalty_duplicated_later")
    penalties = (fixture.hyper[name] for name in names)
    lowered = penalized_scores(*every)
    assert torch.equal(lowered, penalized_scores(*every, *penalties))
    untouched = lowered == every[2]
    assert int(untouched.sum()) == int(fixture["out.clean.effect_num"])
    raw = penalized_scores(candidates, true, scores, identical=0, duplicated=0)
    order = raw.argsort(descending=True, stable=True)[0, :most]
    assert (order + 1).tolist() == fixture["out.raw.selected_index"][1:].tolist()


def test_the_reference_form_lets_copies_through_and_the_paper_form_does_not() -> None:
    fixture = load_fixture("tags-filter")
    candidates, true = fixture["in.candidate_ids"][1:], fixture["in.gt_input_ids"][0]
    scores = fixture["in.rank_scores"][1:, 0] * 10  # soft penalties fade beside large scores
    case = candidates[None], true[None], scores[None], true[None]
    soft = select_foils(*case, 5, form="reference")[0]
    hard = select_foils(*case, 5)[0]
    assert any(torch.equal(candidates[i], true) for i in soft)
    assert not any(torch.equal(candidates[i], true) for i in hard)
    assert len({tuple(candidates[i].tolist()) for i in hard}) == len(hard) == 5


def test_what_cannot_be_meant_is_refused() -> None:
    case = (torch.zeros(1, 1, 2), torch.zeros(1, 2), torch.zeros(1, 1), torch.zeros(1, 1))
    with pytest.raises(ConfigError, match="at least 1"):
        select_foils(*case, 0)
    with pytest.raises(ConfigError, match="known: paper, reference"):
        select_foils(*case, 1, form="soft")
