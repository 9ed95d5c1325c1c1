"""TripletCLIP's second half: values and gradients of plain loops, and real batches."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from counterfoil.models.store import save_pretrained
from counterfoil.objectives.negclip import NegCLIP
from counterfoil.objectives.triplet_clip import ShownFoils, TripletCLIP, shown_foils_loss
from tests.conftest import make_split
from tests.objectives.cases import check_gradients
from tests.objectives.live import one_step, score, small_model
from tests.objectives.test_negclip import SCALE, naive_softmax, write_foils


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(1, 4), st.integers(0, 999))
def test_the_second_half_is_what_plain_loops_find(ids, captions, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    count, numbers = len(ids), torch.tensor(ids)
    shown = ShownFoils(
        torch.randn(count, count, generator=generator, dtype=torch.float64) * 0.5,
        torch.randn(count, captions, generator=generator, dtype=torch.float64) * 0.5,
        numbers[:, None] == numbers,
        torch.rand(count, captions, generator=generator) < 0.3,
    )

    def naive(scores: Tensor, of_captions: Tensor) -> Tensor:
        total = 0.0
        for f in range(count):
            texts = [scores[f, g] for g in range(count) if ids[f] != ids[g]]
            texts += [of_captions[f, t] for t in range(captions) if not shown.not_negative[f, t]]
            images = [scores[g, f] for g in range(count) if ids[f] != ids[g]]
            total = total + naive_softmax(scores[f, f], texts) + naive_softmax(scores[f, f], images)
        return total / (2 * count)

    def loss(scores: Tensor, of_captions: Tensor) -> Tensor:
        return shown_foils_loss(replace(shown, scores=scores, of_captions=of_captions), SCALE)

    check_gradients(loss, naive, shown.scores, shown.of_captions)


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    return make_split(tmp_path_factory.mktemp("triplet"), "train", 24, seed=0)


def test_the_loss_of_a_batch_is_that_of_scores_taken_one_by_one(split, tmp_path) -> None:
    model, source = small_model(split, "vse-fc"), write_foils(tmp_path / "f.jsonl", split)
    save_pretrained(small_model(split, "vse-fc"), tmp_path / "retriever")
    first, *_ = one_step(NegCLIP(source=source, count=2), split, model)
    objective = TripletCLIP(source=source, count=2, images=str(tmp_path / "retriever"), second=2.0)
    loss, report, batch, brought = one_step(objective, split, model)
    foils, images, captions = [], [], batch.caption_ids.tolist()
    alone = functools.cache(functools.partial(score, model, split))
    for caption in captions:
        extra = brought[caption]
        assert len(extra.images) == len(extra.texts)
        own = int(split.image_of[caption])
        for image, text in zip(extra.images, extra.texts, strict=True):
            best = max(range(24), key=lambda i: (i != own, alone(i, text)))
            assert alone(image, text) == pytest.approx(alone(best, text), abs=1e-5)
            foils.append(text)
            images.append(image)
    scale = 1 / 0.07
    s = lambda i, text: torch.tensor(alone(i, text)).double() * scale / SCALE  # noqa: E731
    total = 0.0
    for f, (text, image) in enumerate(zip(foils, images, strict=True)):
        different = [g for g in range(len(foils)) if images[g] != image and foils[g] != text]
        texts = [s(image, foils[g]) for g in different]
        texts += [s(image, split.texts[c]) for c in captions if split.image_of[c] != image]
        others = [s(images[g], text) for g in different]
        total += naive_softmax(s(image, text), texts) + naive_softmax(s(image, text), others)
        assert f < len(foils)
    second = total / (2 * len(foils))
    assert float(report["triplet-clip/second"]) == pytest.approx(float(second), rel=2e-3)
    assert loss.item() == pytest.approx(first.item() + 2 * float(second), rel=2e-3)
    assert float(report["triplet-clip/images"]) == len(foils)


def test_retrieved_images_are_part_of_the_state_of_a_run(split, tmp_path) -> None:
    source = write_foils(tmp_path / "f.jsonl", split)
    model = small_model(split, "vse-fc")
    one, other = (TripletCLIP(source=source, images="retrieved") for _ in range(2))
    for objective in (one, other):
        one_step(objective, split, model)
        assert (objective.negatives.images == -1).all()  # none before the first epoch

    class Survey:
        def nearest_images(self, texts, owners):
            return (owners + 1) % 24

    one.begin_epoch(0, Survey())
    other.load_state_dict(one.state_dict())
    assert (other.negatives.images == one.negatives.images).all()
    assert (one.negatives.images >= 0).all()
