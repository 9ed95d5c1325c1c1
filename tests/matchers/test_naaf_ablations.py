"""NAAF's ablations (tables 3 and 4) and the histograms it keeps (figure 3), by hand."""

from __future__ import annotations

import math

import pytest
import torch

from counterfoil.core.errors import ConfigError
from counterfoil.encoders import Encoded, l2_normalize
from counterfoil.kernels.spec import LARGE_JOB_CELLS, ScoringJob
from counterfoil.matchers import Observation, matchers
from counterfoil.matchers.ensemble import EnsembleMatcher
from counterfoil.matchers.fragment_matcher import one_pair
from counterfoil.matchers.mismatch_boundary import (
    BINS,
    MismatchBoundary,
    close_histogram,
    histogram,
)


def encoded(*items: list[list[float]]) -> Encoded:
    """Items of unequal length, padded with a vector that would change every result."""
    longest = max(map(len, items))
    rows = [[*item, *[[9.0, -9.0]] * (longest - len(item))] for item in items]
    lengths = torch.tensor([len(item) for item in items])
    return Encoded(torch.tensor(rows), torch.arange(longest)[None] < lengths[:, None])


def random_pair(images: int = 4, texts: int = 5) -> tuple[Encoded, Encoded]:
    torch.manual_seed(0)
    sides = []
    for count, longest in ((images, 6), (texts, 7)):
        vectors = l2_normalize(torch.randn(count, longest, 8))
        lengths = torch.randint(2, longest + 1, (count,))
        sides.append(Encoded(vectors, torch.arange(longest)[None] < lengths[:, None]))
    return sides[0], sides[1]


WORDS = encoded([[1.0, 0.0], [0.0, 1.0]], [[0.6, 0.8]])
REGIONS = encoded([[1.0, 0.0], [0.6, 0.8]], [[1.0, 0.0]])
SCALE = math.log(2) / 0.4


def test_without_masks_every_word_counts_and_attends_to_every_region() -> None:
    """Words e1, e2; regions e1, (.6, .8); t = .9. Similarities [1, .6] and [0, .8]."""
    options = {"mining": False, "boundary": 0.9, "lambda_softmax": SCALE, "intra": "none"}
    masked, bare = (
        matchers["naaf"](2, masks=masks, **options).train()(REGIONS[:1], WORDS[:1]).item()
        for masks in (True, False)
    )
    # with masks: word 1 attends to region 1 alone; word 2 to none, and is 0.1 below t
    # without: weights (2, 1)/3 and (1, 4)/5; word 1 is 0.1 above t, word 2 0.1 below
    first = (2 / 3 + 0.6 / 3) / math.hypot(2 / 3 + 0.6 / 3, 0.8 / 3)
    second = 0.8 * 4 / 5 / math.hypot(1 / 5 + 0.6 * 4 / 5, 0.8 * 4 / 5)
    expected = (first + 0.1 + second - 0.1) / 2 - (1 + 0 + 0 - 0.1) / 2
    assert bare - masked == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["naaf", "naaf-reference"])
@pytest.mark.parametrize("direction", ["t2i", "i2t", "both"])
@pytest.mark.parametrize("training", [True, False])
def test_without_masks_all_routes_give_the_scores_of_single_pairs(
    name, direction, training
) -> None:
    matcher = matchers[name](8, masks=False, direction=direction)
    matcher.mining = False
    matcher.train(training)
    images, texts = random_pair()
    assert matcher.kernel_specs() == ()  # what fused and compiled kernels are asked by
    expected = torch.zeros(len(images), len(texts))
    for i in range(len(images)):
        for t in range(len(texts)):
            for side in matcher.directions:
                pair = (texts[t : t + 1], images[i : i + 1])
                tile, _ = one_pair(*(pair if side == "t2i" else pair[::-1]))
                expected[i, t] += matcher.similarity(tile, matcher.boundary_of(side)).item()
    with torch.no_grad():
        torch.testing.assert_close(matcher(images, texts), expected)
        job = ScoringJob(LARGE_JOB_CELLS)
        torch.testing.assert_close(matcher.score_block(images, texts, job), expected)
    matched = matchers[name](8, direction=direction).train(training)
    matched.mining = False
    assert not torch.allclose(matched(images, texts), expected, atol=1e-3)


def test_masks_and_explanations_agree() -> None:
    matcher = matchers["naaf"](8, masks=False, boundary=0.2).eval()
    images, texts = random_pair()
    parts = matcher.word_parts(images[:1], texts[:1])
    total = (parts.positive + parts.negative).sum()
    torch.testing.assert_close(total, matcher(images[:1], texts[:1])[0, 0])
    assert (parts.negative > 0).any()


def observed(**options):
    """Two right pairs: the second image has one region, the second caption one word."""
    matcher = matchers["naaf"](2, min_samples=1, **options).train()
    scores = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    seen = Observation(REGIONS, WORDS, scores, torch.eye(2).bool(), 0, 0)
    matcher.observe(seen)
    return matcher


@pytest.mark.parametrize(
    ("options", "mismatched"),
    [
        # image 1 with caption 2: max(.6, 1); image 2 with caption 1: 1 and 0, one region each
        ({}, [1.0, 1.0, 0.0]),
        ({"mismatched": "all"}, [0.6, 1.0, 1.0, 0.0]),
        # regions ask: of image 1 the word (.6, .8), of image 2 the better of both words
        ({"direction": "i2t"}, [0.6, 1.0, 1.0]),
        ({"direction": "i2t", "mismatched": "all"}, [0.6, 1.0, 1.0, 0.0]),
    ],
)
def test_mismatched_words_are_sampled_by_their_maximum_or_by_all_regions(
    options, mismatched
) -> None:
    [learned] = observed(**options).boundaries.values()
    samples = torch.tensor(mismatched, dtype=torch.float64)
    assert float(learned.mean_neg) == pytest.approx(float(samples.mean()), abs=1e-6)
    assert float(learned.std_neg) == pytest.approx(float(samples.std()), abs=1e-6)
    # matched samples are maxima in all cases: 1, .8 and .6
    assert float(learned.mean_pos) == pytest.approx(0.8, abs=1e-6)
    assert learned.histogram[0].sum() == 3
    assert learned.histogram[1].sum() == len(mismatched)


def test_mismatched_estimates_that_are_not_updated_stay_those_of_the_first_update() -> None:
    fixed = MismatchBoundary(2.0, 99, 0.5, 2, update_mismatched=False)
    moving = MismatchBoundary(2.0, 99, 0.5, 2)
    for learned in (fixed, moving):
        learned.observe(torch.tensor([0.6, 0.8]), torch.tensor([0.1, 0.3]), 0)
        learned.observe(torch.tensor([0.4, 0.6]), torch.tensor([0.3, 0.5]), 0)
    assert float(fixed.mean_neg) == pytest.approx(0.2, abs=1e-6)
    assert float(moving.mean_neg) == pytest.approx(0.3, abs=1e-6)
    assert float(fixed.mean_pos) == float(moving.mean_pos) == pytest.approx(0.6, abs=1e-6)
    assert float(fixed.boundary) < float(moving.boundary)
    assert not matchers["naaf"](2, update_mismatched=False).estimates("t2i").update_mismatched


@pytest.mark.parametrize(
    ("options", "unused", "mode"),
    [
        ({"mining": False, "mismatched": "all"}, "mismatched", "mining=false"),
        ({"mining": False, "update_mismatched": False}, "update_mismatched", "mining=false"),
        ({"masks": False, "negative": False, "alpha": 3.0}, "alpha", "masks=false and negative"),
        ({"masks": False, "negative": False, "boundary": 0.2}, "boundary", "masks=false and neg"),
    ],
)
def test_an_ablation_that_another_option_makes_void_is_refused(options, unused, mode) -> None:
    with pytest.raises(ConfigError, match=f"model.matcher.{unused}=.*no effect with {mode}"):
        matchers["naaf"](16, **options)


@pytest.mark.parametrize(
    ("options", "unused", "mode"),
    [
        ({"masks": False, "intra": "always"}, "intra", "masks=false"),
        ({"mining": False, "alpha": 3.0}, "alpha", "mining=false"),
        ({"negative": False, "intra": "none"}, "intra", "negative=false"),
    ],
)
def test_the_reference_refuses_what_another_option_makes_void(options, unused, mode) -> None:
    with pytest.raises(ConfigError, match=f"model.matcher.{unused}=.*no effect with {mode}"):
        matchers["naaf-reference"](16, **options)


def test_an_unknown_way_of_sampling_mismatched_words_is_refused() -> None:
    with pytest.raises(ConfigError, match="mismatched: 'max' or 'all', got 'mean'"):
        matchers["naaf"](16, mismatched="mean")


def test_a_histogram_counts_each_sample_in_its_bin_and_none_that_does_not_count() -> None:
    samples = torch.tensor([[[0.0, 0.0025, 1.0, 0.5], [-1.0, -2.0, 3.0, 0.5]]])
    counted = torch.tensor([[[True, True, True, False], [True, True, True, True]]])
    counts = histogram(samples, counted)
    assert counts.shape == (2, BINS)
    assert counts.sum(1).tolist() == [3, 4]
    assert counts[0, BINS // 2] == 2  # 0 and 0.0025 are in the bin from 0 to 0.005
    assert counts[0, -1] == 1
    assert counts[1, 0] == 2  # the ends hold what lies beyond
    assert counts[1, -1] == 1
    assert counts[1, 300] == 1


def test_closing_an_epoch_gives_its_histogram_and_starts_the_next_one_at_zero() -> None:
    matcher = observed()
    learned = matcher.boundaries["t2i"]
    [record] = matcher.close_epoch(0)["mismatch_histogram"].values()
    assert sum(record["matched"]) == sum(record["mismatched"]) == 3
    width = (record["high"] - record["low"]) / len(record["matched"])
    assert width == pytest.approx(2 / BINS)
    assert record["low"] == pytest.approx(0.0)  # of the mismatched similarity 0
    assert record["mismatched"][0] == record["mismatched"][-1] - 1 == 1
    assert (record["boundary"], record["alpha"]) == (learned.value, 2.0)
    assert matcher.close_epoch(1) == {}
    assert close_histogram(learned.histogram, 0.1, None) == {}
    [adjusted] = observed(adjust_epoch=3).close_epoch(3)["mismatch_histogram"].values()
    assert adjusted["alpha"] is None


def test_copies_close_the_epoch_of_every_member() -> None:
    twins = EnsembleMatcher([observed(), observed()])
    assert "t2i" in twins.close_epoch(0)["mismatch_histogram"]
    assert twins.close_epoch(0) == {}
    assert all(not member.boundaries["t2i"].histogram.any() for member in twins.members)


def test_the_form_of_the_public_code_keeps_a_histogram_too() -> None:
    matcher = matchers["naaf-reference"](2, min_samples=1).train()
    matcher(REGIONS, WORDS)
    closed = matcher.close_epoch(0)["mismatch_histogram"]["t2i"]
    assert sum(closed["matched"]) == sum(closed["mismatched"]) > 0
    assert closed["boundary"] == matcher.boundary_of("t2i")
