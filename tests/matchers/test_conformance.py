"""What holds for every matcher of fragments: padding, order, tiles, gradients, extremes.

A matcher is tested by being registered; some are tested in further forms as well.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from counterfoil.core.errors import ArgumentError
from counterfoil.core.tensors.modes import exporting
from counterfoil.encoders import Encoded
from counterfoil.kernels import tiled
from counterfoil.matchers import FragmentMatcher, fragment_matcher, matchers
from counterfoil.matchers.naaf import NAAF
from tests.conftest import thinned

DIM = 32
FORMS = {
    "scan-t2i/mean": {"aggregation": "mean", "raw_norm": "softmax"},
    "scan-i2t/max": {"aggregation": "max"},
    "bfan/prob": {"focal": "prob"},
    "chan/tha": {"coding": "tha", "pooling": "softmax"},
    "chan/vsa": {"coding": "vsa", "pooling": "max"},
    "chan/mean": {"pooling": "mean"},
    "imram/text": {"mode": "text", "steps": 2, "normalize": True},
}
SMALL = {
    "uniter": {"layers": 2, "heads": 2, "ffn": 64},
    **{name: {"sim_dim": 32} for name in ("saf", "sgr", "sgraf")},
}
"""Sizes of a matcher's own, which no property depends on."""

NAMES = [name for name in matchers if getattr(matchers[name], "needs", "") == "fragments"]
NAMES += [form for form in FORMS if form.split("/")[0] in matchers]
FIRST = [name for name in matchers if name in NAMES and name not in ("scan", "sgraf")]
"""Every matcher in its own form, but for two that only add up others' scores."""

every_matcher = pytest.mark.parametrize("name", thinned(NAMES, *FIRST))
EXAMPLES = max(2, settings.default.max_examples // 8)


def make(name: str, dtype: torch.dtype = torch.float32) -> FragmentMatcher:
    torch.manual_seed(0)
    options = SMALL.get(name, {}) | FORMS.get(name, {})
    return matchers[name.split("/")[0]](DIM, **options).to(dtype).eval()


def side(lengths: list[int], longest: int, seed: int, dtype=torch.float32) -> Encoded:
    """Unit fragments with a common part, so that attention has something to find."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(4, DIM, generator=torch.Generator().manual_seed(99))
    x = torch.randn(len(lengths), longest, DIM, generator=generator)
    which = torch.randint(4, (len(lengths), longest), generator=generator)
    mask = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
    x = F.normalize(x + shared[which], dim=-1) * mask[..., None]
    corners = torch.rand(len(lengths), longest, 4, generator=generator).sort(-1).values
    boxes = corners * mask[..., None]
    links = torch.rand(len(lengths), longest, longest, generator=generator) < 0.4
    links = (links | links.mT) & mask[:, None] & mask[..., None]
    return Encoded(x.to(dtype), mask, None, boxes.to(dtype), links)


def batch(seed: int = 0, dtype=torch.float32) -> tuple[Encoded, Encoded]:
    return side([6, 1, 4, 6], 6, seed, dtype), side([7, 3, 1, 5, 7], 7, seed + 50, dtype)


def with_junk(encoded: Encoded, seed: int) -> Encoded:
    noise = torch.randn(encoded.fragments.shape, generator=torch.Generator().manual_seed(seed))
    junk = 3.0 * noise * ~encoded.mask[..., None]
    return replace(encoded, fragments=encoded.fragments + junk)


def spread(encoded: Encoded, places: list[int], length: int) -> Encoded:
    """The same fragments in the same order at other places, with padding before and between."""
    wide = encoded.pad_to(length + 1)  # the last place is padding, to fill the gaps with
    index = torch.full((length,), length)
    index[torch.tensor(places)] = torch.arange(len(places))
    return replace(
        wide,
        fragments=wide.fragments[:, index],
        mask=wide.mask[:, index],
        boxes=wide.boxes[:, index],
        graph=wide.graph[:, index][:, :, index],
    )


def with_gradient(encoded: Encoded) -> Encoded:
    return replace(encoded, fragments=encoded.fragments.clone().requires_grad_())


def gradients(name: str, images: Encoded, texts: Encoded) -> list[Tensor]:
    """Of a generic function of the scores, with respect to both sides and all parameters."""
    matcher = make(name, images.fragments.dtype)
    images, texts = with_gradient(images), with_gradient(texts)
    scores = matcher(images, texts)
    weights = torch.randn(scores.shape, generator=torch.Generator().manual_seed(5))
    wanted = [images.fragments, texts.fragments, *matcher.parameters()]
    result = torch.autograd.grad((scores * weights).sum(), wanted, allow_unused=True)
    return [x for x in result if x is not None]


def assert_same(mine: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    scale = max(1.0, float(expected.detach().abs().max()))
    error = float((mine - expected).detach().abs().max()) / scale
    assert error <= tolerance, f"differs by {error:.2e}"


@every_matcher
@settings(max_examples=EXAMPLES)
@given(seed=st.integers(0, 999), more_regions=st.integers(0, 4), more_words=st.integers(1, 4))
def test_padding_never_changes_a_score(name, seed, more_regions, more_words) -> None:
    images, texts = batch(seed)
    matcher = make(name)
    expected = matcher(images, texts)
    images = images.pad_to(images.mask.shape[1] + more_regions)
    texts = texts.pad_to(texts.mask.shape[1] + more_words)
    assert_same(matcher(images, texts), expected)
    # padding is zero by contract; no matcher is to rely on it
    assert_same(matcher(with_junk(images, seed), with_junk(texts, seed)), expected)


@every_matcher
@pytest.mark.parametrize("grad", [True, False])
def test_padding_may_precede_fragments_and_stand_between_them(name, grad) -> None:
    images, texts = batch(4)
    images, texts = images[1:3], texts[1:4]  # shorter than their padded length
    matcher = make(name)
    first = 0 if name == "uniter" else 1  # it reads the score at the first place of a text
    with torch.set_grad_enabled(grad):
        expected = matcher(images, texts)
        assert_same(matcher(spread(images, [2, 3, 5, 6, 7, 8], 9), texts), expected)
        assert_same(matcher(images, spread(texts, [first, 4, 5, 6, 7, 9, 10], 11)), expected)


@every_matcher
@settings(max_examples=EXAMPLES)
@given(seed=st.integers(0, 999))
def test_order_never_changes_a_score(name, seed) -> None:
    images, texts = batch(seed)
    matcher = make(name)
    expected = matcher(images, texts)
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (torch.randperm(len(x), generator=generator) for x in (images, texts))
    assert_same(matcher(images[rows], texts[columns]), expected[rows][:, columns])
    shuffled = torch.rand(images.mask.shape, generator=generator) + 2.0 * ~images.mask
    places = shuffled.argsort(1)[..., None]
    moved = replace(
        images,
        fragments=images.fragments.take_along_dim(places, 1),
        boxes=images.boxes.take_along_dim(places, 1),
    )
    assert_same(matcher(moved, texts), expected)


@every_matcher
@pytest.mark.parametrize("cells", thinned([1, 700], 700))
def test_tiles_never_change_a_score_or_a_gradient(name, cells) -> None:
    images, texts = (items[1:] for items in batch(3))
    # in float64: a kink within the rounding of float32 has one slope in one tile, one in another
    wide = [items[1:] for items in batch(3, torch.float64)]
    expected, slopes = make(name)(images, texts), gradients(name, *wide)
    with (
        mock.patch.object(tiled, "CPU_CELLS", cells),
        mock.patch.object(tiled, "CPU_TILE", cells),
        mock.patch.object(fragment_matcher, "CACHED_CELLS", 0),
        mock.patch.object(fragment_matcher, "BLOCK_CELLS", cells),
    ):
        assert_same(make(name)(images, texts), expected)
        cut = gradients(name, *wide)
    assert len(cut) == len(slopes)
    for mine, whole in zip(cut, slopes, strict=True):
        assert_same(mine, whole, 1e-9)


@every_matcher
def test_a_pair_scores_the_same_alone(name) -> None:
    images, texts = batch(4)
    matcher = make(name)
    expected = matcher(images, texts)
    pieces = [
        torch.cat([matcher(images[i : i + 1], texts[j : j + 1]) for j in range(len(texts))], 1)
        for i in range(len(images))
    ]
    assert_same(torch.cat(pieces), expected)


@every_matcher
def test_gradients_reach_both_sides_and_no_padding(name) -> None:
    images, texts = batch(5)
    slopes = gradients(name, images, texts)
    for slope, items in zip(slopes, (images, texts), strict=False):
        assert slope.isfinite().all()
        assert slope[items.mask].abs().amax(-1).gt(0).float().mean() > 0.5
        assert not slope[~items.mask].any()


@every_matcher
def test_every_parameter_gets_a_gradient(name) -> None:
    parameters = list(make(name).parameters())
    slopes = gradients(name, *batch(6))[2:]
    assert len(slopes) == len(parameters)
    assert all(slope.isfinite().all() for slope in slopes)


@every_matcher
def test_slopes_are_those_of_the_scores(name) -> None:
    """Directional derivatives in float64, left out where a kink lies within the step."""
    images = side([3, 2], 3, 7, torch.float64)
    texts = side([3, 1], 3, 8, torch.float64)
    matcher = make(name, torch.float64)

    def total(x: Tensor, y: Tensor) -> Tensor:
        scores = matcher(replace(images, fragments=x), replace(texts, fragments=y))
        return (scores * torch.tensor([[1.0, -0.5], [0.3, 2.0]], dtype=torch.float64)).sum()

    sides = [images.fragments.requires_grad_(), texts.fragments.requires_grad_()]
    slopes = torch.autograd.grad(total(*sides), sides)
    generator = torch.Generator().manual_seed(1)
    smooth = 0
    for _ in range(6):
        ways = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in sides]
        expected = sum(float((slope * way).sum()) for slope, way in zip(slopes, ways, strict=True))
        with torch.no_grad():
            at = {
                h: total(*(x + h * way for x, way in zip(sides, ways, strict=True)))
                for h in (-1e-5, -5e-6, 0.0, 5e-6, 1e-5)
            }
        forward, backward = (at[1e-5] - at[0.0]) / 1e-5, (at[0.0] - at[-1e-5]) / 1e-5
        central = float(at[5e-6] - at[-5e-6]) / 1e-5
        if abs(float(forward - backward)) > 1e-2 * max(1.0, abs(central)):
            continue
        smooth += 1
        assert central == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert smooth >= 3


@every_matcher
def test_bf16_scores_are_close(name) -> None:
    images, texts = batch(9)
    matcher = make(name)
    expected = matcher(images, texts)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = matcher(images, texts).float()
    assert rough.isfinite().all()
    spread = float((expected - expected.mean()).detach().std())
    assert float((rough - expected).detach().abs().mean()) <= 0.1 * spread + 0.01


@every_matcher
@pytest.mark.parametrize(("regions", "words"), [(1, 1), (1, 6), (6, 1)])
def test_one_word_one_region_batch_of_one(name, regions, words) -> None:
    images, texts = side([regions], regions, 10), side([words], words, 11)
    scores = make(name)(images, texts)
    assert scores.shape == (1, 1)
    assert scores.isfinite().all()
    assert all(slope.isfinite().all() for slope in gradients(name, images, texts))


@every_matcher
def test_an_item_without_fragments_gives_no_nan_and_disturbs_nobody(name) -> None:
    images, texts = batch(12)
    expected = make(name)(images, texts)
    nothing = side([0], 2, 13)
    images, texts = Encoded.cat([images, nothing]), Encoded.cat([texts, nothing])
    scores = make(name)(images, texts)
    assert not scores.isnan().any()
    assert_same(scores[:-1, :-1], expected)
    slopes = torch.autograd.grad(
        make(name)(with_gradient(images), fresh := with_gradient(texts))[:-1, :-1].sum(),
        fresh.fragments,
    )
    assert slopes[0].isfinite().all()
    for single in ((nothing, texts), (images, nothing), (nothing, nothing)):
        assert not make(name)(*single).isnan().any()


def plain_batch(kind: str) -> tuple[Encoded, Encoded]:
    """What a matcher reads: fragments, or one vector per item."""
    images, texts = batch()
    if matchers[kind].needs == "fragments":
        return images, texts
    vectors = [F.normalize(x.fragments.sum(1), dim=-1) for x in (images, texts)]
    return tuple(Encoded(None, x.new_zeros(len(x), 0).bool(), x) for x in vectors)


@pytest.mark.parametrize("name", list(matchers))
def test_plain_tensors_score_as_encoded_ones_do(name) -> None:
    images, texts = plain_batch(name)
    matcher = make(name)
    expected = matcher(images, texts)
    if images.fragments is None:
        assert torch.equal(matcher(images.pooled, texts.pooled), expected)
        return
    given = (images.fragments, texts.fragments, images.mask, texts.mask)
    if matcher.needs_boxes:
        with pytest.raises(ArgumentError, match="pass Encoded"):
            matcher(*given)
        assert torch.equal(matcher(images, texts.fragments, text_mask=texts.mask), expected)
        return
    assert torch.equal(matcher(*given), expected)
    whole = matcher(images.fragments[:1], texts.fragments[:1])
    assert_same(whole, expected[:1, :1])  # no padding in these two


@every_matcher
def test_masked_fragments_of_plain_tensors_may_be_nan(name) -> None:
    """As zeros divided by their length are."""
    images, texts = batch()
    matcher = make(name)
    expected = matcher(images, texts).detach()
    sides = [(x.fragments.masked_fill(~x.mask[..., None], torch.nan), x.mask) for x in batch()]
    vectors = [x.requires_grad_() for x, _ in sides]
    if matcher.needs_boxes:
        scores = matcher(images, vectors[1], text_mask=texts.mask)
    else:
        scores = matcher(*vectors, images.mask, texts.mask)
    assert_same(scores, expected)
    scores.sum().backward()
    for x, mask in [(x, mask) for x, mask in sides if x.grad is not None]:
        assert x.grad.isfinite().all()
        assert (x.grad[~mask] == 0).all()


@pytest.mark.parametrize("name", list(matchers))
def test_a_matcher_refuses_what_it_cannot_compare(name) -> None:
    images, texts = plain_batch(name)
    matcher = make(name)
    x = images.pooled if images.fragments is None else images.fragments
    wrong_rank = x[:, None] if x.ndim == 2 else x[:, 0]
    with pytest.raises(ArgumentError, match=r"texts: .*expected shape \[n, .*D\], got \[4"):
        matcher(images, wrong_rank)
    with pytest.raises(ArgumentError, match="texts: expected an Encoded or a tensor of floats"):
        matcher(images, x.tolist())
    with pytest.raises(ArgumentError, match="image_mask: an Encoded has a mask of its own"):
        matcher(images, texts, images.mask)
    with pytest.raises(ArgumentError, match="text_mask"):
        matcher(images, x, text_mask=torch.ones(1, 1))
    with pytest.raises(ArgumentError, match=rf"embed_size={DIM}\): expected text vectors of {DIM}"):
        matcher(images, torch.cat([x, x], dim=-1))


@every_matcher
@pytest.mark.parametrize("grad", [True, False])
def test_a_batch_without_items_has_no_scores(name, grad) -> None:
    matcher, (images, texts) = make(name), batch()
    with torch.set_grad_enabled(grad):
        assert matcher(images[:0], texts).shape == (0, 5)
        assert matcher(images, texts[:0]).shape == (4, 0)


@every_matcher
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fragments_in_half_precision_are_compared_in_single_precision(name, dtype) -> None:
    matcher, sides = make(name), batch()
    rounded = [replace(x, fragments=x.fragments.to(dtype)) for x in sides]
    expected = matcher(*(replace(x, fragments=x.fragments.float()) for x in rounded))
    scores = matcher(*rounded)
    assert scores.dtype == torch.float32
    assert_same(scores, expected)
    assert_same(matcher(rounded[0], sides[1]), expected, tolerance=0.1)


@every_matcher
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 0.05), (torch.bfloat16, 0.2)])
def test_a_matcher_in_half_precision_has_nearly_the_same_scores(name, dtype, tolerance) -> None:
    matcher, sides = make(name), batch()
    expected = matcher(*sides)
    rounded = [replace(x, fragments=x.fragments.to(dtype)) for x in sides]
    if (name, dtype) == ("gsmn", torch.float16):
        with pytest.raises(ArgumentError, match="GSMN has no float16"):
            matcher.to(dtype)(*rounded)
        return
    scores = matcher.to(dtype)(*rounded)
    assert scores.dtype == (dtype if name == "uniter" else torch.float32)
    assert_same(scores.float(), expected, tolerance)


@pytest.mark.parametrize("name", [name for name in NAMES if [*make(name).parameters()]])
def test_vectors_and_weights_must_have_the_same_dtype(name) -> None:
    images, texts = batch(dtype=torch.float64)
    with pytest.raises(ArgumentError, match=r"dtype of its weights, torch.float32, got .*float64"):
        make(name)(images, texts)


@every_matcher
def test_both_sides_must_be_comparable(name) -> None:
    matcher, (images, texts) = make(name), batch()
    with pytest.raises(ArgumentError, match=r"same dtype, got torch.float32 and torch.float64"):
        matcher(images, replace(texts, fragments=texts.fragments.double()))
    with pytest.raises(ArgumentError, match=r"texts: .* length 1 or more, got \[5, 0, 32\]"):
        matcher(images, texts.trim_to(0))
    with pytest.raises(
        ArgumentError, match=r"text_mask: .*booleans \[5, 7\].* torch.bool \[5, 3\]"
    ):
        matcher(images, replace(texts, mask=texts.mask[:, :3]))
    with pytest.raises(ArgumentError, match=r"image_mask: .*got torch.float32"):
        matcher(replace(images, mask=images.mask.float()), texts)


def test_widths_are_compared_if_the_matcher_reads_any() -> None:
    with pytest.raises(ArgumentError, match=r"same width, .* \[2, 5, 16\] and \[3, 4, 8\]"):
        NAAF()(torch.randn(2, 5, 16), torch.randn(3, 4, 8))
    with pytest.raises(ArgumentError, match=r"text_mask: .*got list"):
        NAAF()(torch.randn(2, 5, 16), torch.randn(1, 2, 16), text_mask=[[True, False]])


@pytest.mark.parametrize("width", ["16", 0, -1, 2.0, True])
def test_the_width_is_a_positive_integer(width) -> None:
    with pytest.raises(ArgumentError, match=r"NAAF\(embed_size=.*expected the width"):
        NAAF(width)


SIZED = ("imram", "saf", "sgr", "sgraf", "uniter")


@pytest.mark.parametrize("name", sorted(set(matchers) - set(SIZED)))
def test_a_matcher_without_weights_reads_vectors_of_any_width(name) -> None:
    torch.manual_seed(0)
    anything = matchers[name]().eval()
    assert torch.equal(anything(*plain_batch(name)), make(name)(*plain_batch(name)))


PADDED_FORMS = {
    "naaf/both": {"direction": "both", "mining": False, "boundary": 0.3},
    "naaf/no-masks": {"masks": False, "mining": False, "intra": "none"},
    "naaf-reference/both": {"direction": "both"},
    "bfan/i2t": {"direction": "i2t"},
    "smooth-chamfer/max": {"kind": "max"},
    "smooth-chamfer/avg": {"kind": "avg"},
    "smooth-chamfer/chamfer": {"kind": "chamfer"},
}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "uniter"] + [*PADDED_FORMS])
def test_the_padded_path_of_an_export_scores_the_same(name) -> None:
    torch.manual_seed(0)
    options = {**FORMS, **PADDED_FORMS}.get(name, {})
    matcher = matchers[name.split("/")[0]](DIM, **options).eval()
    images, texts = batch()
    with torch.no_grad():
        expected = matcher(images, texts)
        with exporting():
            result = matcher(images, texts)
            further = matcher(images.pad_to(9), texts.pad_to(8))
    assert torch.allclose(result, expected, atol=1e-5)
    assert torch.allclose(further, expected, atol=1e-5)
