"""What a caller may give as positives, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from counterfoil.core.errors import ArgumentError
from counterfoil.objectives.positives import read_positives

SQUARE, WIDE = torch.zeros(3, 3), torch.zeros(2, 3)
BLOCKS = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1]]).bool()


@pytest.mark.parametrize(
    "given",
    [
        {"positives": BLOCKS},
        {"positives": BLOCKS.numpy()},
        {"positives": torch.tensor([4, 4, 9])},
        {"positives": [4, 4, 9]},
        {"image_ids": np.array([4, 4, 9])},
        {"image_ids": ["a.jpg", "a.jpg", "b.jpg"]},
        {"image_ids": torch.tensor([4, 4, 9]), "text_ids": [4, 4, 9]},
    ],
)
def test_ids_and_matrices_say_the_same(given) -> None:
    assert torch.equal(read_positives(SQUARE, **given), BLOCKS)


def test_without_positives_pairs_are_on_the_diagonal() -> None:
    assert torch.equal(read_positives(SQUARE), torch.eye(3).bool())


def test_texts_name_the_image_that_they_belong_to() -> None:
    found = read_positives(WIDE, image_ids=["a", "b"], text_ids=["b", "a", "b"])
    assert found.tolist() == [[False, True, False], [True, False, True]]


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
        (SQUARE, {"positives": ~torch.eye(3).bool()}, r"\[0, 0\] is not positive"),
        (
            SQUARE,
            {"positives": torch.tensor([1, 2])},
            r"expected 3, one per image, got shape \[2\]",
        ),
        (SQUARE, {"positives": torch.ones(3).bool()}, "expected numbers, got booleans"),
        (SQUARE, {"image_ids": [1, 2]}, r"expected 3, one per image, got shape \[2\]"),
        (WIDE, {"image_ids": [1, 2], "text_ids": [1, 2]}, "expected 3, one per text"),
        (WIDE, {"image_ids": [1, 2], "text_ids": [3, 3, 4]}, "no id in common"),
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
