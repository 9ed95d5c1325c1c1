"""Compare all ways to find the wrong word of a caption: one table of models and methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.progress import Progress
from counterfoil.data.pairs import Split
from counterfoil.evaluation.caption_model import CaptionModel
from counterfoil.evaluation.foils.sets import choose_captions
from counterfoil.evaluation.ranks import Values
from counterfoil.evaluation.report import Measured, Report
from counterfoil.evaluation.words.cases import FoilCase, Foils
from counterfoil.evaluation.words.doubts import (
    NO_DOUBT,
    SURPRISE_WEIGHT,
    MeasuredCaption,
    WordDoubts,
    may_be_wrong,
    spoken_words,
    surprises,
)
from counterfoil.evaluation.words.effects import measure_words, sign_accuracy
from counterfoil.evaluation.words.evaluate import Ranking, Resamples
from counterfoil.evaluation.words.replacement import ReplacementDoubts, measure_gains
from counterfoil.models.match import METHODS, UNSIGNED, Method
from counterfoil.models.model import Model

BLIND = "no image"
WEIGHTS = (0.1, 0.25, SURPRISE_WEIGHT, 1.0, 2.0)
"""Weights of surprise that are tried on the dev split."""

REPLACEMENT = "replacement"
"""Words measured by other words in their places; needs a language model (`replacement`)."""

REFERENCE_SEED = 1000
"""Added to the seed: the reference captions are drawn apart from those that are made false."""


class MethodResult(Report):
    """How well one method finds wrong words, in percent.

    ``localized``: captions whose most suspicious word is a wrong one. ``signs``: how often an
    effect is below 0 for wrong words and not for others (`sign_accuracy`); None for what is no
    effect. ``dev_auc``: word AUC on the dev split, by which the methods are chosen; None if it was
    not measured.
    """

    model: str
    method: str
    auc: Measured
    ap: Measured
    localized: Measured
    signs: float | None = None
    dev_auc: float | None = None
    chosen: bool = False


class MethodTable(Report):
    """All methods on the same false captions; chance is 50 for AUC."""

    split: str
    foils: str
    images: int
    captions: int
    left_out: int
    words: int
    wrong: int
    ap_chance: float
    localized_chance: float
    results: tuple[MethodResult, ...]
    reference: int
    bootstrap: int
    seed: int

    def headline(self) -> str:
        return (
            f"{self.split}, {self.foils}: {self.captions} false captions of {self.images} images, "
            f"{self.wrong} wrong of {self.words} words"
        )

    def rows(self) -> list[tuple[str, ...]]:
        """A header, one row of text per method, and one for chance."""
        extra = {
            title: [getattr(one, field) for one in self.results]
            for title, field in (("signs right", "signs"), ("dev AUC", "dev_auc"))
        }
        extra = {title: column for title, column in extra.items() if column != [None] * len(column)}
        header = ("model", "method", "word AUC", "word AP", "localized")
        table: list[tuple[str, ...]] = [(*header, *extra)]
        for one, *more in zip(self.results, *extra.values(), strict=True):
            name = f"{one.method} (chosen on dev)" if one.chosen else one.method
            cells = (one.model, name, str(one.auc), str(one.ap), str(one.localized))
            table.append((*cells, *("" if value is None else f"{value:.1f}" for value in more)))
        chance = ("", "chance", "50.0", f"{self.ap_chance:.1f}", f"{self.localized_chance:.1f}")
        table.append((*chance, *("50.0" if title == "signs right" else "" for title in extra)))
        return table

    def notes(self) -> str:
        parts = ["localized: captions whose most suspicious word is wrong, ties shared"]
        if any(one.signs is not None for one in self.results):
            parts.append("signs right: wrong words below 0 and others not, the mean of both shares")
        parts += [
            f"usual effects: {self.reference} true captions of the dev split",
        ]
        if self.bootstrap:
            parts.append(
                f"brackets: 95% intervals, {self.bootstrap} resamples of images, seed {self.seed}"
            )
        return "; ".join(parts)

    def to_markdown(self) -> str:
        first, *rest = self.rows()
        rule = ["---", "---", *["---:"] * (len(first) - 2)]
        lines = [f"| {' | '.join(row)} |" for row in (first, rule, *rest)]
        return "\n".join([f"**{self.headline()}**", "", *lines, "", f"{self.notes()}.", ""])


@dataclass(frozen=True)
class Reader:
    """A model, with the dev and test split as it reads them (its own kind of features)."""

    model: Model
    dev: Split
    test: Split


def compare_methods(
    readers: Mapping[str, Reader],
    dev_made: Foils,
    made: Foils,
    name: str,
    *,
    language: CaptionModel | None = None,
    replacement: bool = True,
    reference: int = 300,
    bootstrap: int = 200,
    seed: int = 0,
    progress: Progress | None = None,
) -> MethodTable:
    """Every method of every model on false captions of the test split.

    Per model, the method with the best word AUC on the dev split is chosen, and also measured
    against the usual effects of ``reference`` true captions of dev. The last rows average the
    chosen ones of all models, and add the surprise of a language model that sees no image. With
    this language model, words are also measured by `replacement`, unless it is switched off.
    """
    if not readers:
        raise ConfigError("nothing to compare: no model given")
    first = next(iter(readers.values()))
    true = _true_cases(first.dev, reference, seed + REFERENCE_SEED)
    sides = _Sides(dev_made.cases, made.cases, true, language)
    rows: list[_Row] = list(sides.blind())
    combined: list[_Suspicions] = []
    replaced: list[_Suspicions] = []
    for model, reader in readers.items():
        each = {
            method: suspicions
            for method in METHODS
            if (suspicions := _try_measure(reader, sides, method, progress)) is not None
        }
        if not each:
            raise ConfigError(f"{model}: no method finds its words; use another model")
        signed = {key: value for key, value in each.items() if key not in UNSIGNED} or each
        best = max(signed, key=lambda method: word_auc(sides.dev, signed[method].dev))
        rows += [
            _Row(model, method, one, method == best, method in signed)
            for method, one in each.items()
        ]
        usual = sides.against_usual(reader, each[best], best, progress)
        rows.append(_Row(model, f"{best}, against the usual", usual))
        combined.append(usual)
        if language is not None and replacement:
            plain, own_usual = sides.by_replacement(reader, language, progress)
            rows.append(_Row(model, REPLACEMENT, plain))
            rows.append(_Row(model, f"{REPLACEMENT}, against the usual", own_usual))
            both = _mean([plain, usual])
            rows.append(_Row(model, f"{REPLACEMENT}, and {best} against the usual", both))
            replaced.append(plain)
    of = "average" if len(combined) > 1 else next(iter(readers))
    average = {"against the usual": _mean(combined)}
    if len(combined) > 1:
        rows.append(_Row(of, "against the usual", average["against the usual"]))
    if replaced:
        both_name = f"{REPLACEMENT}, and against the usual"
        average[both_name] = _mean([_mean(replaced), _mean(combined)])
        if len(replaced) > 1:
            rows.append(_Row(of, REPLACEMENT, _mean(replaced)))
            rows.append(_Row(of, both_name, average[both_name]))
    if language is not None:
        for name_of, suspicions in average.items():
            rows += sides.surprise_rows(of, name_of, suspicions)
    return _table(first.test.name, name, made, sides, rows, len(true), bootstrap, seed)


@dataclass(frozen=True)
class _Suspicions:
    """Suspicion of each word of the false captions of both splits."""

    dev: list[Values]
    test: list[Values]


@dataclass(frozen=True)
class _Row:
    model: str
    method: str
    suspicions: _Suspicions
    chosen: bool = False
    signed: bool = False


class _Sides:
    """The false captions of dev and test, and true ones of dev, with the words' surprise."""

    def __init__(
        self,
        dev: Sequence[FoilCase],
        test: Sequence[FoilCase],
        true: Sequence[FoilCase],
        language: CaptionModel | None,
    ) -> None:
        self.dev, self.test, self.true = list(dev), list(test), list(true)
        self.surprise: _Suspicions | None = None
        if language is not None:
            self.surprise = _Suspicions(
                surprises(language, [case.foil for case in dev]),
                surprises(language, [case.foil for case in test]),
            )

    def blind(self) -> list[_Row]:
        """What can be found without looking at the image."""
        classes = _Suspicions(
            [may_be_wrong(case.foil).astype(np.float64) for case in self.dev],
            [may_be_wrong(case.foil).astype(np.float64) for case in self.test],
        )
        rows = [_Row(BLIND, "word class", classes)]
        if self.surprise is not None:
            rows.append(_Row(BLIND, "surprise", self.surprise))
            both = _Suspicions(
                *(
                    [np.where(a > 0, b, -1.0) for a, b in zip(*pair, strict=True)]
                    for pair in (
                        (classes.dev, self.surprise.dev),
                        (classes.test, self.surprise.test),
                    )
                )
            )
            rows.append(_Row(BLIND, "surprise and word class", both))
        return rows

    def against_usual(
        self, reader: Reader, plain: _Suspicions, method: Method, progress: Progress | None
    ) -> _Suspicions:
        true = measure_words(reader.model, reader.dev, self.true, progress, method)
        usual = WordDoubts(
            MeasuredCaption(case.foil, effects)
            for case, effects in zip(true.cases, true.effects, strict=True)
        )

        def doubts(cases: Sequence[FoilCase], suspicion: Sequence[Values]) -> list[Values]:
            pairs = zip(cases, suspicion, strict=True)
            return [usual.of(MeasuredCaption(case.foil, -each)) for case, each in pairs]

        return _Suspicions(doubts(self.dev, plain.dev), doubts(self.test, plain.test))

    def by_replacement(
        self, reader: Reader, language: CaptionModel, progress: Progress | None
    ) -> tuple[_Suspicions, _Suspicions]:
        """Doubts by replacement; then the same against the usual evidence of the same word."""
        model = reader.model
        true, dev, test = (
            measure_gains(model, split, cases, language, progress)
            for split, cases in (
                (reader.dev, self.true),
                (reader.dev, self.dev),
                (reader.test, self.test),
            )
        )
        doubts = ReplacementDoubts(true)
        usual = WordDoubts(MeasuredCaption(one.text, -doubts.evidence(one)) for one in true)
        plain = _Suspicions([doubts.of(one) for one in dev], [doubts.of(one) for one in test])
        against = _Suspicions(
            *(
                [usual.of(MeasuredCaption(one.text, -doubts.evidence(one))) for one in side]
                for side in (dev, test)
            )
        )
        return plain, against

    def surprise_rows(self, model: str, method: str, doubts: _Suspicions) -> list[_Row]:
        """Doubts with surprise: by the weight of an audit, and by the best one on dev."""
        weighted = {weight: self.with_surprise(doubts, weight) for weight in WEIGHTS}
        best = max(WEIGHTS, key=lambda weight: word_auc(self.dev, weighted[weight].dev))
        return [
            _Row(model, f"{method}, with surprise × {weight:g}", weighted[weight], weight == best)
            for weight in sorted({SURPRISE_WEIGHT, best})
        ]

    def with_surprise(self, doubts: _Suspicions, weight: float) -> _Suspicions:
        assert self.surprise is not None  # noqa: S101 - the caller has a language model

        def both(doubt: list[Values], surprise: list[Values]) -> list[Values]:
            pairs = zip(doubt, surprise, strict=True)
            return [np.where(d > NO_DOUBT, d + weight * s, NO_DOUBT) for d, s in pairs]

        return _Suspicions(
            both(doubts.dev, self.surprise.dev), both(doubts.test, self.surprise.test)
        )


def _try_measure(
    reader: Reader, sides: _Sides, method: Method, progress: Progress | None
) -> _Suspicions | None:
    """Suspicions by a method; None if the model does not have it.

    A word is suspicious if its effect is low. Rollout has no direction: the words that matter most
    are suspicious.
    """
    sign = 1.0 if method in UNSIGNED else -1.0
    try:
        dev, test = (
            measure_words(reader.model, split, cases, progress, method)
            for split, cases in ((reader.dev, sides.dev), (reader.test, sides.test))
        )
    except ConfigError:
        return None
    if dev.cases != sides.dev or test.cases != sides.test:
        raise DataError("some images cannot be read; give data whose images are all readable")
    return _Suspicions([sign * e for e in dev.effects], [sign * e for e in test.effects])


def _mean(several: Sequence[_Suspicions]) -> _Suspicions:
    def mean(sides: Sequence[list[Values]]) -> list[Values]:
        return [np.mean(each, axis=0) for each in zip(*sides, strict=True)]

    return _Suspicions(mean([one.dev for one in several]), mean([one.test for one in several]))


def _true_cases(split: Split, most: int, seed: int) -> list[FoilCase]:
    """True captions as cases without a wrong word."""
    chosen = choose_captions(split, most, seed)
    return [
        FoilCase(int(split.image_of[i]), text, text, ("",) * len(spoken_words(text)))
        for i in chosen
        if spoken_words(text := split.texts[i])
    ]


def word_auc(cases: Sequence[FoilCase], suspicion: Sequence[Values]) -> float:
    """AUC over the words of all cases, in percent."""
    labels = np.concatenate([case.labels for case in cases])
    return 100.0 * float(Ranking(np.concatenate(suspicion), labels).auc())


def _signs_right(cases: Sequence[FoilCase], row: _Row) -> float:
    return 100.0 * sign_accuracy(cases, [-suspicion for suspicion in row.suspicions.test])


def localized(case: FoilCase, suspicion: Values) -> float:
    """Share of a caption's most suspicious words that are wrong: 0 or 1, unless there are ties."""
    return float(case.labels[suspicion == suspicion.max()].mean())


def _table(
    split: str,
    foils: str,
    made: Foils,
    sides: _Sides,
    rows: Sequence[_Row],
    reference: int,
    bootstrap: int,
    seed: int,
) -> MethodTable:
    cases = sides.test
    images, cluster = np.unique([case.image for case in cases], return_inverse=True)
    resamples = Resamples(len(images), bootstrap, seed)
    of_word = np.repeat(cluster, [len(case.wrong) for case in cases])
    labels = np.concatenate([case.labels for case in cases])

    def result(row: _Row) -> MethodResult:
        ranking = Ranking(np.concatenate(row.suspicions.test), labels)
        hits = [localized(*pair) for pair in zip(cases, row.suspicions.test, strict=True)]
        return MethodResult(
            model=row.model,
            method=row.method,
            auc=resamples.pooled(ranking.auc, of_word),
            ap=resamples.pooled(ranking.average_precision, of_word),
            localized=resamples.mean(hits, cluster),
            signs=_signs_right(cases, row) if row.signed else None,
            dev_auc=word_auc(sides.dev, row.suspicions.dev),
            chosen=row.chosen,
        )

    return MethodTable(
        split=split,
        foils=foils,
        images=len(images),
        captions=len(cases),
        left_out=made.left_out,
        words=len(labels),
        wrong=int(labels.sum()),
        ap_chance=100.0 * float(labels.mean()),
        localized_chance=100.0 * float(np.mean([case.labels.mean() for case in cases])),
        results=tuple(map(result, rows)),
        reference=reference,
        bootstrap=bootstrap,
        seed=seed,
    )
