"""Methods that score wrong captions, against loops and against geometry with a known answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from counterfoil.audit import detection
from counterfoil.audit.detection import (
    Weights,
    best_f1,
    best_lemon,
    detect,
    lemon_score,
    loss_score,
    standardize,
    tune_lemon,
    tune_on_noise,
)
from counterfoil.audit.neighbors import disagreement, find_neighbors, neighbors_of
from counterfoil.audit.noise import NoisySplit, one_caption_each, plant
from counterfoil.evaluation.words.evaluate import roc_auc


def unit(rng, shape) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.from_numpy(rng.normal(size=shape)).float(), dim=-1)


@pytest.fixture(scope="module")
def vectors():
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(20), 3)
    return unit(rng, (20, 8)), unit(rng, (60, 8)), owner


def test_neighbors_are_the_nearest_other_pairs(vectors) -> None:
    images, texts, owner = vectors
    found = neighbors_of(images, texts, owner, np.arange(60), count=5)
    own = images[owner]
    for k in range(60):
        order = sorted((j for j in range(60) if j != k), key=lambda j: -float(texts[k] @ texts[j]))
        assert found.by_caption.pairs[k].tolist() == order[:5]
        np.testing.assert_allclose(found.by_caption.gap[k], 1 - own[order[:5]] @ own[k], atol=1e-5)
        # the other captions of the same image are its nearest pairs
        siblings = {j for j in range(60) if j != k and owner[j] == owner[k]}
        assert siblings <= set(found.by_image.pairs[k].tolist())
        assert k not in found.by_image.pairs[k]


def test_lemons_score_is_its_formula(vectors) -> None:
    images, texts, owner = vectors
    found = neighbors_of(images, texts, owner, np.arange(60), count=4)
    weights = Weights(by_image=3.0, by_caption=2.0, near=0.7, match=1.5)
    own = images[owner].double().numpy()
    said = texts.double().numpy()
    match = 1 - (own * said).sum(1)
    for k in range(60):
        expected = match[k]
        for side, factor, near, far in (
            (found.by_image, 3.0, own, said),
            (found.by_caption, 2.0, said, own),
        ):
            terms = [
                (1 - far[k] @ far[j])
                * np.exp(-0.7 * (1 - near[k] @ near[j]))
                * np.exp(-1.5 * match[j])
                for j in side.pairs[k]
            ]
            expected += factor * np.mean(terms)
        assert lemon_score(found, weights)[k] == pytest.approx(expected, abs=1e-5)


def test_too_few_pairs_have_fewer_neighbors(vectors) -> None:
    images, texts, _ = vectors
    found = neighbors_of(images[:2], texts[:2], np.array([0, 1]), np.arange(2), count=5)
    assert found.by_image.pairs.tolist() == [[1, -1], [0, -1]]
    assert np.isfinite(lemon_score(found)).all()
    alone = neighbors_of(images[:1], texts[:1], np.array([0]), np.arange(1), count=5)
    assert np.isnan(disagreement(alone.by_image, np.ones(1))).all()
    assert lemon_score(alone)[0] == pytest.approx(float(alone.match[0]))


def test_an_unreliable_neighbor_counts_less(vectors) -> None:
    images, texts, owner = vectors
    side = neighbors_of(images, texts, owner, np.arange(60), count=5).by_caption
    even, reliable = np.ones(60), np.ones(60)
    farthest = side.pairs[0][np.argmax(side.gap[0])]
    reliable[farthest] = 0.01
    assert disagreement(side, reliable)[0] < disagreement(side, even)[0]


def test_tuned_weights_are_the_best_of_the_grid_on_the_labels(vectors) -> None:
    images, texts, owner = vectors
    found = neighbors_of(images, texts, owner, np.arange(60), count=5)
    labels = lemon_score(found, Weights(0.0, 100.0, 0.0, 10.0)) > 3.0
    assert 0 < labels.sum() < 60
    known = np.arange(60) < 50
    tuned = tune_lemon(found, labels, known)
    assert best_f1(lemon_score(found, tuned)[known], labels[known])[0] == 100.0
    assert tune_lemon(found, np.zeros(60, dtype=bool), known) == Weights()


def test_weights_tuned_on_several_noises_are_the_best_on_average(vectors) -> None:
    images, texts, owner = vectors
    found = neighbors_of(images, texts, owner, np.arange(60), count=5)
    every = np.ones(60, dtype=bool)
    parts = [
        (found, lemon_score(found, weights) > limit, every)
        for weights, limit in ((Weights(0.0, 50.0, 1.0, 1.0), 6.0), (Weights(50.0, 0.0), 3.0))
    ]
    parts = [(one, labels, known) for one, labels, known in parts if labels.any()]
    assert len(parts) == 2
    tuned, mean = best_lemon(parts)
    own = [best_f1(lemon_score(found, tuned), labels)[0] for _, labels, _ in parts]
    assert mean == pytest.approx(np.mean(own))
    for weights in (Weights(0.0, 50.0, 1.0, 1.0), Weights(50.0, 0.0, 0.0, 5.0), Weights()):
        others = [best_f1(lemon_score(found, weights), labels)[0] for _, labels, _ in parts]
        assert np.mean(others) <= mean + 1e-9
    assert best_lemon([]) == (Weights(), 0.0)


def test_tuning_plants_noise_and_reads_its_labels(learned, concepts, monkeypatch) -> None:
    monkeypatch.setattr(detection, "SIDE_GRID", (0.0, 5.0, 50.0))
    few = concepts.test.select(range(20))
    weights, mean = tune_on_noise(learned, few, ["random"], [0.3], [3, 4])
    assert 50 < mean <= 100
    assert tune_on_noise(learned, few, ["random"], [0.3], [3, 4]) == (weights, mean)
    task = ["word"], [0.5], [3]
    one = tune_on_noise(learned, one_caption_each(few, 3), *task)
    assert tune_on_noise(learned, few, *task, one_caption=True) == one
    assert tune_on_noise(learned, few, *task) != one


def test_every_method_finds_captions_of_other_images(learned, concepts) -> None:
    noisy = plant(concepts.test, "random", 0.3, 0, clean=0.0, labeled=0.0)
    neighbors = find_neighbors(learned, noisy.split)
    assert roc_auc(lemon_score(neighbors), noisy.wrong) > 0.8
    every = np.arange(len(noisy.wrong))
    losses = loss_score(learned, noisy.split, every)
    assert roc_auc(losses, noisy.wrong) > 0.8
    np.testing.assert_array_equal(losses, loss_score(learned, noisy.split, every))


def truth(wrong, clean, labeled) -> NoisySplit:
    marks = [np.array(mask, dtype=bool) for mask in (wrong, clean, labeled)]
    return NoisySplit(None, "random", 0.5, 0, *marks)


def test_measures_are_counted_by_hand() -> None:
    #       measured              clean      labeled
    values = np.array([9.0, 7.0, 6.0, 1.0, 5.0, 2.0, 8.0, 3.0])
    noisy = truth([1, 1, 0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 1, 1])
    found = detect(values, noisy)
    assert (found.auroc, found.auprc, found.f1_best) == (100, 100, 100)
    # above the 95 % quantile of 2 and 5: three captions, two of them wrong
    assert found.precision == pytest.approx(200 / 3)
    assert (found.recall, found.f1_clean) == (100, pytest.approx(80))
    # the labels put the threshold at 8: one of two wrong captions
    assert found.f1_labeled == pytest.approx(200 / 3)
    assert found.curve[-1] == (100, 100)


def test_captions_without_a_score_are_left_out() -> None:
    values = np.array([9.0, np.nan, 6.0, 1.0])
    found = detect(values, truth([1, 1, 0, 0], [0] * 4, [0] * 4))
    assert found.recall == 0  # without a clean share there is no threshold
    assert found.auroc == 100
    z = standardize({"x": values})["x"]
    assert np.isnan(z[1])
    assert np.argsort(z)[:3].tolist() == [3, 2, 0]


def test_folds_keep_probabilities_and_rescale_other_scores() -> None:
    values = np.array([0.0, 0.01, 0.02, 0.99])
    probabilities = ("mixture of losses (NCR)", "audit", "audit, tuned on labels")
    names = ("similarity", "LEMoN, fixed weights", *probabilities)
    scaled = standardize(dict.fromkeys(names, values))
    same = [bool(np.array_equal(scaled[name], values)) for name in names]
    assert same == [False, False, True, True, True]


def test_words_unknown_to_the_model_do_not_change_a_loss(learned, concepts) -> None:
    split = concepts.test.select(range(10))
    every = np.arange(len(split.texts))
    strange = [[f"{text} zzyzx" for text in texts] for texts in split.captions]
    with_unknown = replace(split, captions=strange)
    np.testing.assert_array_equal(
        loss_score(learned, with_unknown, every), loss_score(learned, split, every)
    )


def test_equal_scores_are_listed_together() -> None:
    assert best_f1(np.array([1.0, 1.0, 0.0]), np.array([True, False, True]))[0] == 80.0
    assert best_f1(np.ones(4), np.array([True, False, False, False]))[0] == 40.0
    assert best_f1(np.ones(2), np.zeros(2, dtype=bool)) == (0.0, float("inf"))
