"""The cross-encoder: parity with UNITER and TAGS, packing, paired scores, heads, memory."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from counterfoil.core.errors import ConfigError
from counterfoil.encoders import Encoded
from counterfoil.encoders.transformer import Packing
from counterfoil.kernels import tiled
from counterfoil.matchers import cross_encoder, matchers
from counterfoil.matchers.base import paired_scores
from counterfoil.matchers.cross_encoder import CrossHeads
from counterfoil.objectives.tags import discrimination_losses, word_losses
from tests.conftest import assert_close, assert_gradient_close, load_fixture
from tests.matchers.test_conformance import assert_same, batch, side
from tests.models.cross import images_of, model_of, texts_of

DTYPES = [(torch.float64, 1e-7), (torch.float32, 1e-5)]
EXTRAS = ["itm", "mlm", "discrimination", "correction"]


def make(**options):
    """Weights far larger than new ones, so that every pair has a score of its own."""
    torch.manual_seed(0)
    matcher = matchers["uniter"](32, **{"layers": 2, "heads": 4, "output": "logit", **options})
    for name, weight in matcher.named_parameters():
        about = 1.0 if "norm.weight" in name else 0.0
        torch.nn.init.normal_(weight, mean=about, std=0.2 if weight.ndim > 1 else 0.1)
    return matcher.eval()


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_states_heads_and_slopes_are_uniters(dtype, tolerance, tmp_path) -> None:
    fixture = load_fixture("uniter-itm")
    model = model_of(fixture, "uniter", tmp_path).to(dtype)
    batch = images_of(fixture, dtype)
    images, texts = model.encode_images(batch), model.encode_texts(texts_of(fixture))
    states = model.matcher.states(images, texts)
    real = fixture["in.attn_masks"].bool()
    mine = torch.cat([states.words, states.regions], dim=1)
    mask = torch.cat([texts.mask, images.mask], dim=1)
    assert_close(mine[mask], fixture["out.sequence_output"][real], max(tolerance, 2e-7))
    assert not mine[~mask].any()
    assert_close(states.pooled, fixture["out.pooled"], tolerance)
    assert_close(model.matcher.heads["itm"](states.pooled), fixture["out.itm_logits"], tolerance)
    logits = model.matcher.heads["rank"](states.pooled)
    assert_close(logits, fixture["out.rank_scores"], tolerance)
    scores = model.matcher.paired(images, texts)
    assert_close(scores, fixture["out.rank_scores"][:, 0].sigmoid(), tolerance)
    groups = scores.view(-1, fixture.hyper["sample_size"])
    loss = (fixture.hyper["margin"] + groups[:, 1:] - groups[:, :1]).clamp(min=0)
    assert_close(loss, fixture["out.rank_loss"], tolerance)
    (slope,) = torch.autograd.grad(logits.sum(), batch.fragments)
    assert_gradient_close(slope, fixture["grad.img_feat"], 1e-4 if tolerance == 1e-5 else 1e-6)


@pytest.mark.parametrize("mode", ["evaluation", "training"])
def test_a_text_is_scored_by_its_real_tokens_wherever_its_padding_is(mode) -> None:
    matcher = make(dropout=0.0).train(mode == "training")
    torch.manual_seed(1)
    images, texts = torch.randn(3, 4, 32), torch.randn(5, 6, 32)
    regions, words = torch.ones(3, 4, dtype=torch.bool), torch.ones(5, 6, dtype=torch.bool)
    words[0, :2] = words[1, 0] = words[2, 4:] = words[3, 2:4] = False
    words[4] = False  # no token at all
    scores = matcher(images, texts, regions, words)
    for number in range(4):
        alone = texts[number][words[number]][None]
        real = torch.ones(1, alone.shape[1], dtype=torch.bool)
        assert_same(scores[:, number : number + 1], matcher(images, alone, regions, real), 1e-5)
    noisy = torch.where(words[..., None], texts, 100.0)
    assert_same(matcher(images, noisy, regions, words), scores, 1e-5)


def test_slopes_of_paired_scores_are_uniters(tmp_path) -> None:
    fixture = load_fixture("uniter-itm")
    model = model_of(fixture, "uniter", tmp_path)
    model.matcher.output = "logit"
    batch = images_of(fixture)
    scores = model.matcher.paired(model.encode_images(batch), model.encode_texts(texts_of(fixture)))
    (slope,) = torch.autograd.grad(scores.sum(), batch.fragments)
    assert_gradient_close(slope, fixture["grad.img_feat"])


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_words_are_written_told_and_corrected_as_tags_does(dtype, tolerance, tmp_path) -> None:
    fixture = load_fixture("tags-heads")
    model = model_of(fixture, "tags", tmp_path).to(dtype)
    matcher, table = model.matcher, model.text_encoder.word_table.weight
    batch = images_of(fixture, dtype)
    images, labels = model.encode_images(batch), fixture["in.txt_labels"]

    masked = matcher.states(images, model.encode_texts(texts_of(fixture, "in.mlm_input_ids")))
    written = matcher.heads["mlm"](masked.words, table)
    assert_close(written, fixture["out.mlm_logits"], tolerance)
    assert_close(word_losses(written, labels), fixture["out.mlm_loss"], tolerance)

    foils = texts_of(fixture, "in.syn_input_ids")
    states = matcher.states(images, model.encode_texts(foils))
    scores = matcher.heads["rank"](states.pooled)
    assert_close(scores, fixture["out.syn_rank_scores"], tolerance)
    told = matcher.heads["discrimination"](states.words)
    assert_close(told, fixture["out.disc_logits"], tolerance)
    weights = tuple(fixture.hyper["disc_weights"])
    truth = fixture["in.gt_input_ids"]
    telling = discrimination_losses(told, foils.ids, truth, foils.mask, weights)
    assert_close(telling, fixture["out.disc_loss"], tolerance)
    corrected = matcher.heads["correction"](states.words, table)
    assert_close(corrected, fixture["out.correction_logits"], tolerance)
    correcting = word_losses(corrected, labels)
    assert_close(correcting, fixture["out.correction_loss"], tolerance)
    (slope,) = torch.autograd.grad(telling.mean() + correcting.mean(), batch.fragments)
    assert_gradient_close(slope, fixture["grad.img_feat"], 1e-4 if tolerance == 1e-5 else 1e-6)


def naive_score(matcher, image, text) -> float:
    """One pair by plain multi-head attention, layer by layer, without packing or masks."""
    x = torch.cat([text.fragments[0][text.mask[0]], image.fragments[0][image.mask[0]]])
    for layer in matcher.transformer.layers:
        heads = [part.chunk(layer.heads, dim=-1) for part in layer.qkv(x).chunk(3, dim=-1)]
        seen = [(q @ k.T / q.shape[1] ** 0.5).softmax(-1) @ v for q, k, v in zip(*heads)]  # noqa: B905
        x = layer.attention_norm(x + layer.out(torch.cat(seen, dim=-1)))
        x = layer.norm(x + layer.narrow(F.gelu(layer.widen(x))))
    return matcher.heads["rank"](torch.tanh(matcher.pooler(x[0])))[0]


@settings(max_examples=8)
@given(seed=st.integers(0, 999), checkpointing=st.booleans())
def test_every_score_is_that_of_the_pair_alone(seed, checkpointing) -> None:
    images, texts = batch(seed)
    matcher = make(checkpointing=checkpointing)
    scores = matcher(images, texts)
    assert scores.detach().std() > 0.1
    for i in range(len(images)):
        for j in range(len(texts)):
            expected = naive_score(matcher, images[i : i + 1], texts[j : j + 1])
            assert_same(scores[i, j], expected)


def test_regions_may_stand_in_any_order_and_words_may_not() -> None:
    images, texts = side([6, 6], 6, 1), side([7], 7, 2)
    matcher = make()
    expected = matcher(images, texts)
    places = torch.tensor([3, 0, 5, 1, 4, 2])
    turned = replace(images, fragments=images.fragments[:, places])
    assert_same(matcher(turned, texts), expected)
    first_last = replace(texts, fragments=texts.fragments.flip(1))
    assert (matcher(images, first_last) - expected).detach().abs().min() > 1e-3


@pytest.mark.parametrize("cells", [1, 5000, 1 << 22])
def test_paired_scores_are_the_diagonal_whatever_the_memory(cells) -> None:
    images, texts = side([6, 1, 4, 6, 2], 6, 3), side([7, 3, 1, 5, 7], 7, 4)
    matcher = make()
    x = images.fragments.requires_grad_()
    whole = torch.autograd.grad(matcher(images, texts).diagonal().square().sum(), x)[0]
    with mock.patch.object(tiled, "CPU_CELLS", cells):
        scores = paired_scores(matcher, images, texts)
        mine = torch.autograd.grad(scores.square().sum(), x)[0]
    assert_same(scores, matcher(images, texts).diagonal())
    assert_same(mine, whole, 1e-4)
    assert matcher.paired(images[:0], texts[:0]).shape == (0,)


def test_more_pairs_than_attention_takes_at_once_are_taken_in_turn() -> None:
    images, texts = batch(12)
    matcher = make()
    expected = matcher(images, texts)
    with mock.patch.object(cross_encoder, "MAX_PAIRS", 3):
        assert_same(matcher(images, texts), expected)


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_packing_and_spreading_undo_each_other(lengths) -> None:
    packing = Packing.of(torch.tensor(lengths))
    x = torch.randn(sum(lengths), 3)
    grid = packing.spread(x)
    for row, tokens in enumerate(x.split(lengths)):
        assert torch.equal(grid[row, : len(tokens)], tokens)
        assert not grid[row, len(tokens) :].any()
        assert torch.equal(x[packing.starts[row]], tokens[0])
    assert torch.equal(packing.pack(grid), x)
    assert (packing.mask is None) == (len(set(lengths)) == 1)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("cells", [1, 1 << 22])
def test_what_is_computed_again_sees_the_same_dropout(cells, checkpointing) -> None:
    """Slopes of a random function, against differences of that same function."""
    images, texts = side([3, 2], 3, 5, torch.float64), side([3, 1], 3, 6, torch.float64)
    matcher = make(dropout=0.3, checkpointing=checkpointing).double().train()
    weights = torch.tensor([[1.0, -0.5], [0.3, 2.0]])

    def total(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)
        with mock.patch.object(tiled, "CPU_CELLS", cells):
            return (matcher(replace(images, fragments=x), texts) * weights).sum()

    x = images.fragments.requires_grad_()
    (slope,) = torch.autograd.grad(total(x), x)
    with torch.no_grad():
        way = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(8))
        difference = (total(x + 1e-6 * way) - total(x - 1e-6 * way)) / 2e-6
        assert float((slope * way).sum()) == pytest.approx(float(difference), rel=1e-5)
        torch.manual_seed(9)
        assert matcher(images, texts).sum() != matcher(images, texts).sum()


def test_memory_for_a_pair_is_counted_with_and_without_slopes() -> None:
    plain, saving = make(layers=6), make(layers=6, checkpointing=True)
    kept, less = plain.cells_per_pair(10, 36), saving.cells_per_pair(10, 36)
    with torch.no_grad():
        scoring = plain.cells_per_pair(10, 36)
        assert saving.cells_per_pair(10, 36) == scoring
    assert scoring < less < kept
    assert kept == pytest.approx(6 * scoring, rel=0.01)


def test_half_precision_keeps_the_order_of_scores() -> None:
    images, texts = batch(9)
    matcher = make(output="sigmoid")
    expected = matcher(images, texts).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = matcher(images, texts).detach()
        states = matcher.states(images[:3], texts[:3])
    assert rough.dtype == states.pooled.dtype == torch.float32
    both = torch.stack([rough.flatten(), expected.flatten()])
    assert torch.corrcoef(both)[0, 1] > 0.98


def test_an_empty_text_is_an_empty_first_token() -> None:
    images, nothing = side([6, 3], 6, 10), side([0, 0], 4, 11)
    matcher = make()
    scores = matcher(images, nothing)
    assert scores.isfinite().all()
    blank = Encoded(torch.zeros(2, 1, 32), torch.ones(2, 1, dtype=torch.bool))
    assert_same(scores, matcher(images, blank))


def test_new_heads_begin_as_the_ones_they_resemble() -> None:
    torch.manual_seed(0)
    heads = CrossHeads(8)
    heads.add(EXTRAS, 20)
    assert list(heads) == ["rank", *EXTRAS]
    assert torch.equal(heads["itm"].weight[1:], heads["rank"].weight)
    assert torch.equal(heads["discrimination"].weight, heads["itm"].weight)
    assert torch.equal(heads["correction"].dense.weight, heads["mlm"].dense.weight)
    assert heads["correction"].dense is not heads["mlm"].dense
    before = heads["mlm"].dense.weight.clone()
    heads.add(EXTRAS, 20)
    assert torch.equal(heads["mlm"].dense.weight, before)
    assert len(list(CrossHeads(8, EXTRAS, 20).parameters())) == len(list(heads.parameters()))


def test_options_that_cannot_be_are_named() -> None:
    with pytest.raises(ConfigError, match="has no head 'mlm', only rank"):
        make().heads["mlm"]
    with pytest.raises(ConfigError, match=r"model\.matcher\.vocabulary"):
        make(extras=["correction"])
    with pytest.raises(ConfigError, match="multiple of the heads"):
        make(heads=5)
    with pytest.raises(ConfigError, match="0 layers"):
        make(layers=0)


def test_losses_of_words_are_one_for_each_word_that_counts() -> None:
    logits = torch.tensor([[[2.0, 0.0], [0.0, 3.0], [9.0, 9.0]]])
    ids, truth = torch.tensor([[5, 6, 0]]), torch.tensor([[5, 7, 0]])
    mask = torch.tensor([[True, True, False]])
    result = discrimination_losses(logits, ids, truth, mask, (2.0, 0.5))
    original, replaced = logits[0, 0].log_softmax(-1)[1], logits[0, 1].log_softmax(-1)[0]
    assert result.tolist() == pytest.approx([-0.5 * float(original), -2.0 * float(replaced)])
    assert word_losses(logits, torch.full((1, 3), -1)).shape == (0,)
