"""What a finding says: no function word is struck alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from counterfoil.audit import audit_split
from counterfoil.audit.describe import Describer
from counterfoil.audit.noise import plant
from counterfoil.audit.survey import POOL_SIZE
from counterfoil.audit.suspicion import CaptionWord, WordEffects
from counterfoil.data.pairs import Split
from counterfoil.data.text.words import STOP_WORDS, caption_words, is_content_word
from counterfoil.evaluation.words.doubts import MeasuredCaption, WordDoubts


def describer(text: str, *wrong: str) -> Describer:
    """Of one caption: these of its words have far less effect than usual."""
    words = [
        CaptionWord(word.text, (word.start, word.end), effect, effect)
        for word in caption_words(text)
        if not word.is_punctuation
        for effect in [-1.0 if word.text in wrong else 0.5]
    ]
    ordinary = MeasuredCaption(text, np.full(len(words), 0.5))
    usual = WordDoubts([ordinary] * 50)
    split = Split("test", ["i"], [[text]])
    effects = WordEffects({0: words}, "parts")
    doubts = {0: np.array([2.0 if word.word in wrong else 0.0 for word in words])}
    nothing = np.zeros((1, 3)), np.ones(1), {}
    return Describer(split, None, *nothing, effects, usual, doubts, 1.0)


@pytest.mark.parametrize("wrong", [("a",), ("the",), ("of", "is"), ("with", "A"), ("A", "the")])
def test_function_words_are_not_struck_alone(wrong) -> None:
    one = describer("A photo of the dog that is with a cat", *wrong)
    assert one._wrong_words(0) == ()
    assert "the caption as a whole" in one._sentence("wrong-words", 0, 0.5, ())


def test_function_words_are_struck_beside_a_content_word() -> None:
    one = describer("a dog on the beach", "the", "beach")
    words = one._wrong_words(0)
    assert [word.word for word in words] == ["the", "beach"]
    sentence = one._sentence("wrong-words", 0, 0.5, words)
    assert sentence == "“the”, “beach” do less for the match than usual"


def test_a_word_of_usual_effect_is_called_unlikely() -> None:
    one = describer("a dog on the beach", "dog")
    (weak,) = one._wrong_words(0)
    strong = weak.model_copy(update={"word": "beach", "effect": weak.usual})
    sentence = one._sentence("wrong-words", 0, 0.5, (strong,))
    assert sentence == "“beach” is unlikely among the other words"
    assert one._sentence("wrong-words", 0, 0.5, (weak, strong)) == (
        "“dog” does less for the match than usual; “beach” is unlikely among the other words"
    )


def test_captions_are_counted_as_far_as_they_are_stored(learned, concepts) -> None:
    noisy = plant(concepts.test, "random", 0.3, 0).split
    audit = audit_split(learned, noisy, threshold=0.001)
    texts = [
        (finding, reason.text)
        for finding in audit.findings
        for reason in finding.reasons
        if reason.sign == "other-caption"
    ]
    assert texts
    for finding, text in texts:
        image = list(audit.split.ids).index(finding.image)
        better = int((audit.survey.pool_score[image] > finding.score).sum())
        assert text.startswith(f"{better} or more " if better == POOL_SIZE else f"{better} caption")


def test_a_better_image_is_none_that_says_the_same(learned, concepts) -> None:
    split = concepts.test.select(range(20))
    captions = [list(texts) for texts in split.captions]
    captions[7][0] = captions[3][0]
    audit = audit_split(learned, replace(split, captions=captions), threshold=1e-9)
    assert audit.survey.other[2 * 7] == 3
    (found,) = (f for f in audit.findings if (f.image, f.caption) == (split.ids[7], 0))
    assert found.near_duplicate is not None
    assert found.better_image is None or found.better_image.image != split.ids[3]


def test_every_finding_of_an_audit_names_a_content_word_or_none(learned, concepts) -> None:
    findings = audit_split(learned, concepts.test, threshold=0.001).findings
    named = [one.wrong_words for one in findings if one.wrong_words]
    assert named
    assert all(any(is_content_word(word.word) for word in words) for words in named)
    reasons = Counter(
        reason.text.startswith("the caption as a whole") == (not one.wrong_words)
        for one in findings
        for reason in one.reasons
        if reason.sign == "wrong-words"
    )
    assert set(reasons) == {True}


def test_the_word_list_has_the_words_that_build_a_sentence() -> None:
    assert {"a", "the", "of", "is", "with"} <= STOP_WORDS
    assert not any(is_content_word(word.upper()) for word in STOP_WORDS)
