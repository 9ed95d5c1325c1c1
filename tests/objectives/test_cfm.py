"""CFM: parity of its losses, what it changes and where, and whole runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from counterfoil.core.config import build_config
from counterfoil.core.distributed import rank
from counterfoil.core.errors import ConfigError, TrainingError
from counterfoil.core.progress import Silent
from counterfoil.data.batches.collate import Collate, ImageBatch, TextBatch
from counterfoil.data.batches.dataset import Augmentation, CaptionItems
from counterfoil.data.pairs import Pairs
from counterfoil.data.text.tokenizers import HuggingFaceText
from counterfoil.data.text.vocabulary import END, MASK, PAD, START
from counterfoil.encoders.texts import run_rnn
from counterfoil.models import create_model
from counterfoil.objectives import Context, create_objective, objectives
from counterfoil.objectives.cfm import CFM, HardTriplets, counterfactual_loss
from counterfoil.objectives.cfm_perturbations import (
    ImageSide,
    Ranking,
    TextSide,
    Tokens,
    exchange_images,
    exchange_texts,
    gradient_norm,
    mask_images,
    mask_texts,
)
from counterfoil.training.services import TrainingRunSetup
from counterfoil.training.step import TrainingBatchServices, TrainingStep, score_batch
from counterfoil.training.trainer import Trainer
from tests.conftest import assert_close, assert_gradient_close, load_fixture, make_split, thinned
from tests.data.text.test_text import save_tiny_tokenizer
from tests.models.test_models import tiny_bert  # noqa: F401 - a fixture
from tests.training.test_trainer_distributed import joined


def test_the_made_losses_agree_with_the_reference_with_gradients() -> None:
    fixture = load_fixture("loss-cfm")
    names = ["img_anchor", "cap_pos", "cap_syn", "cap_anchor", "img_pos", "img_syn"]
    given = {name: fixture[f"in.{name}"].double().requires_grad_() for name in names}

    def scores(anchor: str, candidate: str) -> torch.Tensor:
        return (given[anchor] * given[candidate]).sum(1)

    margin = fixture.hyper["margin2"]
    loss = counterfactual_loss(
        scores("img_anchor", "cap_pos"), scores("img_anchor", "cap_syn"), margin
    ) + counterfactual_loss(
        scores("cap_anchor", "img_pos"), scores("cap_anchor", "img_syn"), margin
    )
    assert_close(loss, fixture["out.sa_loss"], 1e-9)
    assert_close(loss, fixture["out.se_loss"], 1e-9)
    loss.backward()
    for name, value in given.items():
        assert_gradient_close(value.grad, fixture[f"grad.sa.{name}"], 1e-6)


@pytest.mark.parametrize(("form", "objective"), [("max", "hardest"), ("sum", "triplet")])
def test_triplets_and_which_of_them_are_active_agree_with_the_reference(form, objective) -> None:
    fixture = load_fixture("loss-cfm")
    images, texts = (fixture[f"in.{name}"].double().requires_grad_() for name in ("img", "cap"))
    scores, own = images @ texts.T, torch.arange(9)
    positives = torch.eye(9).bool()
    loss = (
        objectives[objective](margin=fixture.hyper["margin"])
        .compute(scores, positives, Context())
        .loss
    )
    assert_close(loss, fixture[f"out.{form}.triplet_loss"], 1e-9)
    loss.backward()
    assert_gradient_close(images.grad, fixture[f"grad.{form}.img"], 1e-6)
    assert_gradient_close(texts.grad, fixture[f"grad.{form}.cap"], 1e-6)
    for matrix, name in ((scores, "mask_i2t"), (scores.T, "mask_t2i")):
        triplets = HardTriplets.of(matrix, ~positives, own, own, fixture.hyper["margin"])
        assert (
            triplets.anchor.tolist() == fixture[f"out.{form}.{name}"].nonzero().flatten().tolist()
        )
        masked = matrix.detach() - 10 * torch.eye(9)
        assert torch.equal(triplets.negative, masked.argmax(1)[triplets.anchor])
        assert triplets.counted.all()


def test_without_an_active_triplet_one_stands_in_that_does_not_count() -> None:
    own = torch.arange(3)
    triplets = HardTriplets.of(torch.eye(3), ~torch.eye(3).bool(), own, own, 0.2)
    assert triplets.counted.tolist() == [False]
    none = HardTriplets.of(torch.eye(3), torch.zeros(3, 3).bool(), own, own, 0.2)
    assert none.counted.tolist() == [False]
    one = torch.ones(1)
    assert float(counterfactual_loss(one, 5 * one, 0.1, triplets.counted)) == 0


@st.composite
def changed(draw):
    """Two batches of four items with up to six places, some unusable, and their importance."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    usable, importance = [], []
    for _ in range(2):
        lengths = torch.randint(0, 7, (4, 1), generator=generator)
        usable.append(torch.arange(6) < lengths)
        importance.append(torch.rand(4, 6, generator=generator))
    return generator, usable, importance, draw(st.sampled_from([0.1, 0.34, 0.5, 0.8, 1.0]))


def top_places(importance, usable, count: int) -> list[int]:
    places = [place for place in range(6) if usable[place]]
    return sorted(places, key=lambda place: -float(importance[place]))[:count]


@given(case=changed())
def test_exchanging_and_masking_equal_naive_loops(case) -> None:
    generator, usable, importance, rate = case
    texts = [TextBatch(torch.randint(5, 99, (4, 6), generator=generator), u) for u in usable]
    images = [
        ImageBatch(
            torch.randn(4, 6, 3, generator=generator) * u[..., None],
            u,
            torch.rand(4, 6, 4, generator=generator),
        )
        for u in usable
    ]
    mine, theirs = (Ranking.of(i, u) for i, u in zip(importance, usable, strict=True))
    words = exchange_texts(*texts, mine, theirs, rate)
    regions = exchange_images(*images, mine, theirs, rate)
    hidden_words = mask_texts(texts[0], mine, rate, 4)
    hidden_regions = mask_images(images[0], mine, rate)
    for item in range(4):
        own, other = (int(u[item].sum()) for u in usable)
        wanted = min(own, max(1, int(rate * own + 1e-9)))
        count = min(wanted, other)
        to = top_places(importance[0][item], usable[0][item], count)
        source = top_places(importance[1][item], usable[1][item], count)
        ids, fragments = texts[0].ids[item].clone(), images[0].fragments[item].clone()
        boxes = images[0].boxes[item].clone()
        for here, there in zip(to, source, strict=True):
            ids[here] = texts[1].ids[item, there]
            fragments[here] = images[1].fragments[item, there]
            boxes[here] = images[1].boxes[item, there]
        assert torch.equal(words.ids[item], ids)
        assert torch.equal(regions.fragments[item], fragments)
        assert torch.equal(regions.boxes[item], boxes)
        ids = texts[0].ids[item].clone()
        ids[top_places(importance[0][item], usable[0][item], wanted)] = 4
        assert torch.equal(hidden_words.ids[item], ids)
        fragments = images[0].fragments[item].clone()
        chosen = top_places(
            importance[0][item], usable[0][item], min(wanted, own - 1) if own else 0
        )
        rest = [place for place in range(own) if place not in chosen]
        if chosen:
            fragments[chosen] = fragments[rest].mean(0)
        assert torch.allclose(hidden_regions.fragments[item], fragments, atol=1e-6)


def test_special_tokens_are_no_words(concepts, tmp_path) -> None:
    model = make_model(concepts)
    index = model.text.vocabulary.index
    tokens = Tokens.of(model.text)
    assert tokens.mask == index[MASK]
    ids = torch.tensor([[index[START], index["dog"], index[MASK], index[END], index[PAD]]])
    assert tokens.words(TextBatch(ids, ids != index[PAD])).tolist() == [
        [False, True, True, False, False]
    ]
    save_tiny_tokenizer(tmp_path)
    text = HuggingFaceText.from_pretrained(str(tmp_path))
    tokens = Tokens.of(text)
    assert tokens.mask == text.tokenizer.mask_token_id
    ids = torch.tensor([text.encode("a doggy xyz")])
    words = tokens.words(TextBatch(ids, torch.ones_like(ids).bool()))
    assert words.tolist() == [[False, *[True] * (ids.shape[1] - 2), False]]
    text.tokenizer.mask_token = text.tokenizer.unk_token = None
    with pytest.raises(ConfigError, match="mask token"):
        Tokens.of(text)


def make_model(pairs, name: str = "vse-fc", **model):
    tree = {"name": name, "embed_size": 8, **model}
    config = build_config({"model": tree, "data": {"min_count": 1}})
    torch.manual_seed(0)
    return create_model(config.model, pairs.train, config.data)


def batch_of(model, pairs, count: int = 8):
    items = CaptionItems(pairs.train, model.text, Augmentation(), 0)
    return Collate(model.text.pad)([items[0, 3 * i, 0] for i in range(count)])


def prepared(pairs, model, **options):
    objective = create_objective({"cfm": {"adjust": 1.0, "explore": 1.0, **options}})
    preparation = TrainingRunSetup(
        pairs.train, model, build_config({}), torch.device("cpu"), Silent()
    )
    objective.prepare(preparation)
    return objective


def live_batch(model, pairs, batch=None) -> TrainingBatchServices:
    batch = batch_of(model, pairs) if batch is None else batch
    return TrainingBatchServices(model, batch, score_batch(model, batch), None)


def test_the_region_that_decides_is_the_most_important(concepts) -> None:
    """Under max pooling a region that outshines the others decides alone."""
    model = make_model(concepts, image={"pooling": "max"})
    batch = batch_of(model, concepts)
    planted = torch.tensor([k % int(n) for k, n in enumerate(batch.images.mask.sum(1))])
    with torch.no_grad():
        model.image_encoder.fc.weight.abs_()
    fragments = batch.images.fragments.clone()
    fragments[torch.arange(8), planted] = 10.0
    batch = replace(batch, images=replace(batch.images, fragments=fragments))
    side = ImageSide(live_batch(model, concepts, batch), Tokens.of(model.text), 0.8, 0.1)
    positive, negative = torch.arange(8), torch.arange(8).roll(1)
    mine, theirs = side.rankings(positive, negative, torch.arange(8))
    assert torch.equal(mine.order[:, 0], planted)
    assert torch.equal(theirs.order[:, 0], planted.roll(1))


@pytest.mark.parametrize("frozen", [False, True])
def test_the_word_that_decides_is_the_most_important(concepts, frozen) -> None:
    """States that forget what came before, under max pooling: the brightest word decides."""
    model = make_model(concepts, text={"pooling": "max", "word_dim": 4, "frozen": frozen})
    encoder = model.text_encoder
    batch = batch_of(model, concepts)
    size = encoder.rnn.hidden_size
    chosen = torch.tensor([2, 5, 8] * 3)[:8]  # the named things of "a X and a Y near the Z"
    words = batch.texts.ids[torch.arange(8), chosen]
    distinct = {int(w) for w in words}
    with torch.no_grad():
        for name, value in encoder.rnn.named_parameters():
            value.zero_()
            if name.startswith("bias_ih"):
                value[size : 2 * size] = -20.0  # the update gate: nothing of the past stays
            if name.startswith("weight_ih"):
                value[2 * size :] = torch.rand(size, 4) + 0.1
        encoder.word_table.weight.fill_(-0.1)
        for word in distinct:
            encoder.word_table.weight[word] = 0.5
    ids = batch.texts.ids.clone()
    dull = model.text.vocabulary.index["near"]
    for row in range(8):  # one bright word each
        for place in range(ids.shape[1]):
            if place != int(chosen[row]) and int(ids[row, place]) in distinct:
                ids[row, place] = dull
    batch = replace(batch, texts=replace(batch.texts, ids=ids))
    side = TextSide(live_batch(model, concepts, batch), Tokens.of(model.text), 0.8, 0.1)
    mine, theirs = side.rankings(torch.arange(8), torch.arange(8).roll(1), torch.arange(8))
    assert torch.equal(mine.order[:, 0], chosen)
    assert torch.equal(theirs.order[:, 0], chosen.roll(1))
    assert not any(encoder.word_table._forward_hooks.values())


def one_by_one(model, objective: CFM, batch, scores) -> dict[str, float]:
    """The losses of the made negatives, triplet by triplet, from the model's parts."""
    encoder, tokens, own = model.text_encoder, objective.tokens, torch.arange(8)
    negatives = batch.image_ids[:, None] != batch.owners[None, :]
    total = {"cfm/adjusted": 0.0, "cfm/explored": 0.0}

    def text_of(ids, at):
        return TextBatch(ids, batch.texts.mask[at][None])

    def image_of(fragments, at):
        return ImageBatch(fragments, batch.images.mask[at][None])

    def add(score, made, hidden, hidden_other):
        total["cfm/adjusted"] += max(0.0, 0.1 + float(made) - float(score))
        total["cfm/explored"] += max(0.0, 0.1 + float(hidden_other) - float(hidden))

    def rank(importance, usable):
        return Ranking.of(importance, usable)

    results = HardTriplets.of(scores, negatives, own, own, 0.2)
    for a, n in zip(results.anchor.tolist(), results.negative.tolist(), strict=True):
        image = image_of(batch.images.fragments[a][None], a)
        rankings = []
        for at in (a, n):
            text = text_of(batch.texts.ids[at][None], at)
            vectors = encoder.embed(text.ids).detach().requires_grad_()
            states = run_rnn(encoder.rnn, vectors, text.mask).chunk(2, dim=-1)
            pooled = encoder.joint((states[0] + states[1]) / 2, text.mask).pooled
            score = (pooled * model.encode_images(image).pooled.detach()).sum()
            grad = torch.autograd.grad(score, vectors)[0]
            rankings.append(rank(grad.norm(dim=-1), tokens.words(text)))
        ours, other = (text_of(batch.texts.ids[at][None], at) for at in (a, n))
        made = exchange_texts(ours, other, *rankings, 0.8)
        hidden = mask_texts(ours, rankings[0], 0.1, tokens.mask)
        hidden_other = mask_texts(other, rankings[1], 0.1, tokens.mask)
        add(scores[a, a], *(model(image, text) for text in (made, hidden, hidden_other)))
    results = HardTriplets.of(scores.T, negatives.T, own, own, 0.2)
    for a, n in zip(results.anchor.tolist(), results.negative.tolist(), strict=True):
        text = text_of(batch.texts.ids[a][None], a)
        rankings = []
        for at in (a, n):
            fragments = batch.images.fragments[at][None].clone().requires_grad_()
            grad = torch.autograd.grad(model(image_of(fragments, at), text).sum(), fragments)[0]
            rankings.append(rank(grad.norm(dim=-1), batch.images.mask[at][None]))
        ours, other = (image_of(batch.images.fragments[at][None], at) for at in (a, n))
        made = exchange_images(ours, other, *rankings, 0.8)
        hidden = mask_images(ours, rankings[0], 0.1)
        hidden_other = mask_images(other, rankings[1], 0.1)
        add(scores[a, a], *(model(image, text) for image in (made, hidden, hidden_other)))
    return total


def test_the_whole_loss_is_that_of_triplets_made_one_by_one(concepts) -> None:
    model = make_model(concepts, image={"pooling": "max"}, text={"pooling": "max"})
    model, batch = model.double(), batch_of(model, concepts)
    batch = replace(batch, images=ImageBatch(batch.images.fragments.double(), batch.images.mask))
    composite = prepared(concepts, model)
    loss, diagnostics = TrainingStep(model, composite, None)(batch, 0, 0)
    scores = score_batch(model, batch).scores.detach()
    expected = one_by_one(model, composite.terms["cfm"], batch, scores)
    assert min(expected.values()) > 0
    for name, value in expected.items():
        assert float(diagnostics[name]) == pytest.approx(value, rel=1e-6)
    positives = batch.image_ids[:, None] == batch.owners[None, :]
    hardest = objectives["hardest"]().compute(scores, positives, Context()).loss
    assert float(loss) == pytest.approx(float(hardest) + sum(expected.values()), rel=1e-6)


MODELS = ["vse-fc", "rvse-mlp", "scan-t2i", "naaf", "gsmn-sparse", "saf", "vse-infty-bert"]


@pytest.mark.parametrize("name", thinned(MODELS, "vse-fc", "scan-t2i", "vse-infty-bert"))
def test_any_model_learns_from_made_negatives(name, concepts, tiny_bert) -> None:  # noqa: F811
    text = {"pretrained": str(tiny_bert)} if name.endswith("bert") else {}
    model = make_model(concepts, name, text=text)
    step = TrainingStep(model, prepared(concepts, model), None).train()
    loss, diagnostics = step(batch_of(model, concepts), 0, 0)
    assert {"cfm/adjusted", "cfm/explored"} <= diagnostics.keys()
    loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), key
    assert any(p.grad is not None and p.grad.any() for p in model.text_encoder.parameters())


def test_copies_and_grouped_captions_work_too(concepts) -> None:
    model = make_model(concepts, ensemble_size=2)
    items = CaptionItems(concepts.train, model.text, Augmentation(), 0)
    entries = [(0, 2 * i + k, -k) for i in range(5) for k in range(2)]
    batch = Collate(model.text.pad)([items[entry] for entry in entries])
    assert len(batch.image_ids) == 5
    assert len(batch.owners) == 10
    loss, _ = TrainingStep(model, prepared(concepts, model), None)(batch, 0, 0)
    loss.backward()
    assert loss.isfinite()


def test_how_often_negatives_are_made_is_drawn_per_step_and_batch(concepts) -> None:
    model = make_model(concepts)
    objective = prepared(concepts, model, adjust=0.33, explore=0.33).terms["cfm"]
    batches = [torch.tensor([4, 7]), torch.tensor([9, 2])]  # of one accumulated update
    contexts = [Context(step=k, caption_ids=ids) for k in range(300) for ids in batches]
    drawn = [objective._draw(context) for context in contexts]
    assert [objective._draw(context) for context in contexts] == drawn
    assert drawn[::2] != drawn[1::2]
    for which in (0, 1):
        assert 0.27 < sum(draw[which] for draw in drawn) / 600 < 0.39
    never = prepared(concepts, model, adjust=0.0, explore=0.0)
    batch = batch_of(model, concepts)
    loss, _ = TrainingStep(model, never, None)(batch, 0, 0)
    plain, _ = TrainingStep(model, create_objective("hardest"), None)(batch, 0, 0)
    assert torch.equal(loss, plain)


def test_what_it_needs_and_cannot_get_is_a_clear_error(concepts) -> None:
    with pytest.raises(TrainingError, match="call prepare"):
        objectives["cfm"]().compute(torch.eye(3), torch.eye(3).bool(), Context())
    with pytest.raises(ConfigError, match=r"objective\.cfm\.mask_words"):
        objectives["cfm"](mask_words=0.0)
    model = make_model(concepts)
    step = TrainingStep(model, prepared(concepts, model), None)
    batch = batch_of(model, concepts)
    type(model.text_encoder).word_table, kept = None, type(model.text_encoder).word_table
    try:
        with pytest.raises(ConfigError, match="word_table"):
            step(batch, 0, 0)
    finally:
        type(model.text_encoder).word_table = kept


def make_trainer(pairs, folder: Path, config, **kwargs) -> Trainer:
    torch.manual_seed(config.seed)
    model = create_model(config.model, pairs.train, config.data)
    return Trainer(model, pairs, config, folder, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vse-fc", "scan-t2i"])
def test_a_run_learns_and_resumes_to_the_same_bytes(concepts, tmp_path, name) -> None:
    config = build_config(
        {
            "model": {"name": name, "embed_size": 16, "text": {"word_dim": 16, "dropout": 0.1}},
            "data": {"min_count": 1, "drop_regions": 0.2},
            "objective": {"cfm": {"warmup_epochs": 1, "adjust": 0.5, "explore": 0.5}},
            "train": {
                "epochs": 2, "batch_size": 32, "log_every": 1, "optimizer": {"lr": 5e-3},
            },
        }
    )  # fmt: skip
    result = make_trainer(concepts, tmp_path / "whole", config).run()
    assert result.best_rsum > 110  # 100 is about chance with 32 images
    command = iter(range(1000))
    cut = make_trainer(concepts, tmp_path / "cut", config, should_stop=lambda: next(command) >= 4)
    assert cut.run().interrupted
    make_trainer(concepts, tmp_path / "cut", config).run(resume=True)
    for file in ("metrics.jsonl", "last/model.safetensors"):
        mine, theirs = (tmp_path / run / file for run in ("cut", "whole"))
        assert mine.read_bytes() == theirs.read_bytes()
    written = (tmp_path / "whole" / "metrics.jsonl").read_text()
    assert "cfm/adjusted" in written
    assert "cfm/explored" in written


def losses_and_gradients(folder: Path) -> list[Tensor]:
    """As one of two processes, with other random numbers and another share than the other's."""
    data = folder / f"data-{rank()}"
    data.mkdir(parents=True)
    pairs = Pairs("c", {"train": make_split(data, "train", 24, 0)})
    model = make_model(pairs, "rvse-mlp")
    items = CaptionItems(pairs.train, model.text, Augmentation(), 0)
    results = []
    for margin in (0.2, -9.0):
        objective = prepared(pairs, model, adjust=0.5, explore=0.5)
        objective.terms["cfm"].margin = margin  # -9, which no option can be: no triplet violates it
        run = joined(TrainingStep(model, objective, None))
        torch.manual_seed(7 + rank())
        mine = range(5) if rank() == 0 else range(5, 12)
        batch = Collate(model.text.pad)([items[0, 2 * i, 0] for i in mine])
        for number in range(3):
            loss, _ = run(batch, 0, number)
            loss.backward()
            results.append(loss.detach())
        results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return results


@pytest.mark.slow
def test_processes_draw_alike_and_agree_on_loss_and_gradients(tmp_path, in_two_processes) -> None:
    first, second = in_two_processes(losses_and_gradients, tmp_path)
    for mine, theirs in zip(first, second, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5)
    assert len({float(loss) for loss in first[:3]}) > 1


@pytest.mark.parametrize("members", [1, 2])
def test_importance_of_a_batch_read_in_chunks_is_that_of_the_whole(members) -> None:
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(5, 3, 4, generator=draw).requires_grad_() for _ in range(members)]
    weights = [torch.randn(5, 3, 4, generator=draw) for _ in range(members)]

    def score(parts) -> Tensor:
        return sum((w * x.square()).sum() for w, x in zip(weights, parts, strict=True))

    expected = gradient_norm(score(whole), whole, members)
    assert expected.shape == (5, 3)
    cut = [
        [x.detach()[rows].requires_grad_() for x in whole] for rows in (slice(0, 2), slice(2, 5))
    ]
    again = [torch.cat(parts) for parts in zip(*cut, strict=True)]
    leaves = [leaf for chunk in cut for leaf in chunk]
    assert torch.equal(gradient_norm(score(again), leaves, members), expected)
