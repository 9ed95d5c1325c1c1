"""Diagnostics of a batch: against naive loops, and gradients against autograd."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from counterfoil.objectives import Context, both_directions, create_objective
from counterfoil.training.diagnostics import (
    QUANTILES,
    margin_histogram,
    score_diagnostics,
    separation,
    tangential_gradients,
)

MARGIN = 0.2


def same(ids: list[int]) -> Tensor:
    owner = torch.tensor(ids)
    return owner[:, None] == owner[None, :]


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def unit(*shape: int, seed: int = 0) -> Tensor:
    return F.normalize(normal(*shape, seed=seed), dim=-1)


def triplets(scores: Tensor, positives: Tensor) -> list[tuple[bool, int, int, list[int]]]:
    """(image is the anchor?, image, text, true negatives), one by one."""
    n, m = scores.shape
    pairs = [(i, j) for i in range(n) for j in range(m) if positives[i, j]]
    if n == m:
        pairs = [(i, i) for i in range(n)]
    result = []
    for i, j in pairs:
        result.append((True, i, j, [k for k in range(m) if not positives[i, k]]))
        result.append((False, i, j, [k for k in range(n) if not positives[k, j]]))
    return result


def negative_scores(scores: Tensor, by_image: bool, i: int, j: int, others: list[int]) -> list:
    return [float(scores[i, k] if by_image else scores[k, j]) for k in others]


batches = given(
    ids=st.lists(st.integers(0, 3), min_size=2, max_size=7), seed=st.integers(0, 10_000)
)


@batches
def test_scores_and_gaps_equal_a_naive_loop_with_repeated_images(ids, seed) -> None:
    scores, positives = normal(len(ids), len(ids), seed=seed), same(ids)
    gaps, own, hardest = [], [], []
    for by_image, i, j, others in triplets(scores, positives):
        if others:
            hardest.append(max(negative_scores(scores, by_image, i, j, others)))
            own.append(float(scores[i, j]))
            gaps.append(own[-1] - hardest[-1])
    result = score_diagnostics(both_directions(scores, positives))
    assert all(value.isfinite() for value in result.values())
    if not gaps:
        assert result.keys() == {"positive"}
        return
    expected = {
        "positive": np.mean(own),
        "hardest_negative": np.mean(hardest),
        "gap": np.mean(gaps),
        "gap/abs": np.mean(np.abs(gaps)),
        **{f"gap/{key}": np.quantile(np.abs(gaps), q) for key, q in QUANTILES.items()},
    }
    assert result.keys() == expected.keys()
    for key, value in expected.items():
        assert float(result[key]) == pytest.approx(value, abs=1e-9), key


def test_an_anchor_without_a_negative_does_not_count_towards_the_means() -> None:
    scores = torch.tensor([[0.9, 0.1], [0.4, 0.5]])
    protected = torch.tensor([[False, True], [False, False]])
    directions = both_directions(scores, torch.eye(2).bool(), Context(protected=protected))
    result = score_diagnostics(directions)
    # image 0 and text 1 have lost their only negative; image 1 and text 0 are left
    assert float(result["positive"]) == pytest.approx((0.5 + 0.9) / 2)
    assert float(result["hardest_negative"]) == pytest.approx(0.4)
    assert float(result["gap/abs"]) == pytest.approx((0.1 + 0.5) / 2)


def test_a_batch_without_pairs_has_nothing_to_report() -> None:
    positives = torch.zeros(2, 3, dtype=torch.bool)
    directions = both_directions(torch.ones(2, 3), positives)
    assert score_diagnostics(directions) == {}
    assert tangential_gradients(unit(2, 4), unit(3, 4), positives) == {}
    assert int(margin_histogram(directions).sum()) == 0


def test_diagnostics_carry_no_gradient() -> None:
    scores = normal(4, 4).requires_grad_()
    directions = both_directions(scores, torch.eye(4).bool())
    assert not any(value.requires_grad for value in score_diagnostics(directions).values())


@given(
    ids=st.lists(st.integers(0, 3), min_size=2, max_size=7),
    seed=st.integers(0, 10_000),
    bins=st.integers(1, 50),
)
def test_margins_are_counted_over_every_true_negative(ids, seed, bins) -> None:
    scores, positives = normal(len(ids), len(ids), seed=seed), same(ids)
    margins = [
        float(scores[i, j]) - other
        for by_image, i, j, others in triplets(scores, positives)
        for other in negative_scores(scores, by_image, i, j, others)
    ]
    expected, _ = np.histogram(np.clip(margins, -1, 1), bins=bins, range=(-1, 1))
    result = margin_histogram(both_directions(scores, positives), bins=bins)
    assert result.tolist() == expected.tolist()


def test_margins_beyond_the_range_are_in_the_end_bins() -> None:
    scores = torch.tensor([[9.0, 0.0], [0.25, -9.0]])
    result = margin_histogram(both_directions(scores, torch.eye(2).bool()), bins=4)
    assert result.tolist() == [2, 0, 0, 2]


def naive_gradients(images: Tensor, texts: Tensor, positives: Tensor) -> dict[str, float]:
    """Autograd through the normalisation, one hinge after the other."""
    scores = images @ texts.T
    norms: dict[str, list[float]] = {"anchor": [], "positive": [], "negative": []}
    for by_image, i, j, others in triplets(scores, positives):
        if not others:
            continue
        values = negative_scores(scores, by_image, i, j, others)
        k = others[int(np.argmax(values))]
        one, two, three = (
            (images[i], texts[j], texts[k]) if by_image else (texts[j], images[i], images[k])
        )
        leaves = [x.clone().requires_grad_() for x in (one, two, three)]
        anchor, positive, negative = (x / x.norm() for x in leaves)
        cost = (anchor @ negative - anchor @ positive + MARGIN).clamp(min=0)
        if cost.item() > 0:
            for key, gradient in zip(norms, torch.autograd.grad(cost, leaves), strict=True):
                norms[key].append(float(gradient.norm()))
    return {f"tangent/{key}": float(np.mean(several)) for key, several in norms.items() if several}


@batches
def test_tangential_parts_are_the_gradients_autograd_finds(ids, seed) -> None:
    images, texts = unit(len(ids), 5, seed=seed), unit(len(ids), 5, seed=seed + 1)
    result = tangential_gradients(images, texts, same(ids), margin=MARGIN)
    expected = naive_gradients(images, texts, same(ids))
    assert {key for key in result if key.startswith("tangent/")} == expected.keys()
    for key, value in expected.items():
        assert float(result[key]) == pytest.approx(value, abs=1e-9), key


def test_tangential_parts_hold_for_images_with_several_texts() -> None:
    images, texts = unit(2, 6, seed=3), unit(5, 6, seed=4)
    positives = torch.tensor([0, 1])[:, None] == torch.tensor([1, 0, 0, 1, 1])[None, :]
    result = tangential_gradients(images, texts, positives)
    for key, value in naive_gradients(images, texts, positives).items():
        assert float(result[key]) == pytest.approx(value, abs=1e-9), key


def test_one_triplet_gives_the_sines_and_eq_8_the_cosines() -> None:
    v, t, other = unit(3, 7, seed=5)
    # one image, its text and a foreign text: only image → text has a negative
    positives = torch.tensor([[True, False]])
    result = tangential_gradients(v[None], torch.stack([t, other]), positives, margin=2.0)
    s_p, s_n, apart = float(v @ t), float(v @ other), float((other - t).norm())
    expected = {
        "tangent/anchor": math.sqrt(apart**2 - (s_n - s_p) ** 2),
        "tangent/positive": math.sqrt(1 - s_p**2),
        "tangent/negative": math.sqrt(1 - s_n**2),
        "eq8/anchor": apart * abs(s_n - s_p),
        "eq8/positive": abs(s_p),
        "eq8/negative": abs(s_n),
    }
    assert result.keys() == expected.keys()
    for key, value in expected.items():
        assert float(result[key]) == pytest.approx(value, abs=1e-9), key


def test_equal_similarities_alone_do_not_make_the_gradient_vanish() -> None:
    v = torch.tensor([[0.0, 0.0, 1.0]])
    texts = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    result = tangential_gradients(v, texts, torch.tensor([[True, False]]))
    assert float(result["eq8/anchor"]) == 0.0
    assert float(result["tangent/anchor"]) == pytest.approx(math.sqrt(2))
    assert float(result["tangent/positive"]) == pytest.approx(1.0)


def test_the_gradient_vanishes_as_the_embeddings_of_each_modality_become_one() -> None:
    here, there = unit(2, 16, seed=6)
    noise = normal(2, 8, 16, seed=7)
    anchor, positive = [], []
    for spread in (1e-1, 1e-3, 1e-5):
        images = F.normalize(here + spread * noise[0], dim=1)
        texts = F.normalize(there + spread * noise[1], dim=1)
        result = tangential_gradients(images, texts, torch.eye(8).bool())
        anchor.append(float(result["tangent/anchor"]))
        positive.append(float(result["tangent/positive"]))
    for before, after in pairwise(anchor):
        assert after == pytest.approx(before / 100, rel=0.2)
    # at two different points, t and t̂ still have a gradient each: opposite, in a shared encoder
    apart = math.sqrt(1 - float(here @ there) ** 2)
    assert positive[-1] == pytest.approx(apart, abs=1e-3)


def test_hinges_at_rest_leave_nothing_to_report() -> None:
    assert tangential_gradients(torch.eye(4), torch.eye(4), torch.eye(4).bool()) == {}
    assert tangential_gradients(torch.eye(3), torch.eye(3), torch.ones(3, 3).bool()) == {}


def test_protected_pairs_are_nobodys_hardest_negative() -> None:
    images, texts = unit(3, 4, seed=8), unit(3, 4, seed=9)
    protected = torch.zeros(3, 3, dtype=torch.bool)
    protected[0, 1] = protected[2, 0] = True
    result = tangential_gradients(images, texts, torch.eye(3).bool(), Context(protected=protected))
    positives = torch.eye(3).bool()
    expected = naive_gradients(images, texts, positives | protected)
    for key, value in expected.items():
        assert float(result[key]) == pytest.approx(value, abs=1e-9), key


def test_half_precision_embeddings_off_unit_length_keep_small_gradients_small() -> None:
    one = unit(1, 64, seed=10).expand(6, 64)
    result = tangential_gradients(one.bfloat16(), one.bfloat16(), torch.eye(6).bool())
    assert float(result["tangent/positive"]) < 1e-5
    assert score_diagnostics(both_directions((one @ one.T).bfloat16(), torch.eye(6).bool()))


def test_separation_is_the_share_of_negatives_below_their_positive() -> None:
    scores = torch.randn(5, 5, generator=torch.Generator().manual_seed(3))
    scores[0, 1] = scores[0, 0]  # a tie counts one half
    positives = same([0, 1, 2, 3, 3])
    shares = []
    for matrix, own in ((scores, positives), (scores.T, positives.T)):
        for k in range(5):
            for j in range(5):
                if not own[k, j]:
                    shares.append(
                        float(matrix[k, k] > matrix[k, j]) or (matrix[k, k] == matrix[k, j]) / 2
                    )
    directions = both_directions(scores, positives)
    expected = float(torch.tensor([float(x) for x in shares]).mean())
    assert float(separation(directions)["separation"]) == pytest.approx(expected)
    assert float(separation(both_directions(1e-6 * scores, positives))["separation"]) == (
        pytest.approx(expected)
    )
    assert separation(both_directions(scores, torch.ones(5, 5).bool())) == {}


def test_ssp_and_the_hrem_graph_give_the_margin_up_to_which_a_negative_costs() -> None:
    assert create_objective({"ssp": {"margin": 0.3}}).hinge_margin(0) == 0.3
    for loss in ("trip", "vse"):
        graph = create_objective({"hrem-graph": {"loss": loss, "margin": 0.4}})
        assert graph.hinge_margin(0) == 0.4


def test_the_margin_of_several_terms_is_that_of_the_heaviest() -> None:
    terms = {"hardest": {"margin": 0.1}, "triplet": {"margin": 0.5, "weight": 0.2}}
    assert create_objective(terms).hinge_margin(0) == 0.1
    assert create_objective({**terms, "uniformity": 9.0}).hinge_margin(0) == 0.1
    late = {**terms, "hardest": {"margin": 0.1, "epochs": [2, None]}}
    assert create_objective(late).hinge_margin(0) == 0.5
    assert create_objective(late).hinge_margin(2) == 0.1
    assert create_objective("uniformity").hinge_margin(0) is None
