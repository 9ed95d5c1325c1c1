"""Batches that are encoded chunk by chunk have the gradients of batches encoded whole."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from counterfoil.core.config import build_config
from counterfoil.data.batches.collate import PairBatch
from counterfoil.encoders import Encoded
from counterfoil.encoders.recurrent import cuda_graphs
from counterfoil.models import Model, create_model
from counterfoil.objectives import Context, create_objective
from counterfoil.training.gradient_cache import GradientCache, chunks, mixes_items
from counterfoil.training.step import TrainingStep
from counterfoil.training.trainer import Trainer
from tests.conftest import thinned
from tests.models.test_models import (
    FEATURE_MODELS,
    SCORES_ALONE,
    batch_of,
    make,
    tiny_bert,
)

__all__ = ["tiny_bert"]

PAIRS = 7


def gradients(model: Model, batch: PairBatch, objective="triplet", chunk=0, dtype=None):
    """Loss and gradients of one step, from the same random numbers whatever the chunk."""
    model.zero_grad()
    torch.manual_seed(5)
    step = TrainingStep(model, create_objective(objective), dtype, chunk)
    loss, _ = step(batch, 0, 0)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same(one, other, tolerance: float) -> None:
    """Relative error ‖g − g′‖ / ‖g‖ of the gradient of all weights together, and of the loss."""
    assert float((one[0] - other[0]).abs()) <= tolerance * max(1.0, float(one[0].abs()))
    assert one[1].keys() == other[1].keys()
    whole, cut = (
        torch.cat([grad.flatten() for grad in result[1].values()]) for result in (one, other)
    )
    error = float((whole - cut).norm() / whole.norm())
    assert error <= tolerance, f"gradient differs by {error:.2e}"


def test_chunks_are_made_again_as_they_were_though_nothing_is_replayed_then(concepts) -> None:
    """On a GPU networks are replayed in the forward pass; backward is another thread's."""
    settings = build_config({"model": {"name": "vse-infty", "embed_size": 8}})
    torch.manual_seed(0)
    model = create_model(settings.model, concepts.train, settings.data).train()
    batch = batch_of(model, concepts, PAIRS)
    step = TrainingStep(model, create_objective("triplet"), None, 3)

    def found(replays: bool):
        model.zero_grad()
        torch.manual_seed(5)
        with cuda_graphs(replays):
            loss, _ = step(batch, 0, 0)
        loss.backward()
        return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    assert_same(found(True), found(False), 1e-6)


def wide(batch: PairBatch) -> PairBatch:
    boxes = batch.images.boxes.double() if batch.images.boxes is not None else None
    images = replace(batch.images, fragments=batch.images.fragments.double(), boxes=boxes)
    return replace(batch, images=images)


@pytest.mark.parametrize("name", thinned(FEATURE_MODELS, "vse-infty", "naaf", "uniter-small"))
def test_every_model_has_the_gradients_of_the_whole_batch(name, concepts, tiny_bert) -> None:
    # GSMN cuts a vector into 16 blocks: of one number each, cosines are ±1 and have no slope
    model = make(name, concepts, tiny_bert, embed_size=48).eval()
    batch = batch_of(model, concepts, PAIRS)
    assert_same(gradients(model, batch), gradients(model, batch, chunk=3), 2e-6)
    model, batch = model.double(), wide(batch)
    assert_same(gradients(model, batch), gradients(model, batch, chunk=3), 1e-10)


@pytest.mark.parametrize("objective", thinned(SCORES_ALONE, "hardest", "infonce", "selhn"))
def test_every_objective_of_scores_has_them(objective, concepts, tiny_bert) -> None:
    model = make("naaf", concepts, tiny_bert).eval().double()
    batch = wide(batch_of(model, concepts, PAIRS))
    whole = gradients(model, batch, objective)
    assert_same(whole, gradients(model, batch, objective, chunk=2), 1e-10)


def test_an_objective_that_scores_pairs_of_its_own_has_them(concepts, tiny_bert) -> None:
    model = make("scan", concepts, tiny_bert).eval().double()
    batch = wide(batch_of(model, concepts, PAIRS))
    objective = {"hard-candidates": {"kept": 3}}
    assert_same(gradients(model, batch, objective), gradients(model, batch, objective, 2), 1e-10)


@settings(max_examples=8)
@given(pairs=st.integers(2, 9), chunk=st.integers(1, 10), ensemble_size=st.integers(1, 2))
@pytest.mark.slow
def test_any_size_of_chunk_gives_the_same_gradients(pairs, chunk, ensemble_size, concepts) -> None:
    model = make("scan", concepts, None, ensemble_size=ensemble_size).eval().double()
    batch = wide(batch_of(model, concepts, pairs))
    assert_same(gradients(model, batch), gradients(model, batch, chunk=chunk), 1e-10)


@pytest.mark.parametrize("name", thinned(["vse-fc", "scan", "naaf"], "naaf"))
def test_dropout_is_repeated_exactly(name, concepts) -> None:
    model = make(name, concepts, None, text={"dropout": 0.4}).double()
    batch = wide(batch_of(model, concepts, PAIRS))
    result = gradients(model, batch, chunk=3)
    model.zero_grad()
    torch.manual_seed(5)  # chunk by chunk as well, but remembering everything
    images = Encoded.cat([model.encode_images(part) for part in chunks(batch.images, 3)])
    texts = Encoded.cat([model.encode_texts(part) for part in chunks(batch.texts, 3)])
    positives = batch.image_ids[:, None] == batch.owners
    loss = (
        create_objective("triplet").compute(model.matcher(images, texts), positives, Context()).loss
    )
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_same((loss.detach(), grads), result, 1e-10)


def test_random_numbers_after_a_step_do_not_depend_on_the_backward_pass(concepts) -> None:
    model = make("vse-fc", concepts, None, text={"dropout": 0.4})
    batch = batch_of(model, concepts, PAIRS)
    states = []
    for through in (False, True):
        torch.manual_seed(1)
        loss, _ = TrainingStep(model, create_objective("triplet"), None, 2)(batch, 0, 0)
        if through:
            loss.backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_mixed_precision_has_the_gradients_of_the_whole_batch(concepts) -> None:
    model = make("scan", concepts, None).eval()
    batch = batch_of(model, concepts, PAIRS)
    whole = gradients(model, batch, dtype=torch.bfloat16)
    assert_same(whole, gradients(model, batch, chunk=3, dtype=torch.bfloat16), 1e-2)


def test_what_lies_between_is_not_kept(concepts) -> None:
    """Of the image encoder's inner values, at most one chunk's is alive at any time."""
    model = make("scan", concepts, None).eval()
    layer = next(part for part in model.image_encoder.modules() if isinstance(part, nn.Linear))
    alive: list[weakref.ref] = []
    rows, most = [], 0

    def look(_module, _inputs, output) -> None:
        nonlocal most
        rows.append(len(output))
        alive.append(weakref.ref(output))
        most = max(most, sum(len(ref()) for ref in alive if ref() is not None))

    layer.register_forward_hook(look)
    gradients(model, batch_of(model, concepts, 12), chunk=3)
    assert rows == [3] * 8  # four chunks there, four on the way back
    assert most <= 6  # the one before may be alive while its successor is made
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_an_encoder_that_normalizes_over_its_batch_is_not_cut(concepts) -> None:
    model = make("rvse-mlp", concepts, None, text={"dropout": 0.0}).double().train()
    assert GradientCache(model, 2).whole() == ["image"]
    batch = wide(batch_of(model, concepts, PAIRS))
    kept = {k: v.clone() for k, v in model.state_dict().items()}
    whole = gradients(model, batch, "hardest")
    after = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(kept)
    assert_same(whole, gradients(model, batch, "hardest", chunk=2), 1e-10)
    for name, value in model.state_dict().items():
        assert torch.equal(value, after[name]), name


@pytest.mark.parametrize("name", thinned(FEATURE_MODELS, "vse-infty", "hrem"))
def test_encoding_leaves_no_trace_but_in_batch_statistics(name, concepts, tiny_bert) -> None:
    """Else a chunk, which is encoded twice, would leave it twice."""
    model = make(name, concepts, tiny_bert).train()
    batch = batch_of(model, concepts, 4)
    for encoder, part in ((model.image_encoder, batch.images), (model.text_encoder, batch.texts)):
        if mixes_items(encoder):
            continue
        before = {k: v.clone() for k, v in encoder.named_buffers()}
        encoder(part)
        assert all(torch.equal(v, before[k]) for k, v in encoder.named_buffers())


def run(concepts, folder, said=None, **train):
    base = {
        "model": {"name": "scan", "embed_size": 16, "text": {"word_dim": 8}},
        "data": {"min_count": 1},
        "train": {"epochs": 1, "batch_size": 32, "log_every": 1, **train},
    }
    config = build_config(base)
    torch.manual_seed(0)
    model = create_model(config.model, concepts.train, config.data)
    trainer = Trainer(model, concepts, config, folder)
    trainer.progress.say = (said if said is not None else []).append
    trainer.run()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_says_how_many_negatives_an_anchor_sees(concepts, tmp_path) -> None:
    said: list[str] = []
    run(concepts, tmp_path, said, chunk_size=8)
    about = [line for line in said if "an anchor sees" in line]
    assert len(about) == 1
    assert "batches of 32 pairs, encoded 8 at a time" in about[0]


@pytest.mark.slow
def test_a_run_with_chunks_learns_what_a_run_without_learns(concepts, tmp_path) -> None:
    whole = run(concepts, tmp_path / "whole", accumulate=2)
    cut = run(concepts, tmp_path / "cut", accumulate=2, chunk_size=5)
    assert len(whole) == len(cut)
    for one, other in zip(whole, cut, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_chunks_cut_every_tensor_of_a_batch_alike(concepts) -> None:
    model = make("gsmn-sparse", concepts, None)
    batch = batch_of(model, concepts, 5)
    parts = [*chunks(batch.texts, 2)]
    assert [len(part.ids) for part in parts] == [2, 2, 1]
    for name in ("ids", "mask", "graph"):
        joined = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(joined, getattr(batch.texts, name))
