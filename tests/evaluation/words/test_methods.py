"""The table of all methods: who is in it, what is chosen, and what localization means."""

from __future__ import annotations

import random

import numpy as np
import pytest

from counterfoil.core.errors import DataError
from counterfoil.data.pairs import Split
from counterfoil.data.text.words import is_content_word, words
from counterfoil.evaluation.caption_model import CaptionModel
from counterfoil.evaluation.foils.sets import FoilPair, FoilSet
from counterfoil.evaluation.words.cases import (
    FoilCase,
    fluent_cases,
    make_foils,
    written_cases,
)
from counterfoil.evaluation.words.effects import measure_words, sign_accuracy
from counterfoil.evaluation.words.methods import (
    MethodTable,
    Reader,
    compare_methods,
    localized,
)
from counterfoil.models.match import METHODS
from tests.evaluation.words.test_doubts import CAPTIONS
from tests.evaluation.words.test_evaluate_words import make, scenes  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def table(scenes) -> MethodTable:  # noqa: F811
    model, test = make("naaf", scenes), scenes.test
    reader = Reader(model, scenes.train, test)
    made = make_foils(test, 1, 12, 0)
    language = CaptionModel(scenes.train.texts)
    dev = make_foils(scenes.train, 1, 12, 0)
    return compare_methods(
        {"naaf": reader}, dev, made, "truth", language=language, reference=10, bootstrap=5
    )


@pytest.mark.slow
def test_the_table_has_every_method_and_the_blind_ones(table) -> None:
    names = [(one.model, one.method) for one in table.results]
    assert names[:3] == [
        ("no image", "word class"),
        ("no image", "surprise"),
        ("no image", "surprise and word class"),
    ]
    methods = [name for model, name in names if model == "naaf"]
    assert methods[:5] == ["parts", "leave-one-out", "mask", "gradient", "combined"]
    assert methods[5].endswith("against the usual")
    assert methods[6:8] == ["replacement", "replacement, against the usual"]
    chosen = methods[5].removesuffix(", against the usual")
    assert methods[8] == f"replacement, and {chosen} against the usual"
    assert "with surprise" in methods[-1]


def test_the_chosen_method_is_the_best_on_dev(table) -> None:
    plain = [one for one in table.results if one.method in METHODS]
    chosen = [one for one in plain if one.chosen]
    assert len(chosen) == 1
    assert chosen[0].dev_auc == max(one.dev_auc for one in plain)


def test_a_table_is_stored_and_read_and_written_as_markdown(table) -> None:
    assert MethodTable.from_json(table.to_json()) == table
    page = table.to_markdown()
    assert page.count("(chosen on dev)") == 3
    assert len({line.count("|") for line in page.splitlines() if line.startswith("|")}) == 1


def test_signs_are_those_of_the_effects_of_each_method(table, scenes) -> None:  # noqa: F811
    model, cases = make("naaf", scenes), make_foils(scenes.test, 1, 12, 0).cases
    for row in table.results:
        if row.method in METHODS:
            measured = measure_words(model, scenes.test, cases, method=row.method)
            wanted = 100 * sign_accuracy(measured.cases, measured.effects)
            assert row.signs == pytest.approx(wanted)
        else:
            assert row.signs is None


def test_a_table_without_signs_has_no_column_of_them(table) -> None:
    older = [one.model_copy(update={"signs": None}) for one in table.results]
    page = table.model_copy(update={"results": tuple(older)}).to_markdown()
    assert "signs right" in table.to_markdown()
    assert "signs right" not in page


def test_localization_is_whether_the_most_suspicious_word_is_wrong() -> None:
    case = FoilCase(0, "a b c", "a x c", ("", "object", ""))
    assert localized(case, np.array([0.0, 2.0, 1.0])) == 1.0
    assert localized(case, np.array([3.0, 2.0, 1.0])) == 0.0
    assert localized(case, np.array([2.0, 2.0, 1.0])) == 0.5


def test_fluent_exchanges_keep_the_sentence_and_avoid_what_is_known_to_be_true() -> None:
    language = CaptionModel(CAPTIONS)
    captions = [random.Random(k).sample(CAPTIONS, 2) for k in range(8)]
    split = Split("test", list("abcdefgh"), captions)
    made = fluent_cases(split, language, seed=3)
    assert len(made.cases) > 8
    for case in made.cases:
        pairs = zip(words(case.caption), words(case.foil), case.wrong, strict=True)
        changed = [(old, new) for old, new, wrong in pairs if wrong]
        assert len(changed) == 1
        known = {word for text in split.captions[case.image] for word in words(text)}
        assert changed[0][1] not in known
        assert is_content_word(changed[0][1])
    assert fluent_cases(split, language, seed=3) == made


def test_foils_of_a_model_are_compared_word_by_word() -> None:
    split = Split("test", ["i"], [["A dog on an old table."]])
    pairs = [FoilPair(0, "A cat on a new table."), FoilPair(0, "A dog on the very old table.")]
    made = written_cases(split, FoilSet.of("writer", pairs, 1))
    assert [case.wrong for case in made.cases] == [("", "written", "", "", "written", "")]
    with pytest.raises(DataError, match="as many words"):
        written_cases(split, FoilSet.of("writer", pairs[1:], 1))


def test_without_a_language_model_no_word_is_replaced(scenes) -> None:  # noqa: F811
    reader = Reader(make("naaf", scenes), scenes.train, scenes.test)
    dev, made = (make_foils(split, 1, 4, 0) for split in (scenes.train, scenes.test))
    table = compare_methods({"naaf": reader}, dev, made, "truth", reference=4, bootstrap=0)
    methods = [one.method for one in table.results]
    assert "gradient" in methods
    assert not any("replacement" in method or "surprise" in method for method in methods)


def test_replacement_can_be_left_out_beside_a_language_model(scenes) -> None:  # noqa: F811
    reader = Reader(make("naaf", scenes), scenes.train, scenes.test)
    dev, made = (make_foils(split, 1, 4, 0) for split in (scenes.train, scenes.test))
    language = CaptionModel(scenes.train.texts)
    table = compare_methods(
        {"naaf": reader}, dev, made, "truth",
        language=language, replacement=False, reference=4, bootstrap=0,
    )  # fmt: skip
    methods = [one.method for one in table.results]
    assert "surprise" in methods
    assert any("with surprise" in method for method in methods)
    assert not any("replacement" in method for method in methods)


def test_both_kinds_of_doubt_are_averaged_over_the_models(scenes) -> None:  # noqa: F811
    one = Reader(make("naaf", scenes), scenes.train, scenes.test)
    language = CaptionModel(scenes.train.texts)
    dev, made = (make_foils(split, 1, 6, 0) for split in (scenes.train, scenes.test))
    table = compare_methods(
        {"a": one, "b": one}, dev, made, "truth", language=language, reference=6, bootstrap=0
    )
    both = "replacement, and "
    own = {row.method: row.auc for row in table.results if row.model == "a"}
    mean = {row.method: row.auc for row in table.results if row.model == "average"}
    of_both = next(auc for method, auc in own.items() if method.startswith(both))
    # a model averaged with itself
    assert mean["replacement"] == own["replacement"]
    assert mean[f"{both}against the usual"] == of_both
