"""NAAF: parity in reference form, the boundary's arithmetic, mining in the paper's form."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterfoil.core.errors import ConfigError
from counterfoil.core.tensors.host_mirror import HostScalarCache
from counterfoil.encoders import Encoded, l2_normalize
from counterfoil.matchers import Observation, matchers
from counterfoil.matchers.base import paired_scores
from counterfoil.matchers.ensemble import EnsembleMatcher
from counterfoil.matchers.fragment_matcher import one_pair
from counterfoil.matchers.mismatch_boundary import (
    MismatchBoundary,
    Mismatches,
    optimal_boundary,
    weighted_error,
)
from counterfoil.objectives import Context, create_objective
from tests.conftest import assert_close, assert_gradient_close, load_fixture
from tests.matchers.local import encoded_pair


def reference(**options):
    return matchers["naaf-reference"](**options)


FIXED = [("naaf-train-fixed", option) for option in load_fixture("naaf-train-fixed").options]
TEST = [
    (name, option)
    for name in ("naaf-test", "naaf-test-regions")
    for option in load_fixture(name).options
]


@pytest.mark.parametrize(("name", "option"), FIXED)
def test_training_scores_with_a_fixed_boundary_agree(name, option) -> None:
    fixture = load_fixture(name)
    matcher = reference(mining=False).train()
    matcher.reference.state[0] = fixture.options[option]["thres"]
    images, texts = encoded_pair(fixture)
    scores = matcher(images, texts)
    assert_close(scores, fixture[f"out.{option}.scores"])
    check_gradients(fixture, option, scores, images, texts)


@pytest.mark.parametrize(("name", "option"), TEST)
def test_inference_scores_agree(name, option) -> None:
    fixture = load_fixture(name)
    matcher = reference(lambda_softmax=fixture.options[option]["lambda_softmax"]).eval()
    matcher.reference.state[1] = fixture.options[option]["thres_safe"]
    images, texts = encoded_pair(fixture)
    scores = matcher(images, texts)
    assert_close(scores, fixture[f"out.{option}.scores"])
    check_gradients(fixture, option, scores, images, texts)


def check_gradients(fixture, option, scores, images, texts) -> None:
    if f"grad.{option}.images" in fixture.tensors:
        scores.sum().backward()
        assert_gradient_close(images.fragments.grad, fixture[f"grad.{option}.images"])
        assert_gradient_close(texts.fragments.grad, fixture[f"grad.{option}.captions"])


BOUNDARY = [
    (name, option)
    for name in ("naaf-train-boundary", "naaf-train-boundary-wide")
    for option in load_fixture(name).options
]


@pytest.mark.parametrize(("name", "option"), BOUNDARY)
def test_the_reference_state_machine_ends_in_the_stored_state(name, option) -> None:
    fixture = load_fixture(name)
    hyper = {**fixture.hyper, **fixture.options[option]}
    matcher = reference(alpha=hyper["alpha"], lambda_softmax=hyper["lambda_softmax"]).train()
    start = {**fixture.hyper["initial_state"], **fixture.options[option]}
    matcher.reference.state[0], matcher.reference.state[1] = start["thres"], start["thres_safe"]
    images, texts = encoded_pair(fixture, torch.float64)
    scores = matcher(images, texts)
    assert_close(scores, fixture[f"out.{option}.scores"])
    assert_close(matcher.reference.state, fixture[f"out.{option}.state_after"])
    loss = (
        create_objective("hardest").compute(scores, torch.eye(len(scores)).bool(), Context()).loss
    )
    assert_close(loss, fixture[f"out.{option}.loss"])
    if f"out.{option}.second_call.scores" in fixture.tensors:
        again = matcher(images, texts)
        assert_close(again, fixture[f"out.{option}.second_call.scores"])
        assert_close(matcher.reference.state, fixture[f"out.{option}.second_call.state_after"])


@given(
    mean_neg=st.floats(-0.2, 0.6),
    gap=st.floats(1e-3, 0.6),
    std_pos=st.floats(0.002, 0.5),
    std_neg=st.floats(0.002, 0.5),
    alpha=st.floats(0.05, 20.0),
    alike=st.booleans(),
)
def test_no_boundary_of_a_dense_grid_has_a_lower_weighted_error(
    mean_neg, gap, std_pos, std_neg, alpha, alike
) -> None:
    std_neg = std_pos * (1 + 1e-9) if alike else std_neg
    numbers = (mean_neg + gap, std_pos, mean_neg, std_neg, alpha)
    grid = torch.linspace(0, 1, 4001, dtype=torch.float64)
    above = torch.special.erfc((grid - mean_neg) / (std_neg * math.sqrt(2))) / 2
    below = torch.special.erfc((numbers[0] - grid) / (std_pos * math.sqrt(2))) / 2
    t = optimal_boundary(*numbers)
    assert 0.0 <= t <= 1.0
    assert weighted_error(t, *numbers) <= float((alpha * above + below).min()) + 1e-9


@pytest.mark.parametrize(
    ("numbers", "end"),
    [
        ((0.40, 0.30, 0.39, 0.05, 1e-9), 0.0),  # the densities never cross
        ((0.38, 0.18, 0.34, 0.06, 0.35), 0.0),  # eq. 4 has a root inside, and the end is lower
        ((0.60, 0.05, 0.59, 0.30, 1e6), 1.0),
        ((0.45, 0.08, 0.39, 0.12, 1.85), 1.0),
    ],
)
def test_an_end_is_the_boundary_where_no_stationary_point_is_lower(numbers, end) -> None:
    assert optimal_boundary(*numbers) == end


@pytest.mark.parametrize(
    "numbers", [(0.40, 0.12, 0.22, 0.06), (0.45, 0.15, 0.25, 0.07), (0.3, 0.02, 0.1, 0.2)]
)
def test_from_adjust_epoch_on_the_boundary_is_not_the_mirror_root(numbers) -> None:
    learned = MismatchBoundary(alpha=2.0, adjust_epoch=3, momentum=0.1, min_samples=2)
    for epoch, expected in ((2, optimal_boundary(*numbers, 2.0)), (3, numbers[0] - 3 * numbers[1])):
        learned.observe(*samples(*numbers), epoch)
        assert learned.value == pytest.approx(max(0.0, expected), abs=1e-6)


def samples(mean_pos, std_pos, mean_neg, std_neg) -> tuple[torch.Tensor, torch.Tensor]:
    """Two of each kind, with these means and deviations (of n - 1)."""
    apart = torch.tensor([-1.0, 1.0], dtype=torch.float64) / math.sqrt(2)
    return mean_pos + std_pos * apart, mean_neg + std_neg * apart


@given(
    mean_pos=st.floats(-0.2, 1.0),
    std_pos=st.floats(0.0, 0.4),
    mean_neg=st.floats(-0.3, 0.9),
    std_neg=st.floats(0.0, 0.4),
)
def test_the_adjusted_boundary_is_three_deviations_below_the_matched_mean(
    mean_pos, std_pos, mean_neg, std_neg
) -> None:
    numbers = (mean_pos, std_pos, mean_neg, std_neg)
    learned = MismatchBoundary(alpha=2.0, adjust_epoch=0, momentum=0.1, min_samples=2)
    learned.observe(*samples(*numbers), 0)
    assert learned.value == pytest.approx(min(1.0, max(0.0, mean_pos - 3 * std_pos)), abs=1e-6)


def alpha_star(mean_pos, std_pos, mean_neg, std_neg) -> float:
    """Eq. 5 in closed form: the α with which μ₊ − 3σ₊ is a root of eq. 4."""
    exponent = (mean_pos - 3 * std_pos - mean_neg) ** 2 / (2 * std_neg**2) - 4.5
    return std_neg / std_pos * math.exp(exponent)


def test_eq_3_with_alpha_star_may_be_highest_at_the_adjusted_boundary() -> None:
    """Why μ₊ − 3σ₊ is taken directly: by way of α*, the minimum would lie elsewhere."""
    numbers = (0.40, 0.12, 0.22, 0.06)  # σ₊(μ₊ − μ₋) < 3(σ₊² − σ₋²)
    t, alpha = numbers[0] - 3 * numbers[1], alpha_star(*numbers)
    here, *beside = (weighted_error(x, *numbers, alpha) for x in (t, t - 0.02, t + 0.02))
    assert here > max(beside)
    assert optimal_boundary(*numbers, alpha) != pytest.approx(t, abs=0.02)


@pytest.mark.parametrize("numbers", [(0.40, 0.12, 0.22, 0.06), (0.7, 0.1, 0.1, 0.12)])
def test_alpha_star_makes_the_weighted_densities_equal_at_the_adjusted_boundary(numbers) -> None:
    mean_pos, std_pos, mean_neg, std_neg = numbers
    t = mean_pos - 3 * std_pos
    matched = torch.distributions.Normal(mean_pos, std_pos).log_prob(torch.tensor(t)).exp()
    mismatched = torch.distributions.Normal(mean_neg, std_neg).log_prob(torch.tensor(t)).exp()
    assert float(matched / mismatched) == pytest.approx(alpha_star(*numbers), rel=1e-4)


def test_matched_similarities_that_are_not_the_higher_ones_leave_the_boundary_alone() -> None:
    assert optimal_boundary(0.2, 0.1, 0.6, 0.1, 1.0) is None
    learned = MismatchBoundary(alpha=2.0, adjust_epoch=9, momentum=1.0, min_samples=2)
    learned.observe(*samples(0.6, 0.1, 0.2, 0.1), 0)
    before = learned.value
    learned.observe(*samples(0.2, 0.1, 0.6, 0.1), 0)
    assert learned.value == before > 0
    assert float(learned.mean_pos) == pytest.approx(0.2)


def test_degenerate_distributions_have_defined_answers() -> None:
    assert optimal_boundary(0.6, 0.1, 0.2, 0.1, 1.0) == pytest.approx(0.4)
    assert optimal_boundary(0.5, 0.0, 0.1, 0.0, 2.0) == pytest.approx(0.3, abs=1e-3)


def test_too_few_samples_leave_the_boundary_alone_until_there_are_enough() -> None:
    learned = MismatchBoundary(alpha=1.0, adjust_epoch=99, momentum=0.1, min_samples=50)
    matched, mismatched = 0.6 + 0.1 * torch.randn(30), 0.2 + 0.1 * torch.randn(30)
    learned.observe(matched, mismatched, 0)
    assert learned.value == 0.0
    learned.observe(matched, mismatched, 0)
    assert 0.3 < learned.value < 0.5
    everything = torch.cat([matched, matched]).double()
    assert float(learned.mean_pos) == pytest.approx(float(everything.mean()))
    assert float(learned.std_pos) == pytest.approx(float(everything.std()))


def test_estimates_move_by_the_momentum_and_alpha_is_switched_at_its_epoch() -> None:
    learned = MismatchBoundary(alpha=2.0, adjust_epoch=3, momentum=0.25, min_samples=2)
    learned.observe(torch.tensor([0.5, 0.7]), torch.tensor([0.1, 0.3]), 0)
    learned.observe(torch.tensor([0.7, 0.9]), torch.tensor([0.1, 0.3]), 2)
    assert float(learned.mean_pos) == pytest.approx(0.65)
    before = learned.value
    learned.observe(torch.tensor([0.55, 0.75]), torch.tensor([0.1, 0.3]), 3)
    expected = float(learned.mean_pos) - 3 * float(learned.std_pos)
    assert learned.value == pytest.approx(max(0.0, expected), abs=1e-5)
    assert learned.value != before


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_was_taken_in_counts_before_anybody_reads_or_copies_the_state(device) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")

    def taught() -> MismatchBoundary:
        learned = MismatchBoundary(alpha=1.0, adjust_epoch=99, momentum=0.5, min_samples=2)
        learned.to(device)
        for shift in (0.0, 0.1):
            samples = torch.tensor([0.5, 0.7]) + shift, torch.tensor([0.1, 0.3])
            learned.observe(*(kind.to(device) for kind in samples), 0)
        return learned

    expected = taught().value
    assert 0 < expected < 1
    assert float(taught().state_dict()["boundary"]) == expected
    assert taught().diagnostics()["mismatch/boundary"] == expected
    assert copy.deepcopy(taught()).value == expected
    again = taught()
    again.load_state_dict(MismatchBoundary(1.0, 99, 0.5, 2).state_dict())
    assert again.value == 0.0  # of what was taken in before, nothing is left
    again.boundary.fill_(0.25)
    assert again.value == 0.25
    again.load_state_dict(taught().state_dict())
    assert again.value == expected


def test_a_copy_reads_its_own_numbers() -> None:
    known, number = HostScalarCache(), torch.zeros(())
    number += 1
    assert known.read(number) == [1.0]
    number += 1
    known.store([2.0], number)
    copied = copy.deepcopy({"known": known, "number": number})
    for _ in range(number._version - copied["number"]._version):
        copied["number"] += 1  # as many changes as the first has seen
    assert copied["known"].read(copied["number"]) == [float(copied["number"])]


def batch(pairs: int = 12, seed: int = 0) -> tuple[Encoded, Encoded]:
    """Captions whose words are noisy copies of regions of their own image."""
    generator = torch.Generator().manual_seed(seed)
    regions = l2_normalize(torch.randn(pairs, 5, 16, generator=generator))
    words = l2_normalize(regions[:, :4] + 0.1 * torch.randn(pairs, 4, 16, generator=generator))
    mask = torch.ones(pairs, 4, dtype=torch.bool)
    mask[1::2, 3] = False
    return Encoded(regions, torch.ones(pairs, 5, dtype=torch.bool)), Encoded(words, mask)


@pytest.mark.parametrize("direction", ["t2i", "i2t", "both"])
def test_mining_separates_right_from_wrong_images(direction) -> None:
    matcher = matchers["naaf"](16, direction=direction, min_samples=20)
    images, texts = batch()
    scores = matcher(images, texts)
    matcher.observe(Observation(images, texts, scores, torch.eye(12).bool(), 0, 0))
    for side in matcher.directions:
        learned = matcher.boundaries[side]
        assert float(learned.mean_pos) > float(learned.mean_neg)
        assert float(learned.mean_neg) < learned.value < float(learned.mean_pos)


def test_only_correctly_ranked_captions_are_sampled() -> None:
    matcher = matchers["naaf"](16, min_samples=1)
    images, texts = batch()
    wrong = torch.zeros(12, 12) - torch.eye(12)  # no caption's own image is the best
    matcher.observe(Observation(images, texts, wrong, torch.eye(12).bool(), 0, 0))
    assert int(matcher.boundaries["t2i"].updates) == 0


@pytest.mark.parametrize("side", ["t2i", "i2t"])
@pytest.mark.parametrize("before", [0, 3, 10])
def test_the_sampled_words_are_those_of_a_loop_over_right_captions(side, before) -> None:
    matcher = matchers["naaf"](16, direction=side, min_samples=10**6)
    images, texts = batch()
    images.mask[2, 3:] = False
    ids = torch.arange(12) // 2 * 2  # two captions an image
    positives = ids[:, None] == ids[None, :]
    scores = torch.randn(12, 12, generator=torch.Generator().manual_seed(1)) + 2 * torch.eye(12)
    texts.fragments[5] = scores[:, 5] = torch.nan  # not the right image's, so it does not count
    matcher.batches += before
    matcher.observe(Observation(images, texts, scores, positives, 0, 0))
    result: tuple[list[float], list[float]] = ([], [])
    shift = 1 + before % 11
    for caption in range(12):
        rivals = [float(scores[i, caption]) for i in range(12) if not positives[i, caption]]
        if not all(float(scores[caption, caption]) > rival for rival in rivals):
            continue
        for kind, image in enumerate((caption, (caption + shift) % 12)):
            if kind == 1 and positives[image, caption]:
                continue
            u = texts.fragments[caption][texts.mask[caption]]
            v = images.fragments[image][images.mask[image]]
            sims = u @ v.T
            result[kind].extend((sims if side == "t2i" else sims.T).amax(1).tolist())
    assert all(result)
    pending = matcher.boundaries[side].pending
    for kind, samples in enumerate(result):
        expected = [len(samples), sum(samples), sum(x * x for x in samples)]
        assert pending[kind].tolist() == pytest.approx(expected, rel=1e-5)


def test_the_boundary_is_saved_with_the_model_and_carries_no_gradient() -> None:
    matcher = matchers["naaf"](16, min_samples=20)
    images, texts = batch()
    matcher.observe(Observation(images, texts, matcher(images, texts), torch.eye(12).bool(), 0, 0))
    again = matchers["naaf"](16, min_samples=20)
    again.load_state_dict(matcher.state_dict())
    assert again.boundary_of("t2i") == matcher.boundary_of("t2i") > 0
    assert torch.equal(again.eval()(images, texts), matcher.eval()(images, texts))
    assert list(matcher.parameters()) == []


def test_a_word_that_matches_nothing_counts_against_the_pair() -> None:
    matcher = matchers["naaf"](16, boundary=0.5, intra="none").eval()
    images, texts = batch(pairs=2)
    alien = texts.fragments.clone()
    alien[0, 2] = -images.fragments[0].sum(0) / images.fragments[0].sum(0).norm()
    strange = Encoded(alien, texts.mask)
    parts = matcher.word_parts(images[:1], strange[:1])
    assert parts.negative[2] < 0
    assert parts.negative[[0, 1, 3]].tolist() == [0, 0, 0]
    assert matcher(images[:1], strange[:1]) < matcher(images[:1], texts[:1])


def test_effects_add_up_to_the_score() -> None:
    naaf = matchers["naaf"]
    variants = naaf(16), naaf(16, intra="always"), naaf(16, negative=False), reference()
    for matcher in (variant.eval() for variant in variants):
        images, texts = batch()
        parts = matcher.word_parts(images[3:4], texts[5:6])
        total = (parts.positive + parts.negative).sum()
        assert torch.allclose(total, matcher(images[3:4], texts[5:6])[0, 0], atol=1e-6)


def test_all_words_below_the_boundary_leave_relevance_and_the_penalty() -> None:
    matcher = matchers["naaf"](16, boundary=0.999, intra="none").eval()
    images, texts = batch()
    result = matcher.effects(one_pair(texts[:1], images[:1])[0], 0.999)
    assert result.s_f.abs().max() == 0
    assert (result.s_neg < 0).all()
    assert (result.s_r != 0).any()
    assert matcher(images, texts).isfinite().all()


def grouped(images: int = 6, seed: int = 0) -> tuple[Encoded, Encoded, torch.Tensor]:
    """Images with one to three captions each, and which texts are theirs."""
    regions, words = batch(pairs=images, seed=seed)
    owners = torch.arange(images).repeat_interleave(torch.arange(images) % 3 + 1)
    return regions, words[owners], torch.arange(images)[:, None] == owners[None, :]


@pytest.mark.parametrize("side", ["t2i", "i2t"])
@pytest.mark.parametrize("before", [0, 4, 9])
def test_images_with_several_captions_are_mined_as_a_loop_over_right_captions_does(
    side, before
) -> None:
    matcher = matchers["naaf"](16, direction=side, min_samples=10**6)
    images, texts, positives = grouped()
    images.mask[2, 3:] = False
    count = len(texts)
    noise = torch.randn(6, count, generator=torch.Generator().manual_seed(1))
    scores = noise + 1.5 * positives
    matcher.batches += before
    owner, shift = positives.int().argmax(0).tolist(), 1 + before % (count - 1)
    result: tuple[list[float], list[float]] = ([], [])
    right = [
        all(scores[owner[t], t] > scores[i, t] for i in range(6) if i != owner[t])
        for t in range(count)
    ]
    assert 0 < sum(right) < count
    for caption in range(count):
        other = (caption - shift) % count
        for kind, text in enumerate((caption, other)):
            if right[text] and (kind == 0 or owner[text] != owner[caption]):
                u = texts.fragments[text][texts.mask[text]]
                sims = u @ images.fragments[owner[caption]][images.mask[owner[caption]]].T
                result[kind].extend((sims if side == "t2i" else sims.T).amax(1).tolist())
    texts_before = [0, *positives.sum(1).cumsum(0).tolist()]
    shares = [(0, 4), (4, 6)]  # of two processes, which together see what one sees
    whole = (
        Mismatches.of(Observation(images, texts, scores, positives, 0, 0), shift)
        .samples(side)
        .moments()
    )
    parts = []
    for a, b in shares:
        own = slice(texts_before[a], texts_before[b])
        seen = Observation(images[a:b], texts, scores, positives, a, 0, own)
        compared = Mismatches.of(seen, shift)
        assert len(compared.sims) == own.stop - own.start  # none that another process counts
        parts.append(compared.samples(side).moments())
    matcher.observe(Observation(images, texts, scores, positives, 0, 0))
    for sums in (whole, sum(parts), matcher.boundaries[side].pending):
        for kind, samples in enumerate(result):
            expected = [len(samples), sum(samples), sum(x * x for x in samples)]
            assert sums[kind].tolist() == pytest.approx(expected, rel=1e-5)


def side_by_side(encoded: Encoded) -> Encoded:
    """As two copies of an encoder give it."""
    return Encoded(torch.cat([encoded.fragments, encoded.fragments], -1), encoded.mask)


def test_extra_pairs_scored_in_training_leave_the_thresholds_of_the_public_code_alone() -> None:
    """Foils or mined candidates: a handful of pairs, far fewer words than are sampled for one."""
    matcher = reference(min_samples=20).train()
    images, texts = batch()
    matcher(images, texts)
    left = matcher.reference.state.clone()
    assert left[0] > 0
    scores = paired_scores(matcher, images[:3], texts[3:6])
    assert torch.equal(matcher.reference.state, left)
    twins = EnsembleMatcher([matcher, matcher])
    paired_scores(twins, *(side_by_side(side) for side in (images[:3], texts[3:6])))
    assert torch.equal(matcher.reference.state, left)
    matcher.mining = False  # the boundary as it is
    assert_close(scores, matcher(images[:3], texts[3:6]).diagonal())


@pytest.mark.parametrize(
    "option", [{"lambda_intra": 7.0}, {"adjust_epoch": 3}, {"momentum": 0.5}, {"boundary": 0.2}]
)
def test_an_option_that_the_reference_form_does_not_read_is_refused(option) -> None:
    [name] = option
    with pytest.raises(ConfigError, match=f"'naaf-reference' has no option '{name}'"):
        matchers.create("naaf-reference", option, 16)
    matchers["naaf"](16, **option)


def test_diagnostics_show_both_directions() -> None:
    matcher = matchers["naaf"](16, direction="both", min_samples=20)
    images, texts = batch()
    matcher.observe(Observation(images, texts, matcher(images, texts), torch.eye(12).bool(), 0, 0))
    shown = matcher.diagnostics()
    for side in ("t2i", "i2t"):
        assert shown[f"mismatch/{side}/boundary"] == matcher.boundary_of(side)
        assert shown[f"mismatch/{side}/mean_pos"] == float(matcher.boundaries[side].mean_pos)
    assert shown["mismatch/t2i/mean_pos"] != shown["mismatch/i2t/mean_pos"]


def test_an_adjust_epoch_that_is_never_reached_is_noted() -> None:
    [note] = matchers["naaf"](16, adjust_epoch=10).notes(epochs=10)
    assert "adjust_epoch=10" in note
    assert "10 epochs" in note
    assert matchers["naaf"](16, adjust_epoch=9).notes(epochs=10) == []
    assert matchers["naaf"](16, mining=False).notes(epochs=10) == []
    assert reference().notes(epochs=1) == []
