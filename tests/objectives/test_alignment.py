"""Align before fuse: plain loops over words and regions, sampled negatives, real steps."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from counterfoil.core.config import build_config
from counterfoil.core.errors import ConfigError, TrainingError
from counterfoil.encoders.encoded import Encoded
from counterfoil.models import create_model
from counterfoil.objectives import Context
from counterfoil.objectives.alignment import (
    Alignment,
    mean_max_cosine,
    sample_negatives,
    softmax_of_candidates,
)
from counterfoil.objectives.tags import MLM, TAGS
from counterfoil.training.step import TrainingStep
from tests.objectives.live import prepare, score
from tests.objectives.test_tags import batch_of, small, split, step  # noqa: F401 - a fixture

CAPTIONS = [0, 1, 4, 6, 8, 11]  # the first two share their image


def encoded(lengths: list[int], seed: int) -> Encoded:
    longest = max(lengths)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    numbers = torch.randn(len(lengths), longest, 5, generator=torch.Generator().manual_seed(seed))
    return Encoded(numbers.masked_fill(~mask[..., None], 0.0), mask)


def looped_likeness(images: Encoded, texts: Encoded) -> list[list[float]]:
    rows = []
    for regions, is_region in zip(images.fragments.detach(), images.mask, strict=True):
        row = []
        for words, is_word in zip(texts.fragments.detach(), texts.mask, strict=True):
            best = [
                max(float(F.cosine_similarity(w, r, dim=0)) for r in regions[is_region])
                for w in words[is_word]
            ]
            row.append(sum(best) / len(best))
        rows.append(row)
    return rows


def test_likeness_is_the_mean_over_words_of_the_best_regions_cosine() -> None:
    images, texts = encoded([3, 1, 4], 0), encoded([2, 5], 1)
    expected = torch.tensor(looped_likeness(images, texts))
    torch.testing.assert_close(mean_max_cosine(images, texts), expected, rtol=1e-4, atol=1e-5)


def test_embeddings_alone_cost_the_infonce_of_their_likeness(split) -> None:  # noqa: F811
    model = small(split)
    batch = batch_of(split, model, CAPTIONS)
    loss, diagnostics = step(Alignment(temperature=0.2), model, batch)
    images, texts = model.encode_images(batch.images), model.encode_texts(batch.texts)
    like = torch.tensor(looped_likeness(images, texts)) / 0.2
    owners = [c // 2 for c in CAPTIONS]
    costs = []
    for matrix in (like, like.T):
        for k, row in enumerate(matrix):
            others = [float(row[j]) for j in range(len(row)) if owners[j] != owners[k]]
            costs.append(math.log(sum(math.exp(s - float(row[k])) for s in others) + 1))
    assert loss.item() == pytest.approx(sum(costs) / len(costs), abs=1e-4)
    assert float(diagnostics["alignment/temperature"]) == pytest.approx(0.2)


def test_with_all_negatives_kept_the_cross_encoder_costs_what_plain_loops_find(split) -> None:  # noqa: F811
    model = small(split)
    batch = batch_of(split, model, CAPTIONS)
    alone, _ = step(Alignment(), model, batch)
    loss, diagnostics = step(Alignment(kept=31, match=0.5), model, batch)
    owners = [c // 2 for c in CAPTIONS]
    costs = []
    for image, caption in zip(owners, CAPTIONS, strict=True):
        own = score(model, split, image, split.texts[caption])
        captions = [score(model, split, image, split.texts[c]) for c in CAPTIONS if c // 2 != image]
        images = [score(model, split, i, split.texts[caption]) for i in owners if i != image]
        for others in (captions, images):
            costs.append(math.log(1 + sum(math.exp(s - own) for s in others)))
    matched = sum(costs) / len(costs)
    assert float(diagnostics["alignment/match"]) == pytest.approx(matched, abs=1e-4)
    assert loss.item() == pytest.approx(alone.item() + 0.5 * matched, abs=1e-4)


def test_negatives_are_drawn_from_the_softmax_and_never_a_pair() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([[5.0, 0.0, 1.0, 2.0]]).expand(4000, 4)
    negative = torch.tensor([[False, True, True, True]]).expand(4000, 4)
    first = sample_negatives(logits, negative, 2).index
    shares = torch.bincount(first[:, 0], minlength=4) / 4000
    expected = torch.tensor([-torch.inf, 0.0, 1.0, 2.0]).softmax(0)
    torch.testing.assert_close(shares, expected, rtol=0, atol=0.03)
    assert (first[:, 0] != first[:, 1]).all()


def test_what_is_not_real_costs_nothing() -> None:
    positive = torch.tensor([1.0, -1.0])
    candidates = torch.tensor([[0.0, 50.0], [50.0, 50.0]])
    real = torch.tensor([[True, False], [False, False]])
    expected = math.log(1 + math.exp(-1.0)) / 4
    assert softmax_of_candidates(positive, candidates, real).item() == pytest.approx(expected)


def test_only_embeddings_learn_where_nothing_is_kept(split) -> None:  # noqa: F811
    for kept, reached in ((0, False), (1, True)):
        model = small(split)
        step(Alignment(kept=kept), model, batch_of(split, model, CAPTIONS))[0].backward()
        layer = model.matcher.transformer.layers[0].qkv.weight
        assert (layer.grad is not None) == reached
        assert model.image_encoder.feature.weight.grad.abs().sum() > 0
        assert model.text_encoder.embed.weight.grad.abs().sum() > 0


def test_layers_are_not_asked_in_the_epochs_of_the_embeddings(split) -> None:  # noqa: F811
    model = small(split).train()
    batch = batch_of(split, model, CAPTIONS)
    run = TrainingStep(model, Alignment(kept=31, alone=1), None)
    losses = [run(batch, epoch, 0)[0].item() for epoch in (0, 1)]
    assert losses[0] == pytest.approx(step(Alignment(), model, batch)[0].item())
    assert losses[1] == pytest.approx(step(Alignment(kept=31), model, batch)[0].item())
    assert losses[0] < losses[1]
    told = [run.objective.loss_at_equal_scores(6, 4.0, epoch) for epoch in (0, 1)]
    assert told[1] - told[0] == pytest.approx(math.log(5))


def test_masks_are_filled_at_the_same_cost_as_by_tags(split) -> None:  # noqa: F811
    model = small(split)
    batch = batch_of(split, model, CAPTIONS)
    alone, tags = MLM(masks=3), TAGS(masks=3, samples=1, kept=1, mlm=1.0, rank=0.0)
    prepare(alone, split, model)
    prepare(tags, split, model)
    loss, diagnostics = step(alone, model, batch)
    assert loss.item() == pytest.approx(step(tags, model, batch)[0].item(), abs=1e-5)
    assert float(diagnostics["mlm/loss"]) == loss.item()


def test_outside_a_run_and_with_fewer_than_no_negatives_both_say_what_is_wrong() -> None:
    square = torch.eye(3)
    for objective in (Alignment(), MLM()):
        with pytest.raises(TrainingError, match="batches of a training run"):
            objective.compute(square, square.bool(), Context())
    with pytest.raises(ConfigError, match="kept"):
        Alignment(kept=-1)


def test_a_model_of_whole_vectors_is_refused_with_the_models_that_fit(split) -> None:  # noqa: F811
    config = build_config({"model": {"name": "vse-fc", "embed_size": 8}, "data": {"min_count": 1}})
    model = create_model(config.model, split, config.data)
    with pytest.raises(
        ConfigError, match=r"objective\.alignment compares words with .*uniter-small"
    ):
        step(Alignment(), model, batch_of(split, model, CAPTIONS))
