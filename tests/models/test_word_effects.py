"""Every method of word effects: what it computes, recomputed slowly, and who has it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from counterfoil.core.errors import ConfigError
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.batches.collate import pad_fragments, pad_texts
from counterfoil.data.text.tokenizers import without
from counterfoil.data.text.vocabulary import MASK
from counterfoil.data.text.words import caption_words
from counterfoil.models.match import METHODS
from counterfoil.models.word_effects import word_effects
from tests.models.test_explain import image_of, make

CAPTIONS = ["A dog and a cat.", "A red kite near the dog"]


def encoded(model, pairs):
    images = pad_fragments([image_of(pairs, number) for number in range(len(CAPTIONS))])
    return model.encode_images(images)


def corrector(pairs):
    return make("uniter-small", pairs, layers=2, heads=2, extras=["itm", "discrimination"])


def score(model, images, row: int, ids: list[int]) -> float:
    texts = model.encode_texts(pad_texts([ids], model.text.pad))
    return float(model.matcher(images[row : row + 1], texts)[0, 0])


@pytest.mark.parametrize("name", ["naaf", "vse-fc"])
@torch.no_grad()
def test_removal_is_what_the_score_loses(name, concepts) -> None:
    model = make(name, concepts)
    with eval_mode(model):
        images, encode = encoded(model, concepts), model.text.encode
        left_out = word_effects(model, images, CAPTIONS, "leave-one-out")
        masked = word_effects(model, images, CAPTIONS, "mask")
        for row, caption in enumerate(CAPTIONS):
            whole = score(model, images, row, encode(caption))
            mask = model.text.vocabulary.index[MASK]
            for number, word in enumerate(caption_words(caption)):
                rest = score(model, images, row, encode(without(caption, word)))
                assert left_out[row][number] == pytest.approx(whole - rest, abs=1e-5)
                ids = encode(caption)
                ids[number + 1] = mask
                rest = score(model, images, row, ids)
                assert masked[row][number] == pytest.approx(whole - rest, abs=1e-5)


@pytest.mark.parametrize("name", ["naaf", "vse-fc"])
def test_gradient_times_input_is_the_slope_along_the_embedding(name, concepts) -> None:
    """Scale one word's embedding by 1 ± ε: the difference quotient is the effect."""
    model = make(name, concepts).double()
    epsilon = 1e-4
    with eval_mode(model), torch.no_grad():
        batch = pad_fragments([image_of(concepts, 0)])
        images = model.encode_images(replace(batch, fragments=batch.fragments.double()))
        with torch.inference_mode():
            found = word_effects(model, images, CAPTIONS[:1], "gradient")[0]
        batch = pad_texts([model.text.encode(CAPTIONS[0])], model.text.pad)
        for number in (1, 4):
            scores = []
            for sign in (1, -1):

                def scaled(module, inputs, output, sign=sign, number=number):
                    output = output.clone()
                    output[:, number + 1] *= 1 + sign * epsilon
                    return output

                handle = model.text_encoder.word_table.register_forward_hook(scaled)
                scores.append(float(model.matcher(images, model.encode_texts(batch))[0, 0]))
                handle.remove()
            slope = (scores[0] - scores[1]) / (2 * epsilon)
            assert found[number] == pytest.approx(slope, abs=1e-5)
    assert not any(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", ["naaf", "vse-fc"])
def test_combined_is_the_mean_of_leaving_out_and_of_the_slope(name, concepts) -> None:
    model = make(name, concepts)
    with eval_mode(model):
        images = encoded(model, concepts)
        removed = word_effects(model, images, CAPTIONS, "leave-one-out")
        slopes = word_effects(model, images, CAPTIONS, "gradient")
        found = word_effects(model, images, CAPTIONS, "combined")
    for left, right, mean in zip(removed, slopes, found, strict=True):
        assert mean == pytest.approx((left + right) / 2)


def test_rollout_is_the_share_of_each_token_in_the_scored_state(concepts) -> None:
    model = corrector(concepts)
    with eval_mode(model), torch.no_grad():
        images = encoded(model, concepts)
        texts = model.encode_texts(
            pad_texts([model.text.encode(caption) for caption in CAPTIONS], model.text.pad)
        )
        flow = model.matcher.rollout(images, texts)
        assert flow.shape == texts.mask.shape
        assert (flow >= 0).all()
        assert (flow[~texts.mask] == 0).all()
        assert (flow.sum(1) < 1).all()  # the rest comes from the regions
        assert (flow[:, 0] > 0.25).all()  # the residual connection of two layers
        alone = model.matcher.rollout(images[1:], texts[1:])
        assert torch.allclose(alone[0][texts.mask[1]], flow[1][texts.mask[1]], atol=1e-6)
        effects = word_effects(model, images, CAPTIONS, "rollout")
        assert effects[0].tolist() == pytest.approx(flow[0, 1:7][: len(effects[0])].tolist())


def test_the_head_of_tags_dc_gives_log_odds(concepts) -> None:
    model = corrector(concepts)
    with eval_mode(model), torch.no_grad():
        images = encoded(model, concepts)
        texts = model.encode_texts(
            pad_texts([model.text.encode(caption) for caption in CAPTIONS], model.text.pad)
        )
        states = model.matcher.states(images, texts).words
        wrong = model.matcher.heads["discrimination"](states).softmax(-1)[1, 1:-1, 0].numpy()
        found = word_effects(model, images, CAPTIONS, "discrimination")[1]
    assert found == pytest.approx(
        np.log(1 - wrong[: len(found)]) - np.log(wrong[: len(found)]), abs=1e-4
    )


def has(model, image, method: str) -> bool:
    try:
        word_effects(model, image, CAPTIONS[:1], method)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(
    ("create", "missing"),
    [
        (lambda pairs: make("naaf", pairs), {"rollout", "discrimination"}),
        (lambda pairs: make("vse-fc", pairs), {"parts", "rollout", "discrimination"}),
        (corrector, {"parts"}),
    ],
    ids=["naaf", "vse-fc", "tags-dc"],
)
def test_a_model_has_the_methods_that_its_parts_allow(create, missing, concepts) -> None:
    model = create(concepts)
    with eval_mode(model), torch.no_grad():
        image = encoded(model, concepts)[:1]
        assert {method for method in METHODS if not has(model, image, method)} == missing
        with pytest.raises(ConfigError, match="expected one of"):
            word_effects(model, image, CAPTIONS[:1], "saliency")
