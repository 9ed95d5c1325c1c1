"""Explanations: what each word adds to a score, and that it adds up."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from counterfoil.core.config import build_config
from counterfoil.core.errors import ConfigError, DataError
from counterfoil.data.batches.collate import pad_fragments, pad_texts
from counterfoil.data.fragments import Fragments
from counterfoil.data.text.tokenizers import without
from counterfoil.data.text.words import caption_words, words
from counterfoil.models import create_model, models
from counterfoil.models.explain import explain, word_map
from counterfoil.models.match import POINTS, Yardstick
from counterfoil.plots import fonts
from counterfoil.plots.sentences import color_note, explain_png, method_note, shades
from tests.conftest import thinned
from tests.models.test_models import (
    FEATURE_MODELS,
    ONE_OF_EACH,
    tiny_bert,  # noqa: F401 - a fixture
)

CAPTION = "A dog and a cat, near the unheard-of kite."
ADDITIVE = [
    ("naaf", {}),
    ("naaf", {"name": "naaf-reference"}),
    ("naaf", {"intra": "none"}),
    ("naaf", {"intra": "always"}),
    ("naaf", {"boundary": 0.3, "mining": False}),
    ("naaf-positive", {}),
    ("scan-t2i", {"aggregation": "mean"}),
    ("scan-t2i", {"aggregation": "sum", "raw_norm": "softmax"}),
    ("bfan", {"direction": "t2i"}),
    ("chan", {"pooling": "mean"}),
    ("chan", {"pooling": "sum"}),
]
WHOLE = ["scan-t2i", "scan-i2t", "scan", "bfan", "imram", "sgraf", "gsmn-sparse", "vse-fc", "vse++"]


def image_of(pairs, number: int = 0) -> Fragments:
    """Fragments of a test image, with boxes of some kind."""
    fragments = pairs.test.fragments.read(number)
    corners = np.random.default_rng(number).random((2, len(fragments), 2), dtype=np.float32)
    return replace(fragments, boxes=np.concatenate([corners.min(0), corners.max(0)], axis=-1))


def make(model: str, pairs, bert=None, **matcher):
    torch.manual_seed(0)
    text = {"pretrained": str(bert)} if bert else {}
    section = {"name": model, "embed_size": 64, "text": text, "matcher": matcher}
    config = build_config({"model": section, "data": {"min_count": 1}})
    return create_model(config.model, pairs.train, config.data)


@pytest.mark.parametrize(("name", "options"), ADDITIVE, ids=str)
def test_effects_of_a_sum_over_words_add_up_to_the_score(name, options, concepts) -> None:
    model = make(name, concepts, **options)
    for image in range(3):
        fragments = image_of(concepts, image)
        match = model.explain(fragments, CAPTION)
        assert (match.method, match.additive) == ("parts", True)
        total = sum(word.effect for word in match.words + match.specials)
        assert total == pytest.approx(match.score, abs=1e-6)
        assert match.score == pytest.approx(float(model.score([fragments], [CAPTION])), abs=1e-6)
        assert [word.word for word in match.specials] == ["<start>", "<end>"]
        for word in match.words:
            assert word.effect == pytest.approx(word.positive + word.negative, abs=1e-12)
            assert word.negative <= 0
            assert word.region_weights.shape == (len(fragments),)


def test_the_method_is_the_given_one_or_the_one_that_was_better_on_dev(concepts) -> None:
    model, fragments = make("naaf", concepts), image_of(concepts)
    parts = model.explain(fragments, "a dog near a cat")
    assert parts.method == "parts"
    left_out = model.explain(fragments, "a dog near a cat", "leave-one-out")
    texts = ["a dog near a cat", "dog near a cat", "a near a cat", "a dog a cat", "a dog near cat"]
    scores = model.score([fragments], [*texts, "a dog near a"])[0]
    assert (left_out.method, left_out.additive, left_out.specials) == ("leave-one-out", False, [])
    expected = (scores[0] - scores[1:]).tolist()
    assert [word.effect for word in left_out.words] == pytest.approx(expected, abs=1e-5)
    for one, other in zip(parts.words, left_out.words, strict=True):
        np.testing.assert_array_equal(one.region_weights, other.region_weights)
    ramp = tuple(np.linspace(0.0, 1.0, POINTS).tolist())
    model.yardstick = Yardstick("dev", 9, ramp, ramp, 0.1, 0.1, word_method="leave-one-out")
    usual, other = model.explain(fragments, "a dog"), model.explain(fragments, "a dog", "parts")
    assert (usual.method, usual.has_common_scale) == ("leave-one-out", True)
    assert (other.method, other.has_common_scale) == ("parts", False)
    assert "in every picture" in color_note(usual)
    assert "within this sentence only: usual effects were measured by leave" in color_note(other)


def test_a_method_that_a_matcher_does_not_have_is_refused(concepts) -> None:
    with pytest.raises(ConfigError, match="no parts per word"):
        make("vse-fc", concepts).explain(image_of(concepts), "a dog", "parts")
    with pytest.raises(ConfigError, match=r"expected one of parts, leave-one-out, .*, got 'x'"):
        make("naaf", concepts).explain(image_of(concepts), "a dog", "x")


@pytest.mark.parametrize("side", ["image", "text"])
@pytest.mark.parametrize("matcher", ["naaf", "scan-i2t", "chan"])
def test_sets_are_neither_words_nor_regions(matcher, side, concepts) -> None:
    torch.manual_seed(0)
    options = {"name": "dive" if side == "image" else "dive-gru", "slots": 3, "head_dim": 16}
    section = {"name": matcher if matcher != "scan-i2t" else "scan-t2i", "embed_size": 32}
    section |= {side: options, "matcher": {"name": matcher}}
    config = build_config({"model": section, "data": {"min_count": 1}})
    model = create_model(config.model, concepts.train, config.data)
    caption = " ".join(concepts.train.texts[:2])  # more words than a set has vectors
    with pytest.raises(ConfigError, match="no parts per word"):
        model.explain(image_of(concepts), caption, "parts")
    for method in (None, "leave-one-out", "mask", "gradient", "combined"):
        match = model.explain(image_of(concepts), caption, method)
        assert match.method == (method or "leave-one-out")
        assert all(word.region_weights is None for word in match.words)
    with pytest.raises(DataError, match="compares no words with regions"):
        word_map(model, image_of(concepts), caption)


@pytest.mark.parametrize("name", WHOLE)
def test_other_effects_are_what_the_score_loses_without_the_word(name, concepts) -> None:
    model = make(name, concepts)
    fragments = image_of(concepts)
    match = model.explain(fragments, "A dog near a cat.")
    assert (match.method, match.additive, match.specials) == ("leave-one-out", False, [])
    fewer = ["dog near a cat.", "a near a cat.", "a dog a cat.", "a dog near cat."]
    fewer += ["a dog near a .", "a dog near a cat"]
    scores = model.score([fragments], ["a dog near a cat.", *fewer])[0]
    expected = (scores[0] - scores[1:]).tolist()
    assert [word.effect for word in match.words] == pytest.approx(expected, abs=1e-5)
    assert match.score == pytest.approx(float(scores[0]), abs=1e-6)
    for word in match.words:
        assert (word.positive, word.negative) == (max(word.effect, 0), min(word.effect, 0))
        if model.matcher.needs == "pooled":
            assert word.region_weights is None
        elif word.known:
            assert word.region_weights.sum() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("name", thinned(FEATURE_MODELS, *ONE_OF_EACH, "chan-bert"))
def test_every_model_explains_the_words_of_a_caption_and_is_left_as_it_was(
    name,
    concepts,
    tiny_bert,  # noqa: F811
) -> None:
    model = make(
        name, concepts, tiny_bert if "bert" in models[name]().text["name"] else None
    ).train()
    match = model.explain(image_of(concepts, 1), CAPTION)
    assert [word.word.lower() for word in match.words] == words(CAPTION)
    assert all(CAPTION[slice(*word.span)] == word.word for word in match.words)
    assert model.training
    assert json.loads(json.dumps(match.as_dict()))["words"][1]["word"] == "dog"
    assert (match.boundary is not None) == name.startswith("naaf")


def test_the_pieces_of_a_word_are_summed(concepts, tiny_bert) -> None:  # noqa: F811
    model = make("chan-bert", concepts, tiny_bert).eval()
    fragments = image_of(concepts)
    match = model.explain(fragments, "a doggy near the cat")
    assert [word.word for word in match.words] == ["a", "doggy", "near", "the", "cat"]
    assert [word.word for word in match.specials] == ["[CLS]", "[SEP]"]
    total = sum(word.effect for word in match.words + match.specials)
    assert total == pytest.approx(match.score, abs=1e-6)
    from counterfoil.data.batches.collate import pad_fragments, pad_texts

    with torch.no_grad():
        image = model.encode_images(pad_fragments([fragments]))
        ids = model.text.encode("a doggy near the cat")
        parts = model.matcher.word_parts(image, model.encode_texts(pad_texts([ids], 0)))
    effects = parts.positive + parts.negative  # [CLS] a dog ##gy near the cat [SEP]
    assert match.words[1].effect == pytest.approx(float(effects[2] + effects[3]), abs=1e-6)
    assert match.words[1].region_weights.sum() == pytest.approx(1.0, abs=1e-5)


def test_words_beyond_what_a_tokenizer_keeps_have_no_effect(concepts, tiny_bert) -> None:  # noqa: F811
    model = make("chan-bert", concepts, tiny_bert)
    match = model.explain(image_of(concepts), "dog cat " * 20)
    assert len(match.words) == 40
    assert [word.effect for word in match.words[14:]] == [0.0] * 26
    total = sum(word.effect for word in match.words + match.specials)
    assert total == pytest.approx(match.score, abs=1e-6)


def test_a_caption_of_one_word_can_be_explained_and_an_empty_one_cannot(concepts) -> None:
    model = make("vse-fc", concepts)
    fragments = image_of(concepts)
    (word,) = model.explain(fragments, "dog").words
    batch = pad_texts([model.text.encode(text) for text in ("dog", "")], model.text.pad)
    with torch.no_grad():
        alone, nothing = model.eval()(pad_fragments([fragments]), batch)[0]
    assert word.effect == pytest.approx(float(alone - nothing), abs=1e-6)
    with pytest.raises(DataError, match="no words"):
        model.explain(fragments, "  \n")


@given(st.text(alphabet=st.sampled_from("aB' \"nt.,-`İß’日\t(5") | st.characters(), max_size=40))
def test_every_sign_of_a_caption_is_in_one_word(caption) -> None:
    found = caption_words(caption)
    assert len(found) == len(words(caption))
    covered = [place for word in found for place in range(word.start, word.end)]
    assert covered == [i for i, letter in enumerate(caption) if not letter.isspace()]
    assert all(caption[word.start : word.end] == word.text for word in found)


def test_leaving_out_a_word_leaves_the_others(concepts) -> None:
    found = caption_words(CAPTION)
    for number, word in enumerate(found):
        left = [one.text.lower() for one in found[:number] + found[number + 1 :]]
        assert words(without(CAPTION, word)) == left


@pytest.fixture
def match(concepts):
    model = make("naaf", concepts, boundary=0.2, mining=False)
    return model.explain(image_of(concepts), 'a dog & a "<cat>" near the kite .')


def test_the_worst_word_is_never_a_punctuation_mark(match) -> None:
    low = [replace(w, effect=-9.0) if w.word in '."<' else w for w in match.words]
    assert replace(match, words=low).worst.word.isalpha()


def test_colors_follow_effects(match) -> None:
    both = [replace(match.words[0], effect=e) for e in (0.4, -0.2, 0.1, -0.01, 0.0)]
    strong = shades(replace(match, words=both))
    assert strong == pytest.approx([1.0, -1.0, 0.25, -0.05, 0.0])
    faint = shades(replace(match, words=[replace(both[0], effect=e) for e in (0.4, -0.001)]))
    assert -0.02 < faint[1] < 0
    assert shades(replace(match, words=both[-1:])) == [0.0]


@pytest.mark.parametrize("size", [(224, 224), (40, 900), (900, 30), (1, 1)])
def test_the_picture_is_a_png_of_any_image(match, size) -> None:
    drawn = Image.open(io.BytesIO(explain_png(match, Image.new("RGB", size, "white"))))
    assert drawn.format == "PNG"
    assert drawn.width == 960


def test_the_picture_frames_where_the_worst_word_looked(match) -> None:
    blank = Image.new("RGB", (100, 100), "white")
    pages = [explain_png(one, blank) for one in (match, replace(match, boxes=None))]
    framed, plain = (np.asarray(Image.open(io.BytesIO(page)))[40:740] for page in pages)
    assert (framed != plain).any()
    assert (plain == 255).all()
    without_image = Image.open(io.BytesIO(explain_png(match)))
    assert without_image.height < 400


def test_a_machine_without_fonts_draws_with_the_one_of_pillow(match, monkeypatch) -> None:
    monkeypatch.setattr(fonts, "FACES", ())
    fonts.font.cache_clear()
    try:
        assert Image.open(io.BytesIO(explain_png(match))).width == 960
    finally:
        fonts.font.cache_clear()


def test_a_note_says_what_effects_are(match) -> None:
    assert "add up to the score" in method_note(match)
    assert "<start> and <end>" in method_note(match)
    assert "left out" in method_note(replace(match, method="leave-one-out", additive=False))


def test_a_word_map_is_what_lies_beyond_naafs_boundary_or_where_words_attend(concepts) -> None:
    image, caption = image_of(concepts), concepts.test.texts[0]
    naaf = make("naaf", concepts, boundary=0.2, mining=False).eval()
    words, values, score = word_map(naaf, image, caption)
    assert values.shape == (len(words), len(image))
    match = explain(naaf, image, caption)
    assert [effect.word for effect in match.words] == words
    assert score == pytest.approx(match.score)
    with torch.no_grad():
        regions = naaf.encode_images(pad_fragments([image])).fragments[0, : len(image)]
        tokens = naaf.encode_texts(pad_texts([naaf.text.encode(caption)], naaf.text.pad))
    expected = tokens.fragments[0, 1:-1] @ regions.T - 0.2  # without the start and the end
    torch.testing.assert_close(torch.from_numpy(values), expected)
    scan = make("scan-t2i", concepts).eval()
    _, attention, _ = word_map(scan, image, caption)
    effects = explain(scan, image, caption).words
    for row, effect in zip(attention, effects, strict=True):
        np.testing.assert_allclose(row, effect.region_weights[: len(image)], rtol=1e-5)
    with pytest.raises(DataError, match="compares no words with regions"):
        word_map(make("vse-fc", concepts), image, caption)
    with pytest.raises(DataError, match="no words"):
        word_map(naaf, image, " ")


def test_a_word_map_keeps_unknown_words_and_scores_them_as_evaluation_does(concepts) -> None:
    image, caption = image_of(concepts), "zzyzx " + concepts.test.texts[0]
    naaf = make("naaf", concepts, boundary=0.2, mining=False).eval()
    words, values, score = word_map(naaf, image, caption)
    assert words[0] == "zzyzx"
    assert np.abs(values[0]).sum() > 0
    with torch.no_grad():
        images = naaf.encode_images(pad_fragments([image]))
        texts = naaf.encode_texts(pad_texts([naaf.text.encode(caption)], naaf.text.pad))
        assert score == pytest.approx(float(naaf.matcher(images, texts)[0, 0]))
    assert word_map(naaf, image, "zzyzx")[0] == ["zzyzx"]  # explain has nothing to explain
