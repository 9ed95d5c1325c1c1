"""Objectives over two batches of vectors: which are accepted, and what counts as equal."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from counterfoil.adapters.in_batch import InBatchLoss, row_ids
from counterfoil.core.errors import ArgumentError, ConfigError
from counterfoil.objectives import Context, create_objective, objectives

SCORES_ALONE = [name for name in objectives if not objectives[name].requires]
SCORES_ALONE = [name for name in SCORES_ALONE if not create_objective(name).held_out]


def vectors(seed: int, count: int = 6, dim: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, dim, generator=generator), dim=-1)


@pytest.mark.parametrize("name", SCORES_ALONE)
def test_every_objective_of_scores_is_that_of_our_own_loop(name) -> None:
    images, texts = vectors(0).requires_grad_(), vectors(1).requires_grad_()
    image_ids = torch.tensor([0, 1, 2, 2, 4, 5])
    text_ids = torch.tensor([0, 1, 2, 3, 1, 5])  # captions 1 and 4 are identical
    torch.manual_seed(0)
    mine = InBatchLoss(name)
    result = mine.of_scores(images @ texts.T, image_ids, text_ids)
    gradients = torch.autograd.grad(result, [images, texts])
    torch.manual_seed(0)
    positives = image_ids[:, None] == image_ids
    protected = (text_ids[:, None] == text_ids) & ~positives
    context = Context(protected=protected, logging=False)
    expected = create_objective(name).compute(images @ texts.T, positives, context).loss
    assert torch.allclose(result, expected, atol=1e-6)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, [images, texts]), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_duplicates_are_no_negatives() -> None:
    """Pairs 0 and 1 show one image, or have one caption: without others nothing is wrong."""
    images, texts = vectors(0, 2), vectors(1, 2)
    scores = images @ texts.T
    same, apart = torch.tensor([7, 7]), torch.tensor([0, 1])
    loss = InBatchLoss({"triplet": {"margin": 3.0}})
    assert loss.of_scores(scores, apart, apart) > 0
    assert loss.of_scores(scores, same, apart) == 0
    assert loss.of_scores(scores, apart, same) == 0
    counted = InBatchLoss({"triplet": {"margin": 3.0}, "protect": {"identical": False}})
    assert counted.of_scores(scores, apart, same) > 0


def test_a_text_of_another_pair_of_the_image_is_no_negative() -> None:
    """Image 7 has texts 0 and 1 in two pairs; image 8 has text 1, too."""
    scores = torch.zeros(3, 3, requires_grad=True)
    loss = InBatchLoss({"triplet": {"margin": 0.2}})
    loss.of_scores(scores, [7, 7, 8], [0, 1, 1]).backward()
    negatives = scores.grad > 0
    assert negatives.tolist() == [[False] * 3, [False] * 3, [True, False, False]]


def test_an_objective_that_reads_more_than_scores_is_refused() -> None:
    needy = next(name for name in objectives if objectives[name].requires)
    with pytest.raises(ConfigError, match=f"objective '{needy}' reads more than the scores"):
        InBatchLoss(needy)
    with pytest.raises(ConfigError, match="'protect' with captions or images reads a whole"):
        InBatchLoss({"selhn": {}, "protect": {"captions": 0.8}})
    for steps in (-1, "5", 1.5):
        with pytest.raises(ArgumentError, match="steps_per_epoch: expected a whole number of at"):
            InBatchLoss("hardest", steps_per_epoch=steps)


def test_epochs_are_counted_in_training_steps() -> None:
    scores, ids = vectors(0) @ vectors(1).T, torch.arange(6)
    scores.requires_grad_()
    loss = InBatchLoss({"triplet": {"epochs": [1, None]}}, steps_per_epoch=2)
    result = [loss.of_scores(scores, ids, ids).item() for _ in range(3)]
    assert result[:2] == [0.0, 0.0]
    assert result[2] > 0
    loss.eval()
    loss.of_scores(scores, ids, ids)
    assert loss.step == 3  # evaluation is no step


@pytest.mark.parametrize("objective", ["hardest", "infonce", "siglip"])
def test_a_resumed_loop_continues_at_its_step(objective) -> None:
    scores, ids = (vectors(0) @ vectors(1).T).requires_grad_(), torch.arange(6)
    schedule = {"triplet": {"epochs": [0, 1]}, objective: {"epochs": [1, None]}}
    loop = nn.ModuleDict({"loss": InBatchLoss(schedule, steps_per_epoch=2)})
    for _ in range(3):
        loop["loss"].of_scores(scores, ids, ids)
    resumed = nn.ModuleDict({"loss": InBatchLoss(schedule, steps_per_epoch=2)})
    buffer = io.BytesIO()
    torch.save(loop.state_dict(), buffer)
    buffer.seek(0)
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    assert resumed["loss"].step == 3
    following = [part["loss"].of_scores(scores, ids, ids) for part in (loop, resumed)]
    assert following[0] == following[1]
    older = {k: v for k, v in loop.state_dict().items() if not k.endswith("_extra_state")}
    resumed.load_state_dict(older)  # saved without a step
    assert resumed["loss"].step == 4


def test_equal_rows_have_equal_ids_whatever_their_padding() -> None:
    rows = torch.tensor([[5, 6, 0], [5, 6, 0], [6, 5, 0], [5, 0, 6]])
    ids = row_ids(rows)
    assert ids[0] == ids[1]
    assert len(set(ids.tolist())) == 3
    assert torch.equal(row_ids(F.pad(rows, (0, 4))), ids)
    pixels = torch.rand(3, 2, 4, 4)
    assert len(set(row_ids(pixels).tolist())) == 3
    assert torch.equal(row_ids(pixels.clone()), row_ids(pixels))


def test_names_are_ids_like_numbers() -> None:
    scores = vectors(0, 4) @ vectors(1, 4).T
    loss = InBatchLoss({"triplet": {"margin": 3.0}})
    numbers = loss.of_scores(scores, torch.tensor([7, 7, 8, 9]), torch.tensor([0, 1, 2, 2]))
    names = loss.of_scores(scores, ["a", "a", "b", "c"], np.array(["w", "x", "y", "y"]))
    assert numbers == names > 0


def test_large_ids_of_a_column_of_floats_stay_apart() -> None:
    scores = vectors(0, 3) @ vectors(1, 3).T
    loss = InBatchLoss({"triplet": {"margin": 3.0}})
    ids = [1000092795, 1000092796, 1000092797]
    floats = list(map(float, ids))
    assert loss.of_scores(scores, floats, [0, 1, 2]) == loss.of_scores(scores, ids, [0, 1, 2]) > 0


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([7]), r"image_ids: expected 4 numbers or names, .* got torch.int64 \[1\]"),
        (torch.eye(4).long(), r"got torch.int64 \[4, 4\]"),
        (torch.ones(4).bool(), r"got torch.bool \[4\]"),
        (["a", 1, None, 2], "got list"),
        ([1.0, 2.0, float("nan"), 3.0], "an id is NaN"),
        ([1.0, "a", 2.0, 3.0], "got list"),
        ([1.0, "2", 3.0, 4.0], "got list"),
        ([1.0, None, 2.0, 3.0], "got list"),
        ([2**60, 2**60 + 1, 1.0, 2.0], "got list"),
        ([[1.0], 2.0, 3.0, 4.0], "got list"),
        (None, "got NoneType"),
    ],
)
def test_ids_are_one_per_pair(ids, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        InBatchLoss("hardest").of_scores(torch.zeros(4, 4), ids, torch.arange(4))


def test_scores_are_square_and_have_no_nan() -> None:
    loss, ids = InBatchLoss("hardest"), torch.arange(4)
    with pytest.raises(ArgumentError, match="16 of 16 are NaN"):
        loss.of_scores(torch.full((4, 4), torch.nan), ids, ids)
    with pytest.raises(ArgumentError, match=r"expected one text per image .* \[4, 3\]"):
        loss.of_scores(torch.zeros(4, 3), ids, ids[:3])
