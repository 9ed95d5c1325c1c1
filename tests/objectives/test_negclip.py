"""Foils as extra texts of the batch: values and gradients of plain loops, and real batches."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from counterfoil.core.errors import TrainingError
from counterfoil.data.batches.collate import TextBatch
from counterfoil.data.pairs import Split
from counterfoil.objectives import Context, create_objective
from counterfoil.objectives.foils import FoilMatrix, text_keys
from counterfoil.objectives.negclip import NegCLIP, SigLIPFoils, negclip_loss, sigmoid_costs
from tests.conftest import make_split, thinned
from tests.objectives.cases import Case, cases, check_gradients, make_case, make_foils, rows_of
from tests.objectives.live import one_step, score, small_model

SCALE = torch.tensor(7.0, dtype=torch.float64)
NAMES = ("negclip", "siglip-foils", "ce-clip", "fsc-clip", "triplet-clip")


def naive_softmax(positive: Tensor, negatives: list[Tensor]) -> Tensor:
    total = (positive * SCALE).exp()
    for negative in negatives:
        total = total + (negative * SCALE).exp()
    return -((positive * SCALE).exp() / total).log()


def naive_negclip(case: Case, foils: FoilMatrix, scores: Tensor, of_foils: Tensor) -> Tensor:
    rows, columns = scores.shape
    owners = rows_of(case)
    by_image, by_text = [], []
    for text, image in enumerate(owners):
        positive = scores[image, text]
        captions = [scores[image, j] for j in range(columns) if negative(case, image, j)]
        captions += [of_foils[image, f] for f in range(of_foils.shape[1])
                     if foils.is_negative[image, f]]  # fmt: skip
        images = [scores[i, text] for i in range(rows) if negative(case, i, text)]
        by_image.append(naive_softmax(positive, captions))
        by_text.append(naive_softmax(positive, images))
    return (sum(by_image) / len(by_image) + sum(by_text) / len(by_text)) / 2


def negative(case: Case, image: int, text: int) -> bool:
    return not case.positives[image, text] and not case.protected[image, text]


def ordered(case: Case) -> bool:
    """Whether captions come image by image, as in a grouped batch."""
    rows, columns = case.scores.shape
    return rows == columns or rows_of(case) == case.positives.int().argmax(0).tolist()


@given(cases(), st.lists(st.integers(0, 2), min_size=1, max_size=3), st.integers(0, 99))
def test_negclip_is_what_plain_loops_find(case, counts, seed) -> None:
    if not ordered(case):
        return
    foils = make_foils(case, counts, seed=seed)

    def loss(scores: Tensor, of_foils: Tensor) -> Tensor:
        given = replace(foils, scores=of_foils)
        return negclip_loss(scores, case.positives, case.context, given, SCALE)

    check_gradients(loss, lambda a, b: naive_negclip(case, foils, a, b), case.scores, foils.scores)


@given(cases(), st.lists(st.integers(0, 2), min_size=1, max_size=3), st.integers(0, 99))
def test_the_sigmoid_loss_is_what_plain_loops_find(case, counts, seed) -> None:
    foils, bias = make_foils(case, counts, seed=seed), torch.tensor(-2.0, dtype=torch.float64)

    def loss(scores: Tensor, of_foils: Tensor) -> Tensor:
        given = replace(foils, scores=of_foils)
        return sigmoid_costs(scores, case.positives, case.protected, given, SCALE, bias)

    def naive(scores: Tensor, of_foils: Tensor) -> Tensor:
        total = 0 * scores.sum() + 0 * of_foils.sum()
        for i in range(scores.shape[0]):
            for j in range(scores.shape[1]):
                sign = -1 if case.positives[i, j] else 1
                if case.positives[i, j] or not case.protected[i, j]:
                    total = total + (1 + (sign * (scores[i, j] * SCALE + bias)).exp()).log()
            for f in range(of_foils.shape[1]):
                if foils.is_negative[i, f]:
                    total = total + (1 + (of_foils[i, f] * SCALE + bias).exp()).log()
        return total

    check_gradients(loss, naive, case.scores, foils.scores)


def test_foils_as_good_as_captions_cost_the_logarithm_of_their_number() -> None:
    case = make_case(list(range(4)), scale=0.0)
    foils = replace(make_foils(case, [2]), scores=torch.zeros(4, 8).double())
    foils = replace(foils, is_negative=torch.ones(4, 8).bool())
    loss = negclip_loss(case.scores, case.positives, Context(), foils, SCALE)
    assert loss.item() == pytest.approx((torch.tensor(12.0).log() + torch.tensor(4.0).log()) / 2)


def test_without_foils_negclip_is_infonce_and_the_sigmoid_loss_siglip() -> None:
    case = make_case([0, 0, 1, 2], scale=0.3, protected=0.2)
    infonce = create_objective({"infonce": {"temperature": 1 / 7, "learned": False}})
    expected = infonce.compute(case.scores, case.positives, case.context).loss
    result = negclip_loss(case.scores, case.positives, case.context, None, SCALE)
    assert result.item() == pytest.approx(expected.item())
    siglip = create_objective({"siglip": {"scale": 7.0, "bias": -2.0}})
    expected = siglip.compute(case.scores, case.positives, case.context).loss
    args = (case.scores, case.positives, case.protected, None, SCALE, torch.tensor(-2.0))
    assert (sigmoid_costs(*args) / 4).item() == pytest.approx(expected.item())


def test_texts_have_equal_keys_if_and_only_if_their_words_are_equal() -> None:
    ids = torch.tensor([[3, 4, 5, 0], [3, 4, 5, 9], [3, 4, 0, 0], [4, 3, 5, 0], [3, 4, 5, 0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])
    keys = text_keys(TextBatch(ids, mask.bool()))
    assert keys[0] == keys[1]
    assert len(set(keys.tolist())) == 4
    longer = TextBatch(
        torch.nn.functional.pad(ids, (0, 3)), torch.nn.functional.pad(mask, (0, 3)).bool()
    )
    assert torch.equal(text_keys(longer), keys)


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> Split:
    return make_split(tmp_path_factory.mktemp("negclip"), "train", 24, seed=0)


def write_foils(
    path, split: Split, every: int = 2, text=lambda text, word: f"{word} {text}"
) -> str:
    lines = [
        {"image": split.ids[split.image_of[c]], "caption": caption, "foil": text(caption, word)}
        for c, caption in enumerate(split.texts)
        for word in ("kite", "boat")[: c % (every + 1)]
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


@pytest.mark.parametrize("captions", thinned(["all", "grouped"], "grouped"))
@pytest.mark.parametrize("name", thinned(["vse-fc", "scan-t2i"], "vse-fc"))
def test_the_loss_of_a_batch_is_that_of_scores_taken_one_by_one(
    split, tmp_path, name, captions
) -> None:
    model = small_model(split, name)
    source = write_foils(tmp_path / "foils.jsonl", split)
    objective = NegCLIP(source=source, count=2, temperature=1 / 7)
    size = 9 if captions == "all" else 5
    loss, diagnostics, batch, brought = one_step(objective, split, model, captions, size)
    texts = batch.caption_ids.tolist()
    foils = [foil for caption in texts for foil in brought[caption].texts]
    assert foils
    by_image, by_text = [], []
    for caption in texts:
        image = int(split.image_of[caption])
        s = lambda i, text: torch.tensor(score(model, split, i, text)).double()  # noqa: E731
        others = [s(image, split.texts[t]) for t in texts if split.image_of[t] != image]
        others += [s(image, foil) for foil in foils]
        positive = s(image, split.texts[caption])
        by_image.append(naive_softmax(positive, others))
        images = [int(i) for i in batch.image_ids if int(i) != image]
        by_text.append(naive_softmax(positive, [s(i, split.texts[caption]) for i in images]))
    expected = (sum(by_image) + sum(by_text)) / (2 * len(texts))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
    assert 0 <= float(diagnostics["foils/accuracy"]) <= 1


def test_a_foil_that_is_a_caption_of_an_image_is_not_its_negative(split, tmp_path) -> None:
    """Another image's caption as foil: that image must not be pushed away from it."""
    model, path = small_model(split, "vse-fc"), tmp_path / "foils.jsonl"
    lines = [
        {"image": split.ids[split.image_of[c]], "caption": text, "foil": other}
        for c, text in enumerate(split.texts)
        for other in split.texts
        if other not in split.captions[split.image_of[c]]
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    captured = []
    objective = SigLIPFoils(source=str(path), count=40, scale=1.0, bias=0.0)
    import counterfoil.objectives.negclip as module

    original = module.sigmoid_costs
    module.sigmoid_costs = lambda *args: captured.append(args) or original(*args)
    try:
        _, _, batch, brought = one_step(objective, split, model, size=9)
    finally:
        module.sigmoid_costs = original
    foils = captured[0][3]
    texts = [text for c in batch.caption_ids.tolist() for text in brought[c].texts]
    own = [split.captions[int(i)] for i in batch.image_ids]
    in_batch = {split.texts[c] for c in batch.caption_ids.tolist()}
    for f, text in enumerate(texts):
        for i, captions in enumerate(own):
            true = text in captions and text in in_batch
            assert bool(foils.is_negative[i, f]) is not true


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_foils_is_learned_from_as_well(split, tmp_path, name) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"image": split.ids[0], "caption": 0, "foil": "nothing"}))
    model = small_model(split, "vse-fc")
    objective = dict(create_objective({name: {"source": str(path)}}).each())[name]
    rest = [image for image in range(24) if image != 0]
    # the foil's image is the last of the split, and not in the first batch
    loss, _, batch, _ = one_step(objective, split.select([*rest, 0]), model, size=4)
    assert not len(batch.extras["it"].text_owners)
    assert loss.isfinite()
    loss.backward()
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("dtype", thinned([torch.bfloat16, torch.float16], torch.bfloat16))
@pytest.mark.parametrize("name", thinned(NAMES, "negclip", "siglip-foils"))
def test_half_precision_gives_nearly_the_same_loss(split, tmp_path, name, dtype) -> None:
    source = write_foils(tmp_path / "foils.jsonl", split)
    losses = []
    for precision in (None, dtype):
        model = small_model(split, "vse-infty" if name == "fsc-clip" else "vse-fc")
        term = dict(create_objective({name: {"source": source, "count": 2}}).each())[name]
        loss, *_ = one_step(term, split, model, size=9, dtype=precision)
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(g.isfinite().all() for g in grads)
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


MATCHED = ["vse-infty", "naaf", "chan", "uniter-small", "dive"]


@pytest.mark.parametrize("model_name", thinned(MATCHED, "vse-infty", "uniter-small"))
@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_matcher_learns_from_foils(split, tmp_path, name, model_name) -> None:
    source = write_foils(tmp_path / "foils.jsonl", split)
    model = small_model(split, model_name)
    term = dict(create_objective({name: {"source": source, "count": 2}}).each())[name]
    loss, *_ = one_step(term, split, model, size=5)
    assert loss.isfinite()
    loss.backward()
    for side in (model.image_encoder, model.text_encoder):
        grads = [p.grad for p in side.parameters() if p.grad is not None]
        assert all(grad.isfinite().all() for grad in grads)
        assert any(grad.any() for grad in grads)


@pytest.mark.parametrize("name", NAMES)
def test_it_says_that_it_needs_a_training_run(name) -> None:
    term = dict(create_objective(name).each())[name]
    with pytest.raises(TrainingError, match=f"objective.{name} works on the batches of a training"):
        term.compute(torch.eye(3), torch.eye(3).bool(), Context())
