"""LSEH: parity with the public code, a naive loop, and margins from real captions."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.core.errors import ConfigError, TrainingError
from counterfoil.data.pairs import Split
from counterfoil.objectives import Context, objectives
from counterfoil.objectives.lseh import LSEH, semantic_similarity
from tests.conftest import assert_close, assert_gradient_close, load_fixture


@dataclass(frozen=True)
class Training:
    """What `prepare` reads of a run."""

    train: Split


def with_vectors(vectors: torch.Tensor, **options) -> LSEH:
    objective = LSEH(dim=vectors.shape[1], **options)
    objective.vectors = vectors
    return objective


def by_owner(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return rows[:, None] == columns[None, :]


@pytest.mark.parametrize("name", ["max", "sum"])
def test_the_reference_form_agrees_with_the_public_code_with_gradients(name) -> None:
    fixture = load_fixture("loss-lseh")
    images = fixture["in.img_emb"].double().requires_grad_()
    texts = fixture["in.cap_emb"].double().requires_grad_()
    owner = fixture["in.cap_ids"] // 5
    objective = with_vectors(
        fixture["in.svd"],
        margin=fixture.hyper["margin"],
        scale=fixture.hyper["lambda_"],
        hardest=name == "max",
        form="reference",
    )
    scores = images @ texts.T  # of unit length already
    context = Context(caption_ids=torch.arange(len(owner)))
    loss = objective.compute(scores, by_owner(owner, owner), context).loss
    assert_close(loss, fixture[f"out.{name}.loss"], 1e-6)
    loss.backward()
    assert_gradient_close(images.grad, fixture[f"grad.{name}.img_emb"], 1e-6)
    assert_gradient_close(texts.grad, fixture[f"grad.{name}.cap_emb"], 1e-6)


def test_semantic_similarity_agrees_with_the_public_code() -> None:
    fixture = load_fixture("loss-lseh")
    result = semantic_similarity(fixture["in.svd"].double())
    assert_close(result, fixture["out.semantic_similarity"], 1e-6)


def naive(scores, vectors, ids, hardest: bool, reference: bool, mean: bool) -> float:
    n = len(ids)
    products = [[sum(a * b for a, b in zip(vectors[i], vectors[j], strict=True)) for j in range(n)]
                for i in range(n)]  # fmt: skip
    total = 0.0
    for i in range(n):
        for transposed in (False, True):
            costs = []
            for j in range(n):
                same = ids[i] == ids[j]
                if i == j or (same and not reference):
                    continue
                row, column = (j, i) if transposed else (i, j)
                closeness = products[row][column] / (max(products[row]) or 1.0)
                margin = 0.0 if same else 0.185 + 0.025 * closeness
                costs.append(max(0.0, margin + scores[row][column] - scores[i][i]))
            if costs:
                cost = max(costs) if hardest else sum(costs) / (len(costs) if mean else 1)
                total += cost / (2 * n) if mean else cost
    return total


@given(
    ids=st.lists(st.integers(0, 3), min_size=2, max_size=7),
    seed=st.integers(0, 1000),
    hardest=st.booleans(),
    reference=st.booleans(),
    mean=st.booleans(),
)
def test_the_loss_equals_a_naive_loop(ids, seed, hardest, reference, mean) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(len(ids), len(ids), generator=generator, dtype=torch.float64)
    vectors = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    vectors[::5] = 0
    captions = torch.randperm(20, generator=generator)[: len(ids)]
    objective = with_vectors(
        vectors,
        hardest=hardest,
        form="reference" if reference else "paper",
        reduction="mean" if mean else "sum",
    )
    owner = torch.tensor(ids)
    loss = objective.compute(scores, by_owner(owner, owner), Context(caption_ids=captions)).loss
    expected = naive(scores.tolist(), vectors[captions].tolist(), ids, hardest, reference, mean)
    assert float(loss) == pytest.approx(expected, abs=1e-9)


def test_captions_of_one_image_are_negatives_in_the_reference_form_only() -> None:
    scores = torch.tensor([[1.0, 5.0, 0.0], [5.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    owner = torch.tensor([4, 4, 9])
    context = Context(caption_ids=torch.arange(3))
    vectors = torch.eye(3)
    paper, reference = (
        with_vectors(vectors, form=form).compute(scores, by_owner(owner, owner), context).loss
        for form in ("paper", "reference")
    )
    assert float(paper) == 0.0
    assert float(reference) == 4 * 4.0


def test_protected_pairs_are_not_negatives() -> None:
    scores = torch.tensor([[0.5, 0.9], [0.2, 0.8]])
    context = Context(caption_ids=torch.arange(2), protected=torch.tensor([[0, 1], [0, 0]]).bool())
    for form in ("paper", "reference"):
        loss = (
            with_vectors(torch.eye(2), form=form).compute(scores, torch.eye(2).bool(), context).loss
        )
        assert float(loss) == 0.0


@pytest.mark.parametrize("form", ["paper", "reference"])
def test_an_image_with_several_texts_counts_with_the_largest_of_their_margins(form) -> None:
    scores = torch.rand(2, 5, dtype=torch.float64) * 0.1
    owner = torch.tensor([0, 0, 1, 1, 1])
    vectors = torch.rand(5, 3, dtype=torch.float64)
    positives = by_owner(torch.arange(2), owner)
    objective = with_vectors(vectors, hardest=False, form=form)
    loss = objective.compute(scores, positives, Context(caption_ids=torch.arange(5))).loss
    margins = 0.185 + 0.025 * semantic_similarity(vectors)
    expected = 0.0
    for text, image in enumerate(owner.tolist()):
        own = scores[image, text]
        for other in range(5):
            if owner[other] != image:
                expected += max(0.0, margins[text, other] + scores[image, other] - own)
            elif other != text and form == "reference":
                expected += max(0.0, scores[image, other] - own)
        rival = 1 - image
        margin = max(margins[k, text] for k in range(5) if owner[k] == rival)
        expected += max(0.0, margin + scores[rival, text] - own)
    assert float(loss) == pytest.approx(float(expected), rel=1e-9)


def test_prepared_on_real_captions_alike_ones_get_the_wider_margin(concepts) -> None:
    objective = LSEH(dim=8)
    objective.prepare(Training(concepts.train))
    texts = concepts.train.texts
    assert objective.vectors.shape == (len(texts), 8)
    context = Context(caption_ids=torch.tensor([0, 2, 4, 6]))
    scores = torch.rand(4, 4, requires_grad=True)
    report = objective.compute(scores, torch.eye(4).bool(), context)
    report.loss.backward()
    assert scores.grad.isfinite().all()
    assert 0.16 <= float(report.diagnostics["lseh/margin"]) <= 0.21
    z = semantic_similarity(objective.vectors)
    shared = [
        [len(set(a.split()) & set(b.split()) - {"a", "and", "near", "the"}) for b in texts[:40]]
        for a in texts[:40]
    ]
    alike, apart = (z[:40, :40][torch.tensor(shared) == n].mean() for n in (2, 0))
    assert alike > apart + 0.3


def test_vectors_do_not_weigh_on_checkpoints(concepts) -> None:
    objective = LSEH(dim=4)
    objective.prepare(Training(concepts.train))
    assert not objective.state_dict()
    assert dict(objective.named_buffers())["vectors"] is objective.vectors


def test_it_says_what_is_missing() -> None:
    scores, positives = torch.zeros(2, 2), torch.eye(2).bool()
    with pytest.raises(TrainingError, match="prepare"):
        LSEH().compute(scores, positives, Context(caption_ids=torch.arange(2)))
    with pytest.raises(TrainingError, match="caption_ids"):
        with_vectors(torch.eye(2)).compute(scores, positives, Context())
    with pytest.raises(ConfigError, match=r"lseh\.dim"):
        objectives.create("lseh", {"dim": 0})


def test_it_is_registered_and_says_that_scores_are_not_enough() -> None:
    assert objectives["lseh"] is LSEH
    assert LSEH.requires
    assert objectives.options("lseh") == {
        "margin": 0.185,
        "scale": 0.025,
        "dim": 400,
        "hardest": True,
        "reduction": "sum",
        "form": "paper",
    }
