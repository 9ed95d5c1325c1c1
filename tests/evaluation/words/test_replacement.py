"""Words measured by others in their places: proposals, gains and doubts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import counterfoil as cf
from counterfoil.core.errors import DataError
from counterfoil.data.text.words import words
from counterfoil.evaluation.caption_model import CaptionModel
from counterfoil.evaluation.words.cases import FoilCase, make_foils
from counterfoil.evaluation.words.doubts import NO_DOUBT, may_be_wrong, spoken_words
from counterfoil.evaluation.words.methods import localized, word_auc
from counterfoil.evaluation.words.replacement import (
    PROPOSALS,
    Proposer,
    ReplacedCaption,
    ReplacementDoubts,
    WordGains,
    measure_gains,
)
from tests.evaluation.words.test_doubts import CAPTIONS
from tests.evaluation.words.test_evaluate_words import make, scenes  # noqa: F401 - a fixture

LANGUAGE = CaptionModel(CAPTIONS)


def gains_of(*gains: float, logs: tuple[float, ...] | None = None) -> WordGains:
    return WordGains(np.array(logs or [0.0] * len(gains)), np.array(gains))


def replaced(text: str, *gains: WordGains | None) -> ReplacedCaption:
    return ReplacedCaption(text, gains)


USUAL = [replaced("a dog", None, gains_of(gain, gain - 0.1)) for gain in (-0.3, -0.2, -0.1)]


def true_case(split, index: int, text: str) -> FoilCase:
    return FoilCase(index, text, text, ("",) * len(spoken_words(text)))


@pytest.fixture(scope="module")
def trained():
    return cf.load("scenes-naaf")


@pytest.fixture(scope="module")
def language(scenes) -> CaptionModel:  # noqa: F811
    return CaptionModel(scenes.train.texts)


def test_proposals_are_other_words_that_fit_the_place_and_the_model_can_read(trained) -> None:
    text = "A red dog runs on the grass."
    own = words(text)
    proposals = Proposer(LANGUAGE, trained.text).of(text)
    assert {one.position for one in proposals} <= {1, 2, 3, 4, 6}
    assert {2, 3, 6} <= {one.position for one in proposals}
    for one in proposals:
        assert one.word != own[one.position]
        assert one.word in trained.text.vocabulary.index
        assert one.word in LANGUAGE.ids
    for position in (2, 6):
        here = [one.log for one in proposals if one.position == position]
        assert len(here) <= PROPOSALS
        assert here == sorted(here, reverse=True)
    assert "cat" in [one.word for one in proposals if one.position == 2]


def test_words_unknown_to_the_model_are_not_proposed(trained) -> None:
    language = CaptionModel(["a dog runs", "a quokka runs", "a man runs"] * 60)
    assert "quokka" in language.in_context("a dog runs")[1]
    proposed = {one.word for one in Proposer(language, trained.text).of("a dog runs")}
    assert "man" in proposed
    assert "quokka" not in proposed


def test_planted_wrong_words_are_found_far_more_often_than_by_chance(
    trained,
    language,
    scenes,  # noqa: F811
) -> None:
    cases = make_foils(scenes.test, 1, 40).cases
    true = [
        true_case(scenes.train, int(scenes.train.image_of[k]), scenes.train.texts[k])
        for k in range(0, 60, 2)
    ]
    doubts = ReplacementDoubts(measure_gains(trained, scenes.train, true, language))
    found = [doubts.of(one) for one in measure_gains(trained, scenes.test, cases, language)]
    classes = [may_be_wrong(case.foil).astype(float) for case in cases]
    assert word_auc(cases, found) > word_auc(cases, classes) + 5
    by_chance = np.mean([case.labels.mean() for case in cases])
    assert np.mean([localized(*pair) for pair in zip(cases, found, strict=True)]) > 2 * by_chance


def test_gains_are_differences_of_scores_and_do_not_depend_on_the_batch(
    trained,
    language,
    scenes,  # noqa: F811
) -> None:
    cases = make_foils(scenes.test, 1, 30).cases
    together = measure_gains(trained, scenes.test, cases, language)
    alone = [measure_gains(trained, scenes.test, [case], language)[0] for case in cases[:6]]
    for one, other in zip(together, alone, strict=False):
        assert [p is None for p in one.words] == [p is None for p in other.words]
        for mine, theirs in zip(one.words, other.words, strict=True):
            if mine is not None and theirs is not None:
                assert mine.gains == pytest.approx(theirs.gains, abs=1e-5)


def test_a_gain_is_that_of_the_score_beyond_the_mean_gain_with_other_images(
    trained,
    scenes,  # noqa: F811
) -> None:
    text, few = "the red dog sits", scenes.test.select(range(4))
    (measured,) = measure_gains(trained, few, [true_case(few, 1, text)], LANGUAGE)
    proposals = [one.word for one in Proposer(LANGUAGE, trained.text).of(text) if one.position == 2]
    of_dog = measured.words[2]
    assert of_dog is not None
    assert len(proposals) == len(of_dog.gains) > 2
    texts = [text, *(f"the red {word} sits" for word in proposals)]
    scores = np.array(
        [
            [float(trained.score([few.fragments.read(image)], [each])) for each in texts]
            for image in (1, 0, 2, 3)
        ]
    )
    gains = scores[:, 1:] - scores[:, :1]
    assert of_dog.gains == pytest.approx(gains[0] - gains[1:].mean(0), abs=1e-5)


def test_a_split_of_one_image_has_plain_gains(trained, scenes) -> None:  # noqa: F811
    text, single = "the dog sits", scenes.test.select(range(1))
    (measured,) = measure_gains(trained, single, [true_case(single, 0, text)], LANGUAGE)
    proposals = [one.word for one in Proposer(LANGUAGE, trained.text).of(text) if one.position == 1]
    image = [single.fragments.read(0)]
    before = float(trained.score(image, [text]))
    of_dog = measured.words[1]
    assert of_dog is not None
    gains = [float(trained.score(image, [f"the {word} sits"])) - before for word in proposals]
    assert of_dog.gains == pytest.approx(gains, abs=1e-5)


def test_captions_without_words_to_replace_have_no_gains(trained, language, scenes) -> None:  # noqa: F811
    texts = ["", "...", "the", "xyzzy", "dog"]
    cases = [true_case(scenes.test, 0, text) for text in texts]
    measured = measure_gains(trained, scenes.test, cases, language)
    doubts = ReplacementDoubts(USUAL)
    values = [doubts.of(one).tolist() for one in measured]
    assert [len(one) for one in values] == [0, 0, 1, 1, 1]
    assert values[2] == [NO_DOUBT]
    assert np.isfinite(np.concatenate([doubts.of(one) for one in measured])).all()


def test_a_word_is_in_doubt_if_likely_words_gain() -> None:
    doubts = ReplacementDoubts(USUAL)
    likely, unlikely = (0.0, -5.0), (-5.0, 0.0)
    by_likely, by_unlikely, by_none = (
        doubts.of(replaced("a dog", None, each))[1]
        for each in (
            gains_of(0.5, -0.5, logs=likely),
            gains_of(0.5, -0.5, logs=unlikely),
            gains_of(-0.5, -0.5, logs=likely),
        )
    )
    assert by_likely > by_unlikely > by_none
    assert doubts.of(replaced("a dog", None, None)).tolist() == [NO_DOUBT, 0.0]
    assert doubts.of(USUAL[1])[1] == pytest.approx(0.0)


def test_probabilities_count_only_relative_to_each_other_and_scores_only_to_their_scale() -> None:
    captions = [*USUAL, replaced("a dog", None, gains_of(0.3, -0.4, logs=(-1.0, -2.0)))]

    def doubted(times: float, more: float) -> list[float]:
        changed = [
            replace(one, words=(None, WordGains(p.logs + more, times * p.gains)))
            for one in captions
            if (p := one.words[1]) is not None
        ]
        reference = ReplacementDoubts(changed[:3])
        return [float(reference.of(one)[1]) for one in changed]

    assert doubted(30.0, -4.0) == pytest.approx(doubted(1.0, 0.0))


def test_without_any_reference_doubts_are_finite() -> None:
    doubts = ReplacementDoubts([])
    assert np.isfinite(doubts.of(replaced("a dog", None, gains_of(0.1)))).all()


def test_an_untrained_model_is_left_in_its_mode(scenes, language) -> None:  # noqa: F811
    model = make("naaf", scenes).train()
    cases = make_foils(scenes.test, 1, 3).cases
    first = measure_gains(model, scenes.test, cases, language)
    assert model.training
    again = measure_gains(model, scenes.test, cases, language)
    for one, other in zip(first, again, strict=True):
        for mine, theirs in zip(one.words, other.words, strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or theirs is None or (mine.gains == theirs.gains).all()


class Torn:
    """A table of fragments, one image of which cannot be read."""

    def __init__(self, table, image: int) -> None:
        self.table, self.image = table, image

    def read(self, image: int):
        if image == self.image:
            raise DataError(f"image {image}: not a finite number")
        return self.table.read(image)


def test_cases_of_unreadable_images_are_left_out(trained, language, scenes, monkeypatch) -> None:  # noqa: F811
    cases = [true_case(scenes.dev, image, scenes.dev.captions[image][0]) for image in (0, 1)]
    torn = Torn(trained.fragments_of(scenes.dev), 1)
    monkeypatch.setattr(type(trained), "fragments_of", lambda *_: torn)
    (alone,) = measure_gains(trained, scenes.dev, cases, language)
    assert alone.text == cases[0].foil
