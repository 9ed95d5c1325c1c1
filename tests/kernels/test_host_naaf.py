"""NAAF on a CPU: the path of few passes gives what `NAAF.branches` gives in double precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from counterfoil.encoders import Encoded
from counterfoil.evaluation import score_engine
from counterfoil.evaluation.score_engine import score_matrix
from counterfoil.kernels import host_naaf as host
from counterfoil.kernels import host_sides
from counterfoil.kernels.digits import digits, multiplied_fast, multiply
from counterfoil.kernels.host_sides import Kept
from counterfoil.kernels.side_by_side import LANES, MOST_WORDS, groups, side_by_side
from counterfoil.kernels.workers import in_parallel
from counterfoil.matchers import matchers

fast_digits = pytest.mark.skipif(not multiplied_fast(), reason="this CPU has no int8 tile units")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def side(lengths: list[int], dim: int, seed: int, anywhere: bool = False) -> Encoded:
    """Unit fragments with noise at padded places; real ones first, or anywhere."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(1, *lengths) + 1
    x = F.normalize(torch.randn(len(lengths), longest, dim, generator=generator), dim=-1)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    if anywhere:
        mask = mask[:, torch.randperm(longest, generator=generator)]
    return Encoded(x, mask)


def doubled(encoded: Encoded) -> Encoded:
    assert encoded.fragments is not None
    return replace(encoded, fragments=encoded.fragments.double())


either = pytest.mark.parametrize("large", [False, True], ids=["by PyTorch", "compiled"])


def host_scores(matcher, images: Encoded, texts: Encoded, large: bool = False, kept=None):
    pair = (images.fragments, images.mask), (texts.fragments, texts.mask)
    return host.host_naaf(*matcher.recipes(), *pair, kept=kept or Kept(large))


@given(
    regions=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    words=st.lists(st.integers(0, 12), min_size=1, max_size=40),
    options=st.sampled_from(
        [
            {},
            {"intra": "none"},
            {"negative": False},
            {"form": "reference", "mining": False},
            {"lambda_softmax": 9.0, "lambda_intra": 3.0},
        ]
    ),
    boundary=st.sampled_from([-2.0, -0.103, 0.0, 0.301, 0.703, 0.999]),
    anywhere=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_scores_are_those_of_double_precision(
    regions, words, options, boundary, anywhere, seed
) -> None:
    reference = options.get("form") == "reference"  # which learns its boundary, and is given none
    given = options if reference else {**options, "boundary": boundary}
    matcher = matchers["naaf"](8, **given).eval()
    if reference:
        matcher.reference.state[1] = boundary
    images, texts = side(regions, 8, seed, anywhere), side(words, 8, seed + 1, anywhere)
    expected = matcher.scores(doubled(images), doubled(texts))
    compiled = host_scores(matcher, images, texts, large=True)
    assert torch.allclose(compiled.double(), expected, atol=2e-5)
    found = host_scores(matcher, images, texts)
    assert torch.allclose(found.double(), expected, atol=2e-5)
    with torch.inference_mode():
        assert torch.equal(matcher(images, texts), found)  # this is the path that is taken


@pytest.mark.parametrize(("few", "large"), [(0.0, False), (2.0, False), (0.0, True)])
def test_below_a_high_boundary_words_attend_to_nothing(monkeypatch, few, large) -> None:
    monkeypatch.setattr(host, "FEW", few)
    matcher = matchers["naaf"](8, boundary=0.97).eval()
    images, texts = side([4, 4, 4], 8, 0), side([5, 3], 8, 1)
    assert images.fragments is not None
    assert texts.fragments is not None
    texts.fragments[0, :2] = images.fragments[1, :2]  # these two match; the others do not
    texts.fragments[1, 0] = images.fragments[0, 0]
    found = host_scores(matcher, images, texts, large)
    expected = matcher.scores(doubled(images), doubled(texts))
    assert torch.allclose(found.double(), expected, atol=1e-5)


@either
@pytest.mark.parametrize("tiny", [1e-8, 1e-6, 1e-5])
def test_a_tiny_similarity_is_raised_no_further_than_by_double_precision(tiny, large) -> None:
    matcher = matchers["naaf"](2, boundary=0.1).eval()
    regions = torch.tensor([[[1.0, 0.0], [0.6, -0.8]]])
    words = F.normalize(torch.tensor([[[tiny, 1.0], [-0.5, 0.1]]]), dim=-1)
    images, texts = (Encoded(x, torch.ones(1, 2, dtype=torch.bool)) for x in (regions, words))
    found = host_scores(matcher, images, texts, large)
    expected = matcher.scores(doubled(images), doubled(texts))
    assert torch.allclose(found.double(), expected, atol=1e-6)


@either
@pytest.mark.parametrize("scale", [20.0, 40.0])
@pytest.mark.parametrize("cosine", [-1.0, -0.95, -0.5])
def test_the_one_region_is_attended_to_however_unlike_it_is(cosine, scale, large) -> None:
    matcher = matchers["naaf"](2, boundary=-2.0, lambda_softmax=scale).eval()
    regions = torch.tensor([[[1.0, 0.0]]])
    words = torch.tensor([[[cosine, (1 - cosine**2) ** 0.5]]])
    images, texts = (Encoded(x, torch.ones(1, 1, dtype=torch.bool)) for x in (regions, words))
    assert torch.allclose(host_scores(matcher, images, texts, large), torch.tensor(2 * cosine))


@either
def test_fragments_need_not_be_of_length_one(large) -> None:
    matcher = matchers["naaf"](2, boundary=-4.5, lambda_softmax=9.0).eval()
    regions, words = torch.tensor([[[2.0, 0.0], [1.9, 0.5]]]), torch.tensor([[[-2.0, 0.1]]])
    images, texts = (
        Encoded(x, torch.ones(x.shape[:2], dtype=torch.bool)) for x in (regions, words)
    )
    found = host_scores(matcher, images, texts, large)
    expected = matcher.scores(doubled(images), doubled(texts))
    assert torch.allclose(found.double(), expected, atol=1e-5)


@either
def test_sums_of_weights_that_would_not_fit_are_left_to_others(large) -> None:
    matcher = matchers["naaf"](2, boundary=-2.0, lambda_softmax=40.0).eval()
    alike = torch.tensor([1.0, 0.0]).expand(1, 90, 2)
    images = Encoded(alike, torch.ones(1, 90, dtype=torch.bool))
    texts = Encoded(alike[:, :1], torch.ones(1, 1, dtype=torch.bool))
    assert host_scores(matcher, images, texts, large) is None


def test_short_fragments_at_a_sharp_scale_are_left_to_others() -> None:
    matcher = matchers["naaf"](8, lambda_softmax=150.0).eval()
    images, texts = side([4, 4], 8, 0), side([3, 5], 8, 1)
    images, texts = (replace(one, fragments=0.1 * one.fragments) for one in (images, texts))
    assert host_scores(matcher, images, texts) is None
    with torch.inference_mode():
        found = matcher(images, texts).double()
    assert torch.allclose(found, matcher.scores(doubled(images), doubled(texts)), atol=1e-5)


def test_a_caption_that_is_not_a_number_spoils_no_other() -> None:
    matcher = matchers["naaf"](8, boundary=0.6).eval()
    images, texts = side([4] * 3, 8, 0), side([2] * 20 + [9] * 20, 8, 1)
    with torch.inference_mode():
        expected = matcher(images, texts)
    assert texts.fragments is not None
    texts.fragments[30, 0] = torch.nan
    with torch.inference_mode():
        found = matcher(images, texts)
    others = torch.arange(40) != 30
    assert found[:, 30].isnan().all()
    assert torch.allclose(found[:, others], expected[:, others], atol=1e-5)


def test_blocks_and_tiles_make_no_difference(monkeypatch) -> None:
    matcher = matchers["naaf"](16, boundary=0.3).eval()
    images, texts = side([5] * 11, 16, 0), side([3, 9, 4] * 8, 16, 1)
    whole = host_scores(matcher, images, texts)
    for block, tile, few in ((5, 1, 0.25), (20, 300, 0.0), (20, 300, 2.0)):
        monkeypatch.setattr(host, "BLOCK", block)
        monkeypatch.setattr(host, "TILE", tile)
        monkeypatch.setattr(host, "FEW", few)  # every word, or only those above the boundary
        assert torch.allclose(host_scores(matcher, images, texts), whole, atol=1e-6)
    for block in (1, 20):
        monkeypatch.setattr(host, "COMPILED_BLOCK", block)
        assert torch.allclose(host_scores(matcher, images, texts, large=True), whole, atol=1e-6)


def test_groups_at_the_same_time_score_as_one_after_the_other(monkeypatch, two_threads) -> None:
    matcher = matchers["naaf"](16, boundary=0.3).eval()
    images, texts = side([5] * 4, 16, 0), side([*range(2, 30)] * 3, 16, 1)
    alone = host_scores(matcher, images, texts)
    monkeypatch.setattr(host_sides, "PARALLEL", 0)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for large in (False, True):
                found = host_scores(matcher, images, texts, large)
                assert torch.allclose(found, alone, atol=1e-6)


def test_what_it_is_not_made_for_is_left_to_others() -> None:
    matcher = matchers["naaf"](8).eval()
    images, texts = side([3, 2], 8, 0), side([4], 8, 1)
    long = replace(images, fragments=30 * images.fragments)
    trained = replace(images, fragments=images.fragments.clone().requires_grad_())
    for other in (long, trained, doubled(images)):
        assert host_scores(matcher, other, texts) is None
    expected = matcher.scores(doubled(long), doubled(texts))
    assert torch.allclose(matcher(long, texts).double(), expected, atol=1e-3)


@either
@pytest.mark.parametrize(("dtype", "apart"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_halves_are_summed_in_single_precision(dtype, apart, large) -> None:
    matcher = matchers["naaf"](32, boundary=-2.0).eval()  # nothing jumps
    images, texts = side([6] * 5, 32, 0), side([4, 7, 2], 32, 1)
    halves = [replace(x, fragments=x.fragments.to(dtype)) for x in (images, texts)]
    found = host_scores(matcher, *halves, large)
    assert found.dtype == dtype
    expected = matcher.scores(*(doubled(x) for x in halves))
    assert torch.allclose(found.double(), expected, atol=apart)


@given(
    rows=st.integers(1, 300), dim=st.integers(1, 40), size=st.floats(1e-6, 1e6), seed=st.integers(0)
)
def test_two_digits_are_within_half_a_step_of_a_number(rows, dim, size, seed) -> None:
    x = size * torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed % 2**31))
    x[0] = 0
    found = digits(x)
    assert int(torch.stack([found.high, found.low]).int().abs().max()) <= 127
    value = found.scales.double()[:, None] * (254 * found.high.double() + found.low.double())
    step = x.abs().amax(1, keepdim=True).double() / 32384
    assert ((value - x).abs() <= 0.51 * step).all()


@fast_digits
def test_products_of_digits_err_less_than_half_precision() -> None:
    u, v = (F.normalize(torch.randn(n, 1024), dim=-1) for n in (90, 70))
    a, b = digits(v), digits(u)
    found = torch.empty(40, 90)
    multiply(a, slice(30, 70), b.packed(), b.scales, found)
    found *= a.scales[30:, None]
    exact = v[30:].double() @ u.double().T
    halves = v[30:].half().double() @ u.half().double().T
    assert (found - exact).std() < 4e-6
    assert (found - exact).std() < (halves - exact).std()


@fast_digits
def test_many_pairs_are_scored_by_digits_and_few_are_not(monkeypatch) -> None:
    matcher = matchers["naaf"](256, boundary=-2.0).eval()  # nothing jumps
    images, texts = side([7, 4, 7], 256, 0), side([5, 9, 3, 3], 256, 1)
    expected = matcher.scores(doubled(images), doubled(texts))
    few = score_matrix(matcher, images, texts)
    with torch.inference_mode():
        assert torch.equal(few, matcher(images, texts))
    monkeypatch.setattr(score_engine, "LARGE", 0)
    many = score_matrix(matcher, images, texts)
    assert not torch.equal(many, few)
    assert torch.allclose(many.double(), expected, atol=2e-4)
    assert (many - expected).abs().mean() < 2e-5


def test_what_is_kept_of_the_images_serves_other_texts() -> None:
    matcher = matchers["naaf"](16).eval()
    images, kept = side([4, 2, 5], 16, 0), Kept(large=False)
    for seed in (1, 2):
        texts = side([3, 6], 16, seed)
        found = host_scores(matcher, images, texts, kept=kept)
        assert torch.equal(found, host_scores(matcher, images, texts))


def test_what_is_kept_of_the_images_does_not_serve_other_images() -> None:
    """Two threads that score by one matcher may see what the other keeps."""
    matcher, texts = matchers["naaf"](16).eval(), side([3, 6], 16, 9)
    kept = Kept(large=False)
    for seed in (0, 1):
        images = side([4, 2, 5], 16, seed)
        found = host_scores(matcher, images, texts, kept=kept)
        assert torch.equal(found, host_scores(matcher, images, texts))


@given(sizes=st.lists(st.integers(0, 60), max_size=150))
def test_groups_are_runs_of_full_lanes_with_little_padding(sizes) -> None:
    sizes = sorted(sizes)
    found = list(groups(sizes))
    covered = [place for first, last in found for place in range(first, last)]
    assert covered == [place for place, size in enumerate(sizes) if size]
    for first, last in found:
        count = last - first
        assert count % LANES == 0 or last == len(sizes)
        assert count <= LANES or sizes[last - 1] * count <= MOST_WORDS


def test_words_stand_side_by_side_each_once() -> None:
    texts = side([3, 0, 5, 2], 4, 0, anywhere=True)
    assert texts.fragments is not None
    seen = []
    for group in side_by_side(texts.fragments, texts.mask):
        words = group.words.view(*group.real.shape, -1)
        assert words[~group.real].abs().sum() == 0
        for place, caption in enumerate(group.captions.tolist()):
            own = texts.fragments[caption][texts.mask[caption]]
            assert torch.equal(words[group.real[:, place], place], own)
            seen.append(caption)
        assert torch.allclose(group.share.sum(0), torch.ones(len(group.captions)))
    assert sorted(seen) == [0, 2, 3]


def test_workers_keep_the_order_the_mode_and_the_number_of_threads(two_threads) -> None:
    def work(number: int) -> tuple[int, bool, int]:
        return number, torch.is_inference_mode_enabled(), torch.get_num_threads()

    with torch.inference_mode():
        assert in_parallel(work, [3, 1, 2]) == [(3, True, 1), (1, True, 1), (2, True, 1)]
    assert torch.get_num_threads() == 2

    def fail(number: int) -> None:
        raise ValueError(number)

    with pytest.raises(ValueError, match="7"):
        in_parallel(fail, [7, 8])
    assert torch.get_num_threads() == 2
