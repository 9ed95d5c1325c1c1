"""Copies of a model side by side: one model whose score is the mean of theirs."""

from __future__ import annotations

import pytest
import torch

from counterfoil.core.config import ModelConfig
from counterfoil.matchers.ensemble import split_members
from counterfoil.models import create_model, from_pretrained, save_pretrained

MODELS = ["vse-fc", "scan-t2i", "naaf", "sgr"]


def build(pairs, name: str, ensemble_size: int = 2):
    torch.manual_seed(1)
    config = ModelConfig(
        name=name, embed_size=16, text={"word_dim": 8}, ensemble_size=ensemble_size
    )
    return create_model(config, pairs.train).eval()


def inputs(pairs, count: int = 5):
    split = pairs.test
    return [split.fragments.read(i) for i in range(count)], split.texts[: count + 2]


@pytest.mark.parametrize("name", MODELS)
def test_the_score_is_the_mean_of_the_members(concepts, name) -> None:
    model, alone = build(concepts, name), build(concepts, name, ensemble_size=1)
    images, captions = inputs(concepts)
    each = []
    for k in range(2):
        parts = ("image_encoder", "text_encoder", "matcher")
        weights = {
            f"{part}.{key}": value
            for part in parts
            for key, value in getattr(model, part).members[k].state_dict().items()
        }
        alone.load_state_dict(weights)
        each.append(alone.score(images, captions))
    assert not torch.allclose(each[0], each[1])
    torch.testing.assert_close(model.score(images, captions), (each[0] + each[1]) / 2)


@pytest.mark.parametrize("name", MODELS)
def test_copies_are_saved_and_read_back(concepts, name, tmp_path) -> None:
    model = build(concepts, name)
    save_pretrained(model, tmp_path / "m")
    again = from_pretrained(tmp_path / "m")
    assert again.spec.ensemble_size == 2
    assert torch.equal(again.score(*inputs(concepts)), model.score(*inputs(concepts)))


def test_members_take_apart_what_was_put_together(concepts) -> None:
    model = build(concepts, "scan-t2i")
    from counterfoil.data.batches.collate import pad_fragments

    batch = pad_fragments(inputs(concepts)[0])
    encoded = model.encode_images(batch)
    assert encoded.fragments.shape[-1] == 32
    for part, member in zip(split_members(encoded, 2), model.image_encoder.members, strict=True):
        assert torch.equal(part.fragments, member(batch).fragments)


def test_explanations_of_copies_still_add_up(concepts) -> None:
    model = build(concepts, "naaf")
    images, captions = inputs(concepts)
    match = model.explain(images[0], captions[0])
    assert match.additive
    total = sum(word.effect for word in (*match.words, *match.specials))
    assert total == pytest.approx(match.score, abs=1e-5)
