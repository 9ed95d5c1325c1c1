"""FSC-CLIP's calibrated loss and local similarities: values and gradients of plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from counterfoil.core.errors import ConfigError
from counterfoil.data.batches.collate import pad_fragments
from counterfoil.encoders import Encoded
from counterfoil.evaluation.foils.scores import encode_sentences
from counterfoil.objectives import create_objective
from counterfoil.objectives.fsc_clip import FSCCLIP, calibrated_loss, local_scores
from tests.conftest import make_split
from tests.objectives.cases import check_gradients
from tests.objectives.live import one_step, score, small_model
from tests.objectives.test_ce_clip import PAIRS, tensors
from tests.objectives.test_negclip import write_foils


@given(
    PAIRS.filter(lambda pairs: any(foils for _, foils in pairs)),
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    st.sampled_from([0.0, 0.02, 0.3]),
)
def test_the_calibrated_loss_is_what_a_plain_loop_finds(pairs, focus, smoothing) -> None:
    positive, foils, owners = tensors(pairs)

    def naive(positive: Tensor, foils: Tensor) -> Tensor:
        losses = []
        for k in range(len(positive)):
            own = [foils[f] for f in range(len(foils)) if owners[f] == k]
            if not own:
                continue
            total = sum(x.exp() for x in [positive[k], *own])
            loss = 0.0
            for place, logit in enumerate([positive[k], *own]):
                p = logit.exp() / total
                label = smoothing / (len(own) + 1) + (1 - smoothing if place == 0 else 0)
                loss = loss - label * (1 - p) ** focus * p.log()
            losses.append(loss)
        return sum(losses) / len(losses)

    check_gradients(
        lambda a, b: calibrated_loss(a, b, owners, focus, smoothing), naive, positive, foils
    )


def test_without_focus_and_smoothing_it_is_cross_entropy() -> None:
    positive, foils = torch.tensor([1.0, 0.0]), torch.tensor([0.5, 2.0, 1.0])
    loss = calibrated_loss(positive, foils, torch.tensor([0, 1, 1]), 0.0, 0.0)
    expected = F.cross_entropy(torch.tensor([[1.0, 0.5]]), torch.tensor([0]))
    expected += F.cross_entropy(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([0]))
    assert loss.item() == pytest.approx(expected.item() / 2)


@pytest.mark.parametrize("gap", [-200.0, 0.0, 200.0])
@pytest.mark.parametrize("focus", [0.0, 0.5, 2.0])
def test_extreme_logits_have_finite_gradients(gap, focus) -> None:
    positive = torch.tensor([gap, 0.0], requires_grad=True)
    calibrated_loss(
        positive, torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0, 1, 1]), focus, 0.02
    ).backward()
    assert positive.grad.isfinite().all()


def random_side(lengths: list[int], seed: int) -> Encoded:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    shape = (len(lengths), max(lengths), 4)
    fragments = F.normalize(torch.randn(shape, generator=generator, dtype=torch.float64), dim=-1)
    return Encoded(fragments * mask[..., None], mask)


def test_local_scores_are_what_plain_loops_find() -> None:
    images, texts = random_side([3, 1, 4], 0), random_side([2, 3, 1], 1)
    scale = torch.tensor(5.0, dtype=torch.float64)

    def naive(regions: Tensor, words: Tensor) -> Tensor:
        total = 0.0
        for k in range(3):
            logits = []
            for w in range(int(texts.mask[k].sum())):
                word, own = words[k, w], regions[k, : int(images.mask[k].sum())]
                word = word / word.norm()
                similar = (own @ word).detach()
                weights = similar - similar.min()
                weights = weights / weights.max() if weights.max() > 0 else torch.ones_like(weights)
                mean = (weights / weights.sum()) @ own
                logits.append(scale * (mean / mean.norm()) @ word)
            total = total + torch.stack(logits).exp().sum().log()
        return total

    def loss(regions: Tensor, words: Tensor) -> Tensor:
        one, two = Encoded(regions, images.mask), Encoded(words, texts.mask)
        return local_scores(one, two, scale).sum()

    check_gradients(loss, naive, images.fragments, texts.fragments)


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    return make_split(tmp_path_factory.mktemp("fsc"), "train", 24, seed=0)


def focal(logits: list[float], focus: float = 2.0, smoothing: float = 0.02) -> float:
    """The calibrated loss of one caption, the first, among its foils."""
    total, loss = sum(math.exp(x) for x in logits), 0.0
    for place, logit in enumerate(logits):
        p = math.exp(logit) / total
        label = smoothing / len(logits) + (1 - smoothing if place == 0 else 0)
        loss -= label * (1 - p) ** focus * math.log(p)
    return loss


@torch.no_grad()
def local_logit(model, split, image: int, text: str) -> float:
    """The local logit of one image and one text, each encoded alone."""
    pixels = pad_fragments([split.fragments.read(image)])
    texts = model.encode_texts(encode_sentences(model, [text]), "both")
    images = model.encode_images(pixels, "both")
    return float(local_scores(images, texts, torch.tensor(1 / 0.07)))


def test_the_loss_of_a_batch_adds_the_calibrated_terms_to_infonce(split, tmp_path) -> None:
    model, source = small_model(split, "vse-infty"), write_foils(tmp_path / "f.jsonl", split)
    plain = dict(create_objective("infonce").each())["infonce"]
    plain.extra_negatives = lambda: type("None", (), {"of": lambda *_: __import__(
        "counterfoil.data.batches.dataset", fromlist=["ExtraItems"]).ExtraItems()})()  # fmt: skip
    alone, *_ = one_step(plain, split, model)
    objective = FSCCLIP(source=source, count=2, whole=2.0, local=3.0)
    loss, report, batch, brought = one_step(objective, split, model)
    whole, local = [], []
    for caption in batch.caption_ids.tolist():
        image, texts = int(split.image_of[caption]), [split.texts[caption], *brought[caption].texts]
        if len(texts) > 1:
            whole.append(focal([score(model, split, image, text) / 0.07 for text in texts]))
            local.append(focal([local_logit(model, split, image, text) for text in texts]))
    means = sum(whole) / len(whole), sum(local) / len(local)
    assert float(report["fsc-clip/whole"]) == pytest.approx(means[0], rel=1e-3)
    assert float(report["fsc-clip/local"]) == pytest.approx(means[1], rel=1e-3)
    total = alone.item() + 2 * means[0] + 3 * means[1]
    assert loss.item() == pytest.approx(total, rel=1e-3)
    without, report, *_ = one_step(FSCCLIP(source=source, count=2, local=0.0), split, model)
    assert "fsc-clip/local" not in report
    assert without.item() == pytest.approx(
        (alone + 0.5 * report["fsc-clip/whole"]).item(), rel=1e-5
    )


def test_values_that_cannot_work_are_refused() -> None:
    for wrong in ({"focus": -1.0}, {"smoothing": 1.0}, {"smoothing": -0.1}):
        with pytest.raises(ConfigError, match="focus must be at least 0"):
            FSCCLIP(**wrong)
