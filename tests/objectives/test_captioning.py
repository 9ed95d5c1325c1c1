"""Captioning: the caption generator of VSRN, and what it asks of a batch."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from counterfoil.core.config import build_config
from counterfoil.core.errors import ConfigError
from counterfoil.data.batches.collate import ImageBatch, PairBatch, TextBatch
from counterfoil.encoders import Encoded
from counterfoil.models import create_model
from counterfoil.objectives import Context
from counterfoil.objectives.captioning import CaptionGenerator, Captioning
from counterfoil.training.trainer import Trainer
from tests.conftest import assert_close, assert_gradient_close, load_fixture, thinned
from tests.encoders.test_encoders import ragged
from tests.encoders.test_parity import vocabulary

WORDS = 20


def renamed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = {
        "encoder.vid2hid": "enter",
        "encoder.rnn": "reader",
        "decoder.embedding": "embed",
        "decoder.rnn": "writer",
        "decoder.out": "out",
        "decoder.attention.linear2": "attention.score",
        "decoder.attention.linear1": "attention.of_regions",
    }
    state = {}
    for key, value in weights.items():
        for old, new in names.items():
            key = key.replace(old, new)
        state[key.removesuffix("_l0") if key.startswith("writer") else key] = value
    both = state["attention.of_regions.weight"]  # one layer over region and decoder state
    halves = both.chunk(2, dim=1)
    state["attention.of_regions.weight"], state["attention.of_state.weight"] = halves
    return state


def test_the_generator_agrees_with_the_public_one_with_gradients() -> None:
    fixture = load_fixture("vsrn-caption")
    sizes = [fixture.hyper[key] for key in ("dim_vid", "vocab_size", "dim_hidden", "dim_word")]
    generator = CaptionGenerator(*sizes, dropout=0.2).eval()
    generator.load_state_dict(renamed(fixture.weights()))
    regions, ids = fixture["in.regions"].requires_grad_(), fixture["in.targets"]
    mask = torch.ones(regions.shape[:2], dtype=torch.bool)
    states = generator(regions, mask, torch.arange(4), ids[:, :-1])
    told = generator.out(states).log_softmax(-1)
    assert_close(told, fixture["out.logprobs"])
    told.gather(2, ids[:, 1:, None]).sum().backward()
    assert_gradient_close(regions.grad, fixture["grad.regions"])


def captioning(dim: int = 8, **options) -> Captioning:
    torch.manual_seed(0)
    objective = Captioning(hidden=6, word_dim=5, dropout=0.0, **options)
    objective.prepare(SimpleNamespace(embed_size=dim, text=vocabulary(WORDS)))
    return objective


def pair_batch(seed: int, images: int = 4, owners: list[int] | None = None) -> PairBatch:
    """Images with regions of 8 numbers, and captions of 2 to 7 words."""
    x, mask = ragged(seed, images, 5, 8)
    owner = torch.tensor(owners if owners is not None else list(range(images)))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, WORDS, (len(owner), 7), generator=generator)
    lengths = torch.randint(2, 8, (len(owner),), generator=generator)
    texts = TextBatch(ids, torch.arange(7)[None] < lengths[:, None])
    captions = torch.arange(len(owner))
    return PairBatch(ImageBatch(x, mask), texts, torch.arange(images), captions, owner)


def report(objective: Captioning, batch: PairBatch, regions: torch.Tensor | None = None):
    regions = batch.images.fragments if regions is None else regions
    live = SimpleNamespace(batch=batch, images=Encoded(regions, batch.images.mask), texts=None)
    scores = torch.zeros(len(batch.image_ids), len(batch.owners))
    positives = batch.image_ids[:, None] == batch.owners[None]
    return objective.compute(scores, positives, Context(services=live))


def told_one_by_one(objective: Captioning, batch: PairBatch) -> list[float]:
    """Cost of every caption: one image, one word, one region at a time."""
    part, costs = objective.generator, []
    for caption, owner in enumerate(batch.owners.tolist()):
        state, read = torch.zeros(1, 6), []
        cell = torch.nn.GRUCell(6, 6)
        cell.load_state_dict(
            {k.removesuffix("_l0"): v for k, v in part.reader.state_dict().items()}
        )
        for region in batch.images.fragments[owner][batch.images.mask[owner]]:
            state = cell(part.enter(region)[None], state)
            read.append(state[0])
        ids = batch.texts.ids[caption][batch.texts.mask[caption]].tolist()[: objective.max_len]
        cost = 0.0
        for word, following in pairwise(ids):
            attention = part.attention
            scores = [
                attention.score(torch.tanh(attention.of_regions(r) + attention.of_state(state[0])))
                for r in read
            ]
            weights = torch.cat(scores).softmax(0)
            context = sum(w * r for w, r in zip(weights, read, strict=True))
            state = part.writer(torch.cat([part.embed.weight[word], context])[None], state)
            cost -= float(part.out(state[0]).log_softmax(0)[following])
        costs.append(cost)
    return costs


@settings(max_examples=10)
@given(
    seed=st.integers(0, 999),
    owners=st.sampled_from([[0, 1, 2, 3], [0, 0, 1, 2, 3, 3, 3], [3, 1]]),
    max_len=st.sampled_from([2, 4, 60]),
)
@torch.no_grad()
def test_the_loss_is_the_mean_cost_of_captions_told_one_by_one(seed, owners, max_len) -> None:
    objective, batch = captioning(max_len=max_len), pair_batch(seed, owners=owners)
    costs = told_one_by_one(objective, batch)
    result = report(objective, batch)
    assert float(result.loss) == pytest.approx(sum(costs) / len(costs), rel=1e-4)
    words = int((batch.texts.mask[:, :max_len].sum(1) - 1).sum())
    expected = float(torch.tensor(sum(costs) / words).exp())
    assert float(result.diagnostics["captioning/perplexity"]) == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def test_padding_of_regions_and_words_changes_nothing() -> None:
    objective, batch = captioning(), pair_batch(1)
    expected = report(objective, batch).loss
    images, texts = batch.images, batch.texts
    none = torch.zeros(4, 3, dtype=torch.bool)
    wider = replace(
        batch,
        images=ImageBatch(
            torch.cat([images.fragments, torch.full((4, 3, 8), 9.0)], 1),
            torch.cat([images.mask, none], 1),
        ),
        texts=TextBatch(
            torch.cat([texts.ids, torch.ones(4, 3).long()], 1), torch.cat([texts.mask, none], 1)
        ),
    )
    assert torch.allclose(report(objective, wider).loss, expected, atol=1e-5)


def test_the_gradient_reaches_regions_and_every_parameter() -> None:
    objective, batch = captioning(), pair_batch(2)
    regions = batch.images.fragments.clone().requires_grad_()
    report(objective, batch, regions).loss.backward()
    assert regions.grad[batch.images.mask].any(1).all()
    for name, parameter in objective.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("case", ["no regions", "no words"])
def test_an_image_or_a_caption_with_nothing_in_it_is_harmless(case) -> None:
    objective, batch = captioning(), pair_batch(3)
    if case == "no regions":
        batch.images.mask[0] = False
        batch.images.fragments[0] = 0
    else:
        batch = replace(batch, texts=TextBatch(batch.texts.ids[:, :1], batch.texts.mask[:, :1]))
    regions = batch.images.fragments.clone().requires_grad_()
    loss = report(objective, batch, regions).loss
    loss.backward()
    assert loss.isfinite()
    assert regions.grad.isfinite().all()
    assert (float(loss.detach()) == 0) == (case == "no words")


def test_regions_of_several_copies_are_refused() -> None:
    batch = pair_batch(4)
    with pytest.raises(ConfigError, match=r"model\.ensemble_size=1"):
        report(captioning(), batch, batch.images.fragments.repeat(1, 1, 2))


def test_regions_in_bfloat16_are_read() -> None:
    objective, batch = captioning(), pair_batch(5)
    half = report(objective, batch, batch.images.fragments.bfloat16()).loss
    whole = report(objective, batch).loss
    assert torch.allclose(half, whole, rtol=0.02)


@pytest.mark.parametrize("captions", thinned(["all", "grouped"], "grouped"))
def test_vsrn_trains_with_captions_and_learns_to_tell_them(concepts, tmp_path, captions) -> None:
    config = build_config(
        {
            "data": {"min_count": 1, "captions": captions},
            "model": {
                "name": "vsrn",
                "embed_size": 16,
                "image": {"layers": 1},
                "text": {"word_dim": 8},
            },
            "objective": {"hardest": 1, "captioning": {"hidden": 12, "word_dim": 8}},
            "train": {
                "epochs": 2,
                "batch_size": 24,
                "log_every": 1,
                "optimizer": {"lr": 1e-2},
                "precision": "bf16" if captions == "grouped" else "float32",
            },
        }
    )
    torch.manual_seed(0)
    model = create_model(config.model, concepts.train, config.data)
    trainer = Trainer(model, concepts, config, tmp_path)
    trained = {id(p) for group in trainer.updates.optimizer.param_groups for p in group["params"]}
    assert {id(p) for p in trainer.objective.parameters()} <= trained
    trainer.run()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert steps[-1]["captioning/perplexity"] < 0.8 * steps[0]["captioning/perplexity"]


def test_an_interrupted_run_goes_on_with_its_generator(concepts, tmp_path) -> None:
    config = build_config(
        {
            "data": {"min_count": 1},
            "model": {"name": "vsrn", "embed_size": 8, "image": {"layers": 1}},
            "objective": {"hardest": 1, "captioning": {"hidden": 6, "word_dim": 4}},
            "train": {"epochs": 1, "batch_size": 32, "log_every": 1},
        }
    )

    def run(name: str, resume: bool = False, stop_after: int = 99) -> bytes:
        torch.manual_seed(0)
        model = create_model(config.model, concepts.train, config.data)
        command = iter(range(1, 100))
        Trainer(
            model,
            concepts,
            config,
            tmp_path / name,
            should_stop=lambda: next(command) >= stop_after,
        ).run(resume)
        return (tmp_path / name / "metrics.jsonl").read_bytes()

    whole = run("whole")
    assert run("cut", stop_after=2) != whole
    assert run("cut", resume=True) == whole
