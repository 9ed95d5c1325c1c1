"""Doubts about words: against their usual effect, with surprise, and never about articles."""

from __future__ import annotations

import numpy as np
import pytest

from counterfoil.data.text.words import words
from counterfoil.evaluation import caption_model
from counterfoil.evaluation.caption_model import CaptionModel
from counterfoil.evaluation.words.doubts import (
    NO_DOUBT,
    MeasuredCaption,
    WordDoubts,
    cross_surprises,
    may_be_wrong,
)

CAPTIONS = [
    f"a {color} {noun} {verb} on the {place}"
    for color in ("red", "small", "happy", "wet")
    for noun in ("dog", "cat", "man", "child", "horse")
    for verb in ("runs", "sits", "sleeps", "waits")
    for place in ("grass", "street", "beach", "road", "sand", "snow", "porch", "boat")
]


def spoken(text: str, *effects: float, **fields) -> MeasuredCaption:
    return MeasuredCaption(text, np.array(effects), **fields)


def test_a_word_is_held_against_what_it_usually_does() -> None:
    usual = WordDoubts([spoken("a dog", 0.0, 0.5)] * 200 + [spoken("a dog", 0.0, 0.0)])
    assert usual.usual_effect("Dog") == pytest.approx(0.5, abs=0.02)
    assert usual.usual_effect("a") == pytest.approx(0.0, abs=0.02)
    assert usual.worst(spoken("a dog", 0.0, 0.5)) < 0.05
    assert usual.worst(spoken("a dog", 0.0, 0.0)) == pytest.approx(0.5, abs=0.05)


def test_a_rare_word_is_taken_for_an_ordinary_one() -> None:
    usual = WordDoubts([spoken("a dog", 0.2, 0.2)] * 100 + [spoken("yak", -1.0)])
    assert usual.usual_effect("unicorn") == usual.overall == 0.2
    assert -0.1 < usual.usual_effect("yak") < 0.2
    assert usual.worst(spoken("")) == 0.0
    assert WordDoubts([]).usual_effect("dog") == 0.0


def test_words_that_say_nothing_about_an_image_are_never_in_doubt() -> None:
    text = "The dog is on a table."
    assert may_be_wrong(text).tolist() == [False, True, False, True, False, True]
    doubts = WordDoubts([]).of(spoken(text, *[-9.0] * 6))
    assert (doubts[[0, 2, 4]] == NO_DOUBT).all()
    assert (doubts[[1, 3, 5]] > NO_DOUBT).all()


def test_unknown_words_have_no_shortfall_and_are_not_in_doubt() -> None:
    usual = WordDoubts([spoken("a dog", 0.0, 0.5)] * 50)
    caption = spoken("a dog", 0.0, 0.0, known=np.array([True, False]))
    assert usual.shortfall(caption).tolist()[1] == 0.0
    assert usual.of(caption)[1] == NO_DOUBT
    assert WordDoubts([caption]).usual == {"a": 0.0}


def test_a_surprising_word_is_more_in_doubt_than_an_expected_one() -> None:
    language = CaptionModel(CAPTIONS)
    expected, odd = (language.surprise(f"a red {word} runs on the road") for word in ("dog", "the"))
    assert odd[2] > expected[2] + 2
    usual = WordDoubts([], weight=0.5)
    pair = [usual.of(spoken("red dog", 0.0, 0.0, surprise=np.array([0.0, s]))) for s in (1.0, 4.0)]
    assert pair[1][1] - pair[0][1] == pytest.approx(1.5)


def test_the_probabilities_of_the_words_in_a_place_are_those_of_whole_captions() -> None:
    language = CaptionModel(CAPTIONS)
    place = language.in_context("a red dog runs on the road", candidates=10_000)[2]
    assert sum(np.exp(list(place.values()))) == pytest.approx(1.0)
    dog, cat = language.log_likelihood(
        ["a red dog runs on the road", "a red cat runs on the road"]
    ).tolist()
    assert place["dog"] - place["cat"] == pytest.approx(dog - cat)
    assert max(place, key=place.__getitem__) in {"dog", "cat", "man", "child", "horse"}


def test_the_likeliest_words_compete_for_a_place() -> None:
    language = CaptionModel(CAPTIONS)
    text = "a red dog runs on the road"
    for few, every in zip(
        language.in_context(text, candidates=3), language.in_context(text, 10_000), strict=True
    ):
        assert len(few) <= 4  # and the own word
        assert set(few) <= set(every)
    contexts = language._known_contexts([language.ids[word] for word in ("a", "red")] * 2)
    before = language._next_word(contexts)
    before[:2] = -1
    best = {language.names[k] for k in np.argsort(-before)[:3]}
    third = language.in_context(text, candidates=3)[2]
    assert set(third) >= {name for name in best if before[language.ids[name]] > np.sort(before)[-4]}


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_probabilities_in_context_are_those_of_whole_captions(order, monkeypatch) -> None:
    language = CaptionModel(CAPTIONS, order)
    text = "a red dog runs on the zebra ."
    own = words(text)
    for cached in (10_000, 1):  # from a cache, and thrown away again and again
        monkeypatch.setattr(caption_model, "CACHED_CONTEXTS", cached)
        language._cache.clear()
        for place, offered in enumerate(language.in_context(text, candidates=20)):
            texts = [" ".join([*own[:place], word, *own[place + 1 :]]) for word in offered if word]
            expected = language.log_likelihood(texts)
            logs = np.array([log for word, log in offered.items() if word])
            np.testing.assert_allclose(logs - logs[0], expected - expected[0], atol=1e-9)
    surprise = language.surprise(text)
    in_context = [
        each.get(word, each.get(""))
        for each, word in zip(language.in_context(text), own, strict=True)
    ]
    np.testing.assert_allclose(surprise, -np.array(in_context))
    assert len(language.surprise("")) == 0


def test_no_caption_is_part_of_the_model_that_judges_it() -> None:
    texts = [*CAPTIONS, "a purple zebra flies on the moon"]
    images = list(range(len(texts)))
    wanted = [3, len(texts) - 1]
    found = cross_surprises(texts, images, wanted)
    assert list(found) == wanted or set(found) == set(wanted)
    own = CaptionModel([*texts, *[texts[-1]] * 20]).surprise(texts[-1])
    assert found[wanted[1]][2] > own[2]
    assert cross_surprises(CAPTIONS[:50], images[:50], [0]) == {}
