"""The fused kernels against the eager matchers in double precision.

Triton's interpreter runs them where there is no GPU (tests/conftest.py asks for it).
"""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from counterfoil.encoders.encoded import Encoded
from counterfoil.kernels import attention, dispatch, maxsim, spec
from counterfoil.kernels.triton import launch, training
from counterfoil.kernels.triton import thread_per_caption as lane_scoring
from counterfoil.kernels.triton.packing import interleave, pack
from counterfoil.matchers import fragment_matcher
from counterfoil.matchers.bfan import BFAN
from counterfoil.matchers.chamfer import SmoothChamfer
from counterfoil.matchers.chan import CHAN
from counterfoil.matchers.fragment_matcher import CrossAttentionMatcher
from counterfoil.matchers.naaf import NAAF
from counterfoil.matchers.naaf_reference import ReferenceNAAF
from counterfoil.matchers.scan import SCANI2T, SCANT2I
from tests.conftest import thinned

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime.errors import OutOfResources

from counterfoil.kernels.triton import tile_kernels

D = 16

MATCHERS = {
    **{f"scan-t2i-{how}": (SCANT2I, {"aggregation": how}) for how in ("lse", "mean", "max")},
    "scan-t2i-l2norm": (SCANT2I, {"raw_norm": "l2norm", "aggregation": "sum"}),
    **{f"scan-i2t-{how}": (SCANI2T, {"aggregation": how}) for how in ("lse", "mean", "max")},
    "bfan-equal": (BFAN, {"focal": "equal"}),
    "bfan-prob": (BFAN, {"focal": "prob"}),
    **{f"chan-{how}": (CHAN, {"pooling": how}) for how in ("lse", "mean", "max", "sum", "softmax")},
    "chan-reference": (CHAN, {"form": "reference"}),
    "naaf": (NAAF, {"boundary": 0.3}),
    "naaf-no-intra": (NAAF, {"boundary": 0.3, "intra": "none"}),
    "naaf-positive": (NAAF, {"negative": False}),
    "naaf-reference": (ReferenceNAAF, {}),
    "naaf-reference-both": (ReferenceNAAF, {"direction": "both"}),
    "naaf-i2t": (NAAF, {"boundary": 0.3, "direction": "i2t"}),
    "naaf-both-ways": (NAAF, {"boundary": 0.3, "direction": "both"}),
    "chamfer": (SmoothChamfer, {}),
}
TRAINED = [
    name
    for name in MATCHERS
    if name.startswith(("scan", "bfan", "chan", "naaf"))
    and name not in ("chan-softmax", "naaf-reference", "naaf-reference-both")
]
FIRST = ("scan-t2i-lse", "scan-i2t-lse", "bfan-equal", "chan-lse", "naaf", "naaf-i2t", "chamfer")
"""One of every kernel and direction: those that run where time is short."""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Tiles and groups of a size that the interpreter gets through quickly; any device will do."""
    monkeypatch.setattr(launch, "WORDS", 16)
    monkeypatch.setattr(dispatch, "WORDS", 16)
    monkeypatch.setattr(lane_scoring, "WIDTH", 4)
    monkeypatch.setattr(dispatch, "usable", lambda device, dtype: dtype == torch.float32)


def sides(
    seed: int, images: int = 3, regions: int = 5, lengths: tuple[int, ...] = (2, 1, 4), holes=True
) -> tuple[Encoded, Encoded]:
    """Unit fragments, words near some region, in double precision; holes in both masks."""
    made = torch.Generator().manual_seed(seed)
    v = F.normalize(torch.randn(images, regions, D, generator=made, dtype=torch.float64), dim=-1)
    real = torch.ones(images, regions, dtype=torch.bool)
    if holes and regions > 2:
        real[0, 1] = False
    longest = max(lengths) + 1
    mask = torch.zeros(len(lengths), longest, dtype=torch.bool)
    for caption, length in enumerate(lengths):
        mask[caption, torch.randperm(longest, generator=made)[:length]] = True
    near = v.flatten(0, 1)[torch.randint(images * regions, mask.shape, generator=made)]
    noise = torch.randn(*mask.shape, D, generator=made, dtype=torch.float64)
    u = F.normalize(near + 0.3 * noise, dim=-1) * mask[..., None]
    return Encoded(v * real[..., None], real), Encoded(u, mask)


def single(encoded: Encoded) -> Encoded:
    assert encoded.fragments is not None
    return Encoded(encoded.fragments.float(), encoded.mask)


def made(name: str) -> CrossAttentionMatcher:
    kind, options = MATCHERS[name]
    return kind(D, **options)


def try_fused(specs, images, texts) -> Tensor | None:
    return dispatch.try_fused_scores(specs, images, texts, spec.ScoringJob())


def both_ways(name: str, images: Encoded, texts: Encoded) -> tuple[Tensor, Tensor]:
    """Scores by kernels, and by the eager form in double precision."""
    matcher = made(name).eval()
    with torch.no_grad():
        expected = matcher.double().torch_scores(images, texts)
        result = try_fused(
            matcher.kernel_specs(),
            (single(images).fragments, images.mask),
            (single(texts).fragments, texts.mask),
        )
    assert result is not None
    return result.double(), expected


@pytest.mark.parametrize("way", ["tiles", "lanes"])
@pytest.mark.parametrize("name", thinned(MATCHERS, *FIRST))
def test_kernels_score_as_the_eager_form(name, way, monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "THREAD_PER_CAPTION_CELLS", 0 if way == "lanes" else 1 << 60)
    result, expected = both_ways(name, *sides(len(name)))
    torch.testing.assert_close(result, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("way", thinned(["tiles", "lanes"], "tiles"))
@pytest.mark.parametrize(("wide", "tolerance"), [(True, 5e-5), (False, 5e-2)])
@pytest.mark.parametrize("direction", thinned(["t2i", "i2t"], "t2i"))
def test_naaf_of_halves_rounds_similarities_no_more(
    way, wide, tolerance, direction, monkeypatch
) -> None:
    """In short captions with words that match, what is rounded once more is far off."""
    monkeypatch.setattr(dispatch, "THREAD_PER_CAPTION_CELLS", 0 if way == "lanes" else 1 << 60)
    monkeypatch.setattr(dispatch, "usable", lambda device, dtype: True)
    for module in (launch, lane_scoring):
        monkeypatch.setattr(module, "widens", lambda device: wide)
    made = torch.Generator().manual_seed(0)
    v = F.normalize(torch.randn(2, 12, 256, generator=made), dim=-1)
    matched = v.flatten(0, 1)[torch.randint(24, (16, 4), generator=made)]
    matched = matched * (torch.rand(16, 4, 1, generator=made) < 0.5)
    noise = F.normalize(torch.randn(16, 4, 256, generator=made), dim=-1)
    u = F.normalize(0.6 * matched + 0.8 * noise, dim=-1)
    real, mask = torch.ones(2, 12, dtype=torch.bool), torch.ones(16, 4, dtype=torch.bool)
    matcher = NAAF(256, boundary=0.2, direction=direction).eval()
    with torch.no_grad():
        result = try_fused(matcher.kernel_specs(), (v.half(), real), (u.half(), mask))
        sides = Encoded(v.half().double(), real), Encoded(u.half().double(), mask)
        expected = matcher.double().torch_scores(*sides)
    assert result is not None
    assert float((result.double() - expected).abs().max()) < tolerance


@settings(max_examples=4)
@given(
    seed=st.integers(0, 10**6),
    regions=st.integers(1, 9),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    name=st.sampled_from(
        ["naaf", "naaf-both-ways", "scan-t2i-lse", "scan-i2t-lse", "bfan-equal", "chan-lse"]
    ),
    way=st.sampled_from(["tiles", "lanes"]),
)
def test_any_shape(seed, regions, lengths, name, way) -> None:
    images, texts = sides(seed, 2, regions, tuple(lengths))
    matcher = made(name).eval()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(dispatch, "THREAD_PER_CAPTION_CELLS", 0 if way == "lanes" else 1 << 60)
        expected = matcher.double().torch_scores(images, texts)
        result = matcher.float()(single(images), single(texts))
    torch.testing.assert_close(result.double(), expected, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name",
    thinned(["scan-t2i-lse", "scan-i2t-lse", "chan-lse", "chamfer", "naaf-both-ways"], "chan-lse"),
)
def test_several_tiles_turns_of_a_program_and_parts_of_the_images(name, monkeypatch) -> None:
    monkeypatch.setattr(launch, "images_per_program", lambda tiles, images: 2)
    images, texts = sides(5, images=4, lengths=(9, 8, 9))  # a tile each
    monkeypatch.setattr(launch, "BUFFER", 4 * 5 * 3 * 16 * 3)  # three images at a time
    matcher = made(name).eval()
    with torch.no_grad():
        expected = matcher.double().torch_scores(images, texts)
        result = matcher.float()(single(images), single(texts))
    torch.testing.assert_close(result.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kept", [1 << 27, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", thinned(TRAINED, *(name for name in FIRST if name in TRAINED)))
def test_gradients_are_the_eager_forms(name, kept, monkeypatch) -> None:
    monkeypatch.setattr(training, "SAVED_BYTES", kept)
    images, texts = sides(7 + len(name))
    matcher = made(name).train()
    weight = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))

    def gradients(dtype: torch.dtype, fused_way: bool) -> list[Tensor]:
        v = images.fragments.detach().to(dtype).requires_grad_()
        u = texts.fragments.detach().to(dtype).requires_grad_()
        pair = Encoded(v, images.mask), Encoded(u, texts.mask)
        scores = matcher.to(dtype)(*pair) if fused_way else matcher.to(dtype).torch_scores(*pair)
        (scores * weight.to(dtype)).sum().backward()
        return [
            v.grad * images.mask[..., None],
            u.grad * texts.mask[..., None],
            scores.detach(),
        ]

    for result, expected in zip(
        gradients(torch.float32, True), gradients(torch.float64, False), strict=True
    ):
        torch.testing.assert_close(result.double(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", thinned(["scan-i2t-lse", "bfan-equal"], "scan-i2t-lse"))
def test_captions_too_long_for_one_kernel_are_scored_by_the_other(name, monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "THREAD_PER_CAPTION_CELLS", 0)
    monkeypatch.setattr(lane_scoring, "MAX_IMAGE_QUERY_WORDS", 4)
    images, texts = sides(5, lengths=(6, 2, 9, 4))
    matcher = made(name).eval()
    with torch.no_grad():
        expected = matcher.double().torch_scores(images, texts)
        result = matcher.float()(single(images), single(texts))
    torch.testing.assert_close(result.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "products"), [((3, 2, 4, 1, 4), 1), ((6, 2, 9, 4), 2), ((6, 9), 1)]
)
def test_both_directions_of_bfan_share_their_similarities(lengths, products, monkeypatch) -> None:
    """Captions too long for image queries have their text queries by themselves."""
    monkeypatch.setattr(dispatch, "THREAD_PER_CAPTION_CELLS", 0)
    monkeypatch.setattr(lane_scoring, "MAX_IMAGE_QUERY_WORDS", 4)
    calls = []

    def counted(*given: Tensor) -> Tensor:
        calls.append(given)
        return launch.product(*given)

    monkeypatch.setattr(lane_scoring, "product", counted)
    torch.testing.assert_close(
        *both_ways("bfan-equal", *sides(6, lengths=lengths)), atol=2e-5, rtol=1e-5
    )
    assert len(calls) == products


@pytest.mark.parametrize("name", ["bfan-prob", "naaf", "chan-lse", "scan-i2t-lse"])
def test_blocks_of_images_and_chunks_of_words_give_the_same(name, monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "THREAD_PER_CAPTION_CELLS", 0)
    monkeypatch.setattr(lane_scoring, "BUFFER", 1)  # one image at a time
    monkeypatch.setattr(lane_scoring, "STRIDE", 8 * 4)  # groups of up to eight words
    lengths = (3, 1, 5, 2, 4, 6, 1, 1, 2, 6, 5)
    chunks = lane_scoring._chunks(interleave(lengths, 4).spans)
    assert [(one.first, one.last) for one in chunks] == [(0, 2), (2, 3)]
    torch.testing.assert_close(
        *both_ways(name, *sides(7, images=2, lengths=lengths)), atol=2e-5, rtol=1e-5
    )


def test_chunks_hold_as_many_groups_as_fit_and_each_group_once(monkeypatch) -> None:
    monkeypatch.setattr(lane_scoring, "STRIDE", 40)
    captions = interleave([1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 9, 9, 4], 4)
    chunks = lane_scoring._chunks(captions.spans)
    groups = [(one.first, one.last) for one in chunks]
    assert groups == [(0, 3), (3, 4)]
    assert [(one.start, one.stop) for one in chunks] == [(0, 24), (24, 60)]
    assert all(one.stop - one.start <= 40 for one in chunks)
    assert lane_scoring._chunks(()) == []


@pytest.mark.parametrize("length", [1.0, 30.0])
@pytest.mark.parametrize("holes", [True, False])
@pytest.mark.parametrize("name", [name for name in MATCHERS if name.startswith("chan")])
def test_chan_of_halves_never_stores_similarities(name, holes, length, monkeypatch) -> None:
    """By the kernel of MaxSim, in parts; of long vectors, exponentials would overflow."""
    monkeypatch.setattr(dispatch, "usable", lambda device, dtype: True)
    monkeypatch.setattr(dispatch, "tiled_words", None)  # no tiles
    monkeypatch.setattr(maxsim, "GPU_BUFFER", 4 * 15 * 2)  # two images at a time
    images, texts = sides(11, images=5, lengths=(4, 1, 7, 3), holes=holes)
    images, texts = (
        Encoded((length * side.fragments).half(), side.mask) for side in (images, texts)
    )
    matcher = made(name).eval()
    given = (images.fragments, images.mask), (texts.fragments, texts.mask)
    with torch.no_grad():
        result = try_fused(matcher.kernel_specs(), *given)
        wide = [Encoded(fragments.double(), mask) for fragments, mask in given]
        expected = matcher.double().torch_scores(*wide)
    assert result is not None
    torch.testing.assert_close(result.double(), expected, atol=2e-5, rtol=2e-5)


def test_words_all_below_the_boundary() -> None:
    images, texts = sides(3)
    matcher = NAAF(D, boundary=0.999).eval()
    with torch.no_grad():
        expected = matcher.double().torch_scores(images, texts)
        result = matcher.float()(single(images), single(texts))
    torch.testing.assert_close(result.double(), expected, atol=2e-5, rtol=1e-5)
    assert (expected < 0.6).all()


@pytest.mark.parametrize("lengths", [(0, 2), (17, 2)])
def test_captions_that_no_kernel_holds_are_left_to_pytorch(lengths) -> None:
    images, texts = sides(1, lengths=lengths)
    pair = (images.fragments.float(), images.mask), (texts.fragments.float(), texts.mask)
    assert try_fused(made("naaf").eval().kernel_specs(), *pair) is None
    assert made("naaf").eval()(single(images), single(texts)).isfinite().all()


@pytest.mark.parametrize("name", ["naaf-i2t", "naaf-both-ways"])
def test_more_regions_than_a_tile_has_words_cannot_ask_as_words_do(name) -> None:
    images, texts = sides(1, regions=20)
    pair = (images.fragments.float(), images.mask), (texts.fragments.float(), texts.mask)
    with torch.no_grad():
        assert try_fused(made(name).eval().kernel_specs(), *pair) is None
        assert try_fused(made("naaf").eval().kernel_specs(), *pair) is not None
        assert made(name).eval()(single(images), single(texts)).isfinite().all()


def test_an_image_without_regions_is_left_to_pytorch() -> None:
    images, texts = sides(1)
    empty = images.mask.clone()
    empty[1] = False
    pair = (images.fragments.float(), empty), (texts.fragments.float(), texts.mask)
    assert try_fused(made("chan-lse").kernel_specs(), *pair) is None


def test_where_there_is_no_backward_kernel_training_is_left_to_pytorch() -> None:
    images, texts = sides(1)
    v = images.fragments.float().requires_grad_()
    pair = (v, images.mask), (texts.fragments.float(), texts.mask)
    for name in ("chamfer", "chan-softmax"):
        assert try_fused(made(name).kernel_specs(), *pair) is None


def test_double_precision_and_processors_are_left_to_pytorch(monkeypatch) -> None:
    monkeypatch.undo()
    assert not spec.usable(torch.device("cpu"), torch.float32)
    assert not spec.usable(torch.device("cuda"), torch.float64)


def test_sets_of_other_than_unit_vectors_are_left_to_pytorch() -> None:
    images, texts = sides(1)
    words = texts.fragments.float(), texts.mask
    specs = made("chamfer").eval().kernel_specs()
    with torch.no_grad():
        unit = try_fused(specs, (images.fragments.float(), images.mask), words)
        long = images.fragments.float() * 9, images.mask
        assert unit is not None
        assert try_fused(specs, long, words) is None


def test_one_side_in_half_precision_is_compared_in_single(monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "usable", lambda device, dtype: dtype != torch.float64)
    images, texts = sides(2)
    halves = Encoded(images.fragments.half(), images.mask)
    matcher = made("chan-mean").eval()
    with torch.no_grad():
        result = matcher(halves, single(texts))
        expected = matcher.torch_scores(single(halves), single(texts))
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-6)


def test_double_precision_stays_so_where_half_would_be_raised(monkeypatch) -> None:
    monkeypatch.setattr(fragment_matcher, "usable", lambda device, dtype: True)
    images, texts = sides(2)
    matcher = made("naaf").eval().double()
    with torch.no_grad():
        assert torch.equal(matcher(images, texts), matcher.torch_scores(images, texts))


def short_of_memory(most: int):
    """A device whose programs can do so much each."""

    def launch(per_program: int) -> None:
        if per_program > most:
            raise OutOfResources(2, 1, "shared memory")

    return launch


def test_a_loop_that_does_not_fit_is_done_without() -> None:
    tried: list[int] = []
    most = short_of_memory(1)
    launch.run_fitting(lambda count: (tried.append(count), most(count))[1], 8)
    assert tried == [8, 1]
    with pytest.raises(OutOfResources):
        launch.run_fitting(short_of_memory(0), 8)


def test_on_a_device_too_small_for_any_kernel_pytorch_scores(monkeypatch) -> None:
    images, texts = sides(4)
    matcher = made("naaf").eval()
    monkeypatch.setattr(launch, "run_fitting", lambda run, count: short_of_memory(0)(count))
    with torch.no_grad():
        result = matcher(single(images), single(texts))
        assert torch.equal(result, matcher.torch_scores(single(images), single(texts)))


def test_training_on_a_device_too_small_for_the_backward_kernel_is_left_to_pytorch(
    monkeypatch,
) -> None:
    monkeypatch.setattr(dispatch, "fits", lambda *what: False)
    images, texts = sides(1)
    v = images.fragments.float().requires_grad_()
    pair = (v, images.mask), (texts.fragments.float(), texts.mask)
    assert try_fused(made("naaf").train().kernel_specs(), *pair) is None


def test_kernels_and_pytorch_have_the_same_small_numbers() -> None:
    assert (tile_kernels.EPS.value, tile_kernels.TIE.value) == (attention.EPS, attention.TIE)


def test_where_triton_cannot_compile_it_is_said_and_left_alone(monkeypatch) -> None:
    assert spec.fault(torch.device("cpu")) is None

    class NoCompiler:
        def __getitem__(self, grid):
            raise RuntimeError("Failed to find C compiler.\nSpecify one")

    monkeypatch.setattr(tile_kernels, "write_one", NoCompiler())
    said = spec.fault(torch.device("cpu"))
    assert said is not None
    assert "Failed to find C compiler." in said
    assert "\n" not in said


def test_a_triton_that_cannot_be_imported_is_left_alone(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, tile_kernels.__name__, None)
    assert "Triton does not work here" in (spec.fault(torch.device("cpu")) or "")


@pytest.fixture
def gpu(monkeypatch):
    """What a CUDA device of some compute capability would say, with Triton or without."""

    def say(capability: tuple[int, int], triton: bool = True) -> str | None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(spec, "has_triton", lambda: triton)
        monkeypatch.setattr(spec, "fault", lambda device: None)
        spec.obstacle.cache_clear()
        return spec.without_kernels(torch.device("cuda", 0))

    yield say
    spec.obstacle.cache_clear()


def test_where_kernels_cannot_run_one_line_says_why(gpu) -> None:
    assert gpu((9, 0)) is None
    assert gpu((8, 0)) is None
    old, missing = gpu((7, 0)), gpu((9, 0), triton=False)
    assert "compute capability 8.0, this one has 7.0" in old
    assert "Triton is not installed" in missing
    assert spec.without_kernels(torch.device("cpu")) == "scoring by PyTorch on the CPU"
    assert not any("\n" in line for line in (old, missing))


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (9, 0)])
def test_what_is_said_and_what_is_done_agree(gpu, capability) -> None:
    line = gpu(capability)
    assert spec.usable(torch.device("cuda", 0), torch.float16) == (line is None)


@given(st.lists(st.integers(0, 16), max_size=40), st.integers(1, 5))
def test_every_word_has_one_place_in_a_tile(lengths, slots) -> None:
    result = pack(lengths, words=16, slots=slots)
    rows = result.rows[result.rows < sum(lengths)]
    assert sorted(rows.tolist()) == list(range(sum(lengths)))
    owner = [caption for caption, length in enumerate(lengths) for _ in range(length)]
    for place, row in enumerate(result.rows.tolist()):
        if row == sum(lengths):
            assert int(result.segments[place]) == slots
            continue
        slot = place // 16 * slots + int(result.segments[place])
        assert int(result.places[owner[row]]) == slot
        assert int(result.counts[slot]) == lengths[owner[row]]


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 5), st.integers(1, 4))
def test_every_word_has_one_place_in_a_lane(lengths, width, step) -> None:
    result = interleave(lengths, width, step)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    seen = 0
    for caption, length in enumerate(lengths):
        group, lane = divmod(int(result.places[caption]), width)
        base, size = result.spans[group]
        assert size % step == 0
        assert int(result.lengths[group * width + lane]) == length
        own = result.lengths[group * width : (group + 1) * width]
        assert int(result.sizes[group]) == int(own.max())
        assert size == -(-int(own.max()) // step) * step
        for word in range(size):
            row = int(result.rows[base + word * width + lane])
            assert row == (int(starts[caption]) + word if word < length else sum(lengths))
            seen += word < length
    assert seen == sum(lengths)
