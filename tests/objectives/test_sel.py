"""SEL: parity, and blocks of views told by caption ids."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.objectives import Context, objectives
from tests.conftest import assert_close, assert_gradient_close, load_fixture
from tests.objectives.cases import cases


@pytest.mark.parametrize(("option", "hardest"), [("max", True), ("sum", False)])
@pytest.mark.parametrize("by_caption", [True, False])
def test_the_loss_agrees_with_the_reference_with_gradients(option, hardest, by_caption) -> None:
    fixture = load_fixture("esa-sel")
    images = fixture["in.img_emb"].double().requires_grad_()
    texts = fixture["in.cap_emb"].double().requires_grad_()
    item = torch.arange(len(images)) // fixture.hyper["hardnum"]
    context = Context(caption_ids=item if by_caption else None)
    objective = objectives["sel"](margin=fixture.hyper["margin"], hardest=hardest)
    loss = objective.compute(images @ texts.T, item[:, None] == item[None, :], context).loss
    parts = [
        fixture[f"out.{option}.loss_{part}_retrieval"].double() for part in ("caption", "image")
    ]
    assert_close(loss, parts[0] + parts[1], 1e-9)
    loss.backward()
    assert_gradient_close(images.grad, fixture[f"grad.{option}.img_emb"], 1e-6)
    assert_gradient_close(texts.grad, fixture[f"grad.{option}.cap_emb"], 1e-6)


def naive(scores, own, negative, hardest: bool) -> float:
    total = 0.0
    for row, mine, others in zip(scores, own, negative, strict=True):
        views = [score for score, is_mine in zip(row, mine, strict=True) if is_mine]
        hinges = [
            max(0.0, 0.2 + score - min(views))
            for score, is_negative in zip(row, others, strict=True)
            if is_negative
        ]
        if hinges:
            total += max(hinges) if hardest else sum(hinges)
    return total


@given(
    case=cases(),
    hardest=st.booleans(),
    captions=st.lists(st.integers(0, 1), min_size=7, max_size=7),
)
def test_the_loss_equals_a_naive_loop(case, hardest, captions) -> None:
    rows, columns = case.scores.shape
    ids = torch.tensor(captions[:columns])
    own = case.positives
    if rows == columns:
        own = own & (ids[:, None] == ids[None, :])
    negative = ~case.positives & ~case.protected
    expected = naive(case.scores.tolist(), own.tolist(), negative.tolist(), hardest)
    expected += naive(case.scores.T.tolist(), own.T.tolist(), negative.T.tolist(), hardest)
    context = Context(caption_ids=ids, protected=case.protected)
    loss = objectives["sel"](hardest=hardest).compute(case.scores, case.positives, context).loss
    assert float(loss) == pytest.approx(expected, abs=1e-9)


def test_another_caption_of_the_image_is_neither_view_nor_negative() -> None:
    scores = torch.tensor([[0.9, -5.0, 0.0], [5.0, 0.9, 0.0], [0.0, 0.0, 0.9]])
    owner = torch.tensor([3, 3, 8])
    positives = owner[:, None] == owner[None, :]
    apart = Context(caption_ids=torch.tensor([10, 11, 12]))
    assert float(objectives["sel"]().compute(scores, positives, apart).loss) == 0.0
    together = Context(caption_ids=torch.tensor([10, 10, 12]))
    assert float(objectives["sel"]().compute(scores, positives, together).loss) > 0.0


def test_single_views_make_it_the_hardest_loss() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    arguments = (scores, torch.eye(6).bool(), Context(caption_ids=torch.arange(6)))
    assert torch.equal(
        objectives["sel"]().compute(*arguments).loss,
        objectives["hardest"]().compute(*arguments).loss,
    )


def test_a_row_without_any_positive_costs_nothing() -> None:
    scores = torch.tensor([[0.9, 0.8], [0.5, 0.5], [0.5, 0.5]], requires_grad=True)
    positives = torch.tensor([[True, True], [False, False], [False, False]])
    loss = objectives["sel"]().compute(scores, positives, Context()).loss
    loss.backward()
    assert loss.item() == 0.0
    assert scores.grad.isfinite().all()
