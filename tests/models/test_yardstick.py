"""One scale over pictures, and a score beside those of other pairs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from counterfoil.core.errors import CheckpointError
from counterfoil.data.text.tokenizers import HuggingFaceText
from counterfoil.models import from_pretrained, save_pretrained
from counterfoil.models.match import POINTS, YARDSTICK, Yardstick, load_yardstick
from counterfoil.models.store import model_digest
from counterfoil.models.yardstick import _quantiles, full_colors, measure_yardstick
from counterfoil.plots.sentences import color_note, score_note, shades
from tests.conftest import thinned
from tests.models.test_explain import image_of, make

RAMP = tuple(np.linspace(0.0, 1.0, POINTS).tolist())


def yardstick(**changes) -> Yardstick:
    low = tuple(value / 2 for value in RAMP)
    return replace(Yardstick("dev", 200, RAMP, low, 0.1, 0.05), **changes)


@pytest.fixture
def model(concepts):
    made = make("naaf", concepts).eval()
    made.yardstick = yardstick()
    return made


@pytest.mark.parametrize(
    ("score", "right", "wrong"),
    [(-1.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.25, 0.25, 0.5), (0.405, 0.405, 0.81), (9.0, 1.0, 1.0)],
)
def test_a_score_is_held_against_right_and_wrong_pairs(score, right, wrong) -> None:
    assert yardstick().above(score) == pytest.approx({"right": right, "wrong": wrong})


def test_pairs_that_all_score_the_same_divide_nothing_by_zero() -> None:
    flat = yardstick(right=(0.5,) * POINTS)
    assert [flat.above(score)["right"] for score in (0.4, 0.5, 0.6)] == [0.0, 0.0, 1.0]


def test_the_score_is_told_with_its_yardstick(model, concepts) -> None:
    match = replace(model.explain(image_of(concepts), "a dog"), score=0.31)
    assert score_note(match) == "higher than 62 % of wrong pairs and 31 % of right pairs (dev)"
    assert match.as_dict()["above"] == pytest.approx({"right": 0.31, "wrong": 0.62})


@pytest.mark.parametrize("effect", [0.02, 0.1, 0.7, -0.01, -0.05, -3.0])
def test_an_effect_has_the_same_shade_beside_any_other_word(model, concepts, effect) -> None:
    match = model.explain(image_of(concepts), "a dog near the kite")
    shade = []
    for other in (0.001, 5.0):
        words = [replace(word, effect=other) for word in match.words]
        words[1] = replace(words[1], effect=effect)
        shade.append(shades(replace(match, words=words))[1])
    wanted = max(-1.0, min(1.0, effect / (0.1 if effect > 0 else 0.05)))
    assert shade == pytest.approx([wanted, wanted])
    assert "full green from +0.1000, full red from −0.0500" in color_note(match)


def test_without_a_yardstick_colors_compare_within_a_sentence_and_say_so(concepts) -> None:
    match = make("naaf", concepts).explain(image_of(concepts), "a dog near the kite")
    words = [replace(word, effect=0.01 * n) for n, word in enumerate(match.words)]
    assert max(shades(replace(match, words=words))) == 1.0
    assert "within this sentence only" in color_note(match)
    assert score_note(match) == ""
    assert match.as_dict()["above"] is None


def test_punctuation_has_no_color(model, concepts) -> None:
    model.text.vocabulary.entries[-1] = "."  # a vocabulary with a full stop
    model.text.vocabulary.index["."] = len(model.text.vocabulary.entries) - 1
    match = model.explain(image_of(concepts), "a dog .")
    stop = replace(match.words[2], effect=0.5)
    assert stop.known
    assert shades(replace(match, words=[*match.words[:2], stop]))[2] == 0.0


@pytest.mark.parametrize("name", thinned(["naaf", "vse-fc", "scan-t2i"], "naaf"))
def test_the_yardstick_is_measured_on_a_sample_of_pairs(name, concepts) -> None:
    model = make(name, concepts).eval()
    result = measure_yardstick(model, concepts["dev"])
    assert result == measure_yardstick(model, concepts["dev"])
    assert (result.split, len(result.right), len(result.wrong)) == ("dev", POINTS, POINTS)
    split = concepts["dev"]
    assert result.pairs == 2 * len(split.texts)
    own = [
        float(model.score([split.fragments.read(int(image))], [text]))
        for image, text in zip(split.image_of, split.texts, strict=True)
    ]
    assert (result.right[0], result.right[-1]) == pytest.approx((min(own), max(own)), abs=1e-5)
    assert result.right[POINTS // 2] == pytest.approx(float(np.median(own)), abs=1e-5)
    assert result.effect_for > 0
    assert result.effect_against >= result.effect_for / 4


def test_an_image_with_the_same_caption_is_no_wrong_one(concepts) -> None:
    """Images that all have one caption make no wrong pairs; another caption makes some."""
    model, dev = make("naaf", concepts), concepts["dev"]
    same = replace(dev, captions=[["a dog near the kite"]] * len(dev))
    assert measure_yardstick(model, same) is None
    spelt = replace(dev, captions=[["a dog near the kite"], ["A dog, near the kite!"]] * 16)
    assert measure_yardstick(model, spelt) is None
    mixed = replace(dev, captions=[["a dog near the kite"], ["the kite"]] * (len(dev) // 2))
    assert measure_yardstick(model, mixed).pairs == 2 * len(dev)


def test_too_few_pairs_give_no_yardstick(concepts) -> None:
    assert measure_yardstick(make("naaf", concepts), concepts["dev"].select([0, 1])) is None


def test_a_model_whose_scores_are_no_numbers_has_no_yardstick(concepts) -> None:
    model = make("naaf", concepts)
    for weight in model.parameters():
        weight.data.fill_(float("nan"))
    assert measure_yardstick(model, concepts["dev"]) is None


@pytest.mark.parametrize(
    ("effects", "full"),
    [
        ([0.0] * 50 + [-0.2], (0.2, 0.2)),
        ([0.0] * 50 + [0.4], (0.4, 0.1)),
        ([0.4, float("nan"), float("inf"), float("-inf"), -0.01], (0.4, 0.1)),
        ([0.0, 0.0], None),
        ([float("nan")], None),
        ([], None),
    ],
)
def test_the_effect_of_a_full_color_is_a_number_above_zero(effects, full) -> None:
    assert full_colors(effects) == (full and pytest.approx(full))


@pytest.mark.parametrize("seed", range(5))
def test_a_measured_yardstick_can_always_be_read_back(seed, concepts, tmp_path) -> None:
    """Quantiles of scores that differ in their last digits are in order, too."""
    rng = np.random.default_rng(seed)
    scores = (0.1 + rng.integers(0, 4, 333) * 2.0**-56).tolist()
    method = ("parts", "leave-one-out", None)[seed % 3]
    quantiles = _quantiles(scores)
    result = replace(yardstick(), right=quantiles, wrong=quantiles, word_method=method)
    (tmp_path / YARDSTICK).write_text(result.to_json())
    assert load_yardstick(tmp_path) == result


def test_a_saved_model_keeps_its_yardstick_which_is_no_part_of_its_identity(
    model, tmp_path
) -> None:
    save_pretrained(model, tmp_path / "model")
    loaded = from_pretrained(tmp_path / "model")
    assert loaded.yardstick == model.yardstick
    digest = model_digest(loaded)
    loaded.yardstick = None
    assert model_digest(loaded) == digest
    save_pretrained(loaded, tmp_path / "bare")
    assert from_pretrained(tmp_path / "bare").yardstick is None


@pytest.mark.parametrize(
    "change",
    [
        {"right": [1.0, 0.0]},
        {"effect_for": 0.0},
        {"effect_against": float("nan")},
        {"wrong": None},
        {"more": 1},
        {"word_method": "saliency"},
    ],
    ids=str,
)
def test_a_damaged_yardstick_is_refused_by_name(change, tmp_path) -> None:
    tree = {**json.loads(yardstick().to_json()), **change}
    (tmp_path / YARDSTICK).write_text(json.dumps(tree))
    with pytest.raises(CheckpointError, match=YARDSTICK):
        load_yardstick(tmp_path)


def test_a_tokenizer_that_gives_no_places_of_words_stops_no_training(concepts) -> None:
    """Such a model trains and scores; it cannot be explained, so it has no yardstick."""
    from transformers import ByT5Tokenizer

    model = make("naaf", concepts)
    model.text = HuggingFaceText(ByT5Tokenizer())
    model.text_encoder.embed = torch.nn.Embedding(len(model.text), 300)
    assert measure_yardstick(model, concepts["dev"]) is None


def test_colors_of_another_method_are_scaled_by_the_match_itself(model, concepts) -> None:
    model.yardstick = yardstick(word_method="leave-one-out")
    match = model.explain(image_of(concepts), "a dog near the kite", "parts")
    alone = replace(match, yardstick=None)
    assert shades(match) == shades(alone)
    same = replace(match, method="leave-one-out")
    assert shades(same) == shades(replace(match, yardstick=yardstick(word_method="parts")))
