"""CE-CLIP's terms: values and gradients of plain loops, and the threshold over steps."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from counterfoil.core.errors import ConfigError
from counterfoil.encoders import Encoded
from counterfoil.evaluation.foils.scores import encode_sentences
from counterfoil.objectives.ce_clip import CECLIP, intra_modal_loss, rank_loss, text_vectors
from counterfoil.objectives.foils import foil_costs
from counterfoil.objectives.negclip import NegCLIP
from tests.conftest import make_split
from tests.objectives.cases import check_gradients
from tests.objectives.live import one_step, score, small_model
from tests.objectives.test_negclip import write_foils

SCALE = torch.tensor(6.0, dtype=torch.float64)
NUMBERS = st.floats(-1, 1).map(lambda x: round(x, 2))  # ties happen
PAIRS = st.lists(st.tuples(NUMBERS, st.lists(NUMBERS, max_size=3)), min_size=1, max_size=5)


def tensors(pairs) -> tuple[Tensor, Tensor, Tensor]:
    positive = torch.tensor([p for p, _ in pairs], dtype=torch.float64)
    foils = torch.tensor([f for _, foils in pairs for f in foils], dtype=torch.float64)
    owners = torch.tensor([k for k, (_, foils) in enumerate(pairs) for _ in foils]).long()
    return positive, foils, owners


@given(PAIRS.filter(lambda pairs: any(foils for _, foils in pairs)))
def test_the_intra_modal_contrast_is_what_a_plain_loop_finds(pairs) -> None:
    positive, foils, owners = tensors(pairs)

    def naive(positive: Tensor, foils: Tensor) -> Tensor:
        losses = []
        for k in range(len(positive)):
            own = [foils[f] for f in range(len(foils)) if owners[f] == k]
            if own:
                top = (positive[k] * SCALE).exp()
                losses.append(-(top / (top + sum((x * SCALE).exp() for x in own))).log())
        return sum(losses) / len(losses)

    check_gradients(lambda a, b: intra_modal_loss(a, b, owners, SCALE), naive, positive, foils)


@given(PAIRS.filter(lambda pairs: any(foils for _, foils in pairs)), st.floats(0, 5))
def test_the_rank_loss_is_what_a_plain_loop_finds(pairs, threshold) -> None:
    positive, foils, owners = tensors(pairs)
    limit = torch.tensor(threshold, dtype=torch.float64) + 0.00123  # no gap is exactly there

    def naive(positive: Tensor, foils: Tensor) -> Tensor:
        costs = [
            torch.clamp(SCALE * foils[f] - SCALE * positive[owners[f]] + limit, min=0)
            for f in range(len(foils))
        ]
        return sum(costs) / len(costs)

    check_gradients(lambda a, b: rank_loss(a, b, owners, SCALE, limit)[0], naive, positive, foils)
    gap = rank_loss(positive, foils, owners, SCALE, limit)[1]
    expected = [SCALE * (positive[o] - f) for o, f in zip(owners, foils, strict=True)]
    assert gap.item() == pytest.approx(float(sum(expected) / len(expected)), abs=1e-9)


def test_extreme_scores_give_finite_gradients() -> None:
    positive = torch.tensor([100.0, -100.0], requires_grad=True)
    loss = intra_modal_loss(positive, torch.tensor([-100.0, 100.0]), torch.tensor([0, 1]), SCALE)
    loss.backward()
    assert positive.grad.isfinite().all()


def test_a_text_without_a_pooled_vector_is_the_mean_of_its_words() -> None:
    words = torch.tensor([[[3.0, 0.0], [0.0, 3.0], [9.0, 9.0]]])
    encoded = Encoded(words, torch.tensor([[True, True, False]]))
    assert torch.allclose(text_vectors(encoded), torch.full((1, 2), 0.5**0.5))


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    return make_split(tmp_path_factory.mktemp("ce"), "train", 24, seed=0)


@torch.no_grad()
def similarity(model, one: str, two: str) -> float:
    """Cosine of two texts, each encoded alone."""
    vectors = [text_vectors(model.encode_texts(encode_sentences(model, [t]))) for t in (one, two)]
    return float((vectors[0] * vectors[1]).sum())


@pytest.mark.parametrize("name", ["vse-fc", "scan-t2i"])
def test_the_loss_of_a_batch_has_all_three_terms_and_moves_the_threshold(
    split, tmp_path, name
) -> None:
    model, source = small_model(split, name), write_foils(tmp_path / "foils.jsonl", split)
    plain, *_ = one_step(NegCLIP(source=source, count=2), split, model)
    objective = CECLIP(source=source, count=2, intra=2.0, rank=3.0, max_threshold=50.0)
    objective.threshold.fill_(1.5)
    loss, report, batch, brought = one_step(objective, split, model)
    gaps, intra = [], []
    for caption in batch.caption_ids.tolist():
        image = int(split.image_of[caption])
        positive = score(model, split, image, split.texts[caption])
        gaps += [
            (positive - score(model, split, image, foil)) / 0.07 for foil in brought[caption].texts
        ]
        own = [similarity(model, split.texts[caption], foil) for foil in brought[caption].texts]
        intra += [math.log1p(sum(math.exp((s - positive) / 0.07) for s in own))] if own else []
    contrast = sum(intra) / len(intra)
    assert float(report["ce-clip/intra"]) == pytest.approx(contrast, rel=1e-3)
    rank = sum(max(0.0, 1.5 - gap) for gap in gaps) / len(gaps)
    assert float(report["ce-clip/rank"]) == pytest.approx(rank, rel=1e-3)
    assert loss.item() == pytest.approx(plain.item() + 2 * contrast + 3 * rank, rel=1e-3)
    expected = min(50.0, sum(gaps) / len(gaps))
    assert objective.threshold.item() == pytest.approx(expected, abs=1e-3)
    assert "threshold" in objective.state_dict()


def test_the_threshold_is_capped(split, tmp_path) -> None:
    source = write_foils(tmp_path / "foils.jsonl", split)
    model = small_model(split, "vse-fc")
    free = CECLIP(source=source, count=1, max_threshold=50.0)
    one_step(free, split, model, size=20)
    gap = free.threshold.item()
    assert gap > 0  # or the cap below could not act
    capped = CECLIP(source=source, count=1, max_threshold=gap / 2)
    one_step(capped, split, model, size=20)
    assert capped.threshold.item() == pytest.approx(gap / 2)
    with pytest.raises(ConfigError, match="max_threshold"):
        CECLIP(max_threshold=-1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_every_call_adds_in_the_same_order() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    positive = torch.randn(64, device="cuda", generator=generator, requires_grad=True)
    owners = torch.randint(64, (4096,), device="cuda", generator=generator)
    foils = torch.randn(4096, device="cuda", generator=generator, requires_grad=True)
    results = []
    for _ in range(20):
        loss = intra_modal_loss(positive, foils, owners, torch.tensor(3.0, device="cuda"))
        loss = loss + foil_costs(positive, foils, owners, 0.2, hardest=False).square().sum()
        results.append((loss.detach(), *torch.autograd.grad(loss, [positive, foils])))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
