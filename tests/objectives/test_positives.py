"""What a caller may give as positives, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from counterfoil.adapters.in_batch import InBatchLoss
from counterfoil.core.errors import ArgumentError, ConfigError
from counterfoil.objectives import Context, HardestNegative, create_objective, objectives
from counterfoil.objectives.positives import read_positives

SCORES_ALONE = [name for name in objectives if not objectives[name].requires]
SQUARE, WIDE = torch.zeros(3, 3), torch.zeros(2, 3)
BLOCKS = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1]]).bool()


@pytest.mark.parametrize(
    "given",
    [
        {"positives": BLOCKS},
        {"positives": BLOCKS.numpy()},
        {"positives": BLOCKS.tolist()},
        {"positives": [("a", 1), ("a", 1), ("b", 1)]},
        {"positives": torch.tensor([4, 4, 9])},
        {"positives": [4, 4, 9]},
        {"positives": [torch.tensor(4), torch.tensor(4), torch.tensor(9)]},
        {"image_ids": np.array([4, 4, 9])},
        {"image_ids": [torch.tensor(4), torch.tensor(4), torch.tensor(9)]},
        {"image_ids": [4, 4, 9], "text_ids": list(torch.tensor([4, 4, 9]))},
        {"image_ids": ["a.jpg", "a.jpg", "b.jpg"]},
        {"image_ids": torch.tensor([4, 4, 9]), "text_ids": [4, 4, 9]},
    ],
)
def test_ids_and_matrices_say_the_same(given) -> None:
    assert torch.equal(read_positives(SQUARE, **given), BLOCKS)


def test_without_positives_pairs_are_on_the_diagonal() -> None:
    assert torch.equal(read_positives(SQUARE), torch.eye(3).bool())


def test_texts_name_the_image_that_they_belong_to() -> None:
    result = read_positives(WIDE, image_ids=["a", "b"], text_ids=["b", "a", "b"])
    assert result.tolist() == [[False, True, False], [True, False, True]]


@pytest.mark.parametrize("rows", [tuple, list])
@pytest.mark.parametrize("matrix", [tuple, list])
def test_booleans_in_tuples_or_lists_are_a_matrix_and_other_tuples_are_ids(matrix, rows) -> None:
    given = [[False, True, False], [True, False, True], [False, False, True]]
    assert read_positives(SQUARE, matrix(rows(row) for row in given)).tolist() == given
    ids = ((1, "a"), (2, "b"), (1, "a"))
    assert read_positives(SQUARE, ids).tolist() == [[a == b for b in ids] for a in ids]


def test_a_report_names_the_protected_pairs_also_of_an_objective_by_itself() -> None:
    protected = torch.tensor([[False, True, False], [False] * 3, [False] * 3])
    for objective in (HardestNegative(), create_objective("hardest")):
        assert torch.equal(objective.report(SQUARE, protected=protected).protected, protected)
        assert objective.report(SQUARE).protected is None


@pytest.mark.parametrize(
    ("scores", "given", "message"),
    [
        ([[1.0]], {}, "expected a tensor .* got list"),
        (torch.zeros(3), {}, r"expected a matrix .* got shape \[3\]"),
        (torch.zeros(0, 3), {}, r"got shape \[0, 3\]"),
        (torch.zeros(3, 3).long(), {}, "expected floating-point numbers, got torch.int64"),
        (WIDE, {}, r"expected a square matrix .* got shape \[2, 3\]"),
        (WIDE, {"image_ids": [1, 2]}, "with one id per pair, expected a square"),
        (SQUARE, {"positives": torch.zeros(3, 3).bool()}, "at least one positive pair"),
        (SQUARE, {"positives": torch.eye(3).long()}, r"boolean matrix, got torch.int64; .*\.bool"),
        (SQUARE, {"positives": torch.eye(4).bool()}, r"shape of the scores \[3, 3\], got \[4, 4\]"),
        (SQUARE, {"positives": [[True], [True, False]]}, "expected a boolean matrix .* got list"),
        (SQUARE, {"image_ids": 4}, "one id per image, got int"),
        (SQUARE, {"image_ids": (x for x in "abc")}, "one id per image, got generator"),
        (SQUARE, {"image_ids": "abc"}, "one id per image, got str"),
        (SQUARE, {"image_ids": [{}, {}, {}]}, "hashable ids"),
        (
            SQUARE,
            {"positives": torch.tensor([1, 2])},
            r"expected 3, one per image, got shape \[2\]",
        ),
        (SQUARE, {"positives": torch.ones(3).bool()}, "expected numbers, got booleans"),
        (SQUARE, {"positives": [True, True, False]}, "expected numbers, got booleans"),
        (SQUARE, {"image_ids": np.ones(3, dtype=bool)}, "expected numbers, got booleans"),
        (SQUARE, {"image_ids": [torch.zeros(2)] * 3}, r"one number per id, got a tensor \[2\]"),
        (SQUARE, {"image_ids": [1, 2]}, r"expected 3, one per image, got shape \[2\]"),
        (WIDE, {"image_ids": [1, 2], "text_ids": [1, 2]}, "expected 3, one per text"),
        (WIDE, {"image_ids": [1, 2], "text_ids": [3, 3, 4]}, "no id in common"),
        (SQUARE, {"positives": torch.tensor([1.0, 2.0, torch.nan])}, "an id is NaN"),
        (SQUARE, {"image_ids": torch.tensor([1.0, torch.nan, 2.0])}, "an id is NaN"),
        (SQUARE, {"image_ids": np.array([1.0, np.nan, 2.0])}, "an id is NaN"),
        (SQUARE, {"image_ids": ["a", float("nan"), "b"]}, "an id is NaN"),
        (SQUARE, {"image_ids": [1, 2, 3], "text_ids": [1, 2, float("nan")]}, "an id is NaN"),
        (SQUARE, {"text_ids": [1, 2, 3]}, "pass image_ids, too"),
        (SQUARE, {"positives": BLOCKS, "image_ids": [1, 1, 2]}, "not both"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_reason(scores, given, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        read_positives(scores, **given)


def test_errors_of_arguments_are_value_errors_too() -> None:
    with pytest.raises(ValueError, match="square"):
        read_positives(WIDE)


def test_protected_pairs_may_be_lists_or_arrays() -> None:
    scores, loss = torch.rand(3, 3), create_objective({"triplet": {"margin": 3.0}})
    mask = torch.tensor([[0, 1, 0], [0, 0, 0], [1, 0, 0]]).bool()
    expected = loss(scores, protected=mask)
    assert expected < loss(scores)
    assert loss(scores, protected=mask.tolist()) == expected
    assert loss(scores, protected=mask.numpy()) == expected
    with pytest.raises(
        ArgumentError, match=r"protected: expected the shape .* \[3, 3\], got \[1, 3\]"
    ):
        loss(scores, protected=[[True, False, False]])


@pytest.mark.parametrize("name", SCORES_ALONE)
def test_square_scores_may_have_their_pairs_anywhere(name) -> None:
    """Four images, two of them without a text: ids and the matrix they mean give one loss."""
    scores = torch.rand(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids, columns = [1, 2, 3, 4], [1, 1, 2, 2]
    loss = create_objective(name)
    torch.manual_seed(0)
    by_ids = loss(scores, image_ids=ids, text_ids=columns)
    assert by_ids.isfinite()
    positives = torch.tensor(ids)[:, None] == torch.tensor(columns)
    torch.manual_seed(0)
    assert loss(scores, positives) == by_ids


def test_pairs_off_the_diagonal_are_the_anchors() -> None:
    scores = torch.tensor([[0.1, 0.9], [0.8, 0.3]])
    loss = create_objective({"triplet": {"margin": 0.2}})
    crossed = loss(scores, image_ids=["a", "b"], text_ids=["b", "a"])
    assert crossed == loss(scores.flip(1)) == 0
    assert loss(scores) > 0


@pytest.mark.parametrize("spec", [None, ["hardest"], 3])
def test_an_objective_has_a_name_or_a_table(spec) -> None:
    with pytest.raises(ConfigError, match="objective: expected a name such as 'hardest'"):
        create_objective(spec)
    with pytest.raises(ConfigError, match="objective: expected a name such as 'hardest'"):
        InBatchLoss(spec)


@pytest.mark.parametrize("value", [0.5, torch.nan, torch.inf])
def test_a_loss_without_active_terms_still_has_a_gradient(value) -> None:
    scores = torch.full((3, 3), value, requires_grad=True)
    idle = create_objective({"triplet": {"epochs": [1, None]}})
    loss = idle.compute(scores, torch.eye(3).bool(), Context(epoch=0)).loss
    assert loss == 0
    loss.backward()
    assert torch.equal(scores.grad, torch.zeros(3, 3))
