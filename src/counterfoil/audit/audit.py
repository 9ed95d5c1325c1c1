"""`audit_split`: find and explain the captions of a split that do not match their image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from counterfoil.audit.describe import Corrector, Describer
from counterfoil.audit.false_alarms import (
    WORD_RATE,
    FalseAlarms,
    conformal_threshold,
    word_pool,
)
from counterfoil.audit.findings import Finding, Summary
from counterfoil.audit.neighbors import Neighbors, disagreement, find_neighbors, summed_disagreement
from counterfoil.audit.sign_weights import (
    SignWeights,
    learn_weights,
    reliability,
    weighed_deviations,
)
from counterfoil.audit.survey import SplitSurvey, SurveyCheckpoint, survey_split
from counterfoil.audit.suspicion import (
    CENTER,
    CENTERS,
    MEASURED_SIGNS,
    SIGNS,
    WEIGHTS,
    WORDS,
    Scale,
    Scales,
    Values,
    WordEffects,
    caption_doubts,
    combine,
    evidence,
    measure_effects,
    named_signs,
    sign_deviations,
    sign_scales,
)
from counterfoil.core.errors import ArgumentError, ConfigError
from counterfoil.core.printable import plural
from counterfoil.core.progress import Progress
from counterfoil.data.duplicates import Duplicate, near_duplicates
from counterfoil.data.pairs import Split
from counterfoil.data.text.words import MOST_WORDS, caption_words
from counterfoil.evaluation.words.doubts import MeasuredCaption, WordDoubts, cross_surprises
from counterfoil.models.model import Model

MIN_REFERENCE_CAPTIONS = 50
MAX_LISTED = 20
NAMED_WORDS = 10

MAX_EXAMINED = 5000
MAX_REFERENCE = 1000


@dataclass(frozen=True)
class Audit:
    """The findings of a split, the most suspicious first, and the data behind them.

    ``findings`` lists captions with a suspicion of at least ``threshold``, which ``summary`` counts
    as suspicious, and near-duplicates. ``suspicion`` [captions] is NaN for unreadable images.
    ``values`` [captions, measured signs] has what was measured, ``scales`` what that was compared
    with, ``signs`` [captions, signs] the evidence for reasons. ``word_effects`` are the words of
    the examined captions, ``word_doubts`` the doubts about them; those above ``word_threshold`` are
    named as wrong. ``reference`` are the examined captions that were drawn at random. ``surprise``:
    whether the doubts include the surprise of a language model. ``weights`` are those learned from
    checked captions, if there were any.
    """

    split: Split
    summary: Summary
    findings: list[Finding]
    survey: SplitSurvey
    suspicion: Values
    values: Values
    scales: Scales
    signs: Values
    word_doubts: dict[int, Values]
    word_effects: WordEffects
    word_threshold: float
    reference: list[int]
    surprise: bool
    weights: SignWeights | None = None

    @property
    def threshold(self) -> float:
        """Suspicion from which captions are listed."""
        return self.summary.threshold

    @property
    def listed(self) -> int:
        """Captions listed as suspicious."""
        return sum(finding.kind == "mismatch" for finding in self.findings)


def audit_split(
    model: Model,
    split: Split,
    *,
    threshold: float = 0.5,
    examined: int = MAX_EXAMINED,
    corrector: Corrector | None = None,
    details: int = 500,
    seed: int = 0,
    progress: Progress | None = None,
    keep: Path | None = None,
    false_alarms: FalseAlarms | None = None,
    checked: Mapping[int, bool] | None = None,
) -> Audit:
    """Score every caption with its image and all others, and list those that seem wrong.

    Words are examined in at most ``examined`` captions: those with the most suspicious scores, and
    a random sample as the reference. Corrections are made for the first ``details`` findings.
    ``keep`` is a checkpoint file: a later call with the same model and split resumes from it.
    ``false_alarms``: thresholds measured on trusted captions (`calibrate`), instead of
    ``threshold``; captions are then compared with what is usual in the trusted split.
    ``checked``: whether a caption is wrong, for numbers of captions in ``split.texts`` that a
    person has checked; the weights of the signs are learned from them.
    """
    if not isinstance(split, Split):
        raise ArgumentError(f"audit_split: expected one split, got {type(split).__name__}")
    if not 0.0 < threshold <= 1.0:
        raise ConfigError(f"audit: expected a threshold above 0 and at most 1, got {threshold}")
    _check_labels(split, checked, false_alarms)
    if false_alarms is not None:
        false_alarms.scales.check_weights()
    checkpoint = None if keep is None else SurveyCheckpoint.of(keep, model, split)
    survey = survey_split(model, split, progress, checkpoint=checkpoint)
    captions = survey.captions
    duplicates = near_duplicates(
        {int(number): split.texts[int(number)] for number in captions}, split.image_of.tolist()
    )
    neighbors = find_neighbors(
        model, split, captions, by_caption=bool(checked), seed=seed, progress=progress
    )
    values = _score_values(survey, duplicates, neighbors)
    # a threshold holds for suspicion that is made like that it was measured on
    trusted = None if false_alarms is None else false_alarms.scales
    scales = sign_scales(values[captions]) if trusted is None else dict(trusted.signs)
    is_short = _have_usual_length(split, captions)
    suspicion = combine(sign_deviations(values[captions], scales))
    chosen, reference = _choose(suspicion[is_short], captions[is_short], examined, seed)
    words = _examine_words(
        measure_effects(model, split, chosen, progress),
        split,
        chosen,
        reference,
        with_surprise=false_alarms is None or false_alarms.surprise,
        progress=progress,
    )
    if words.scale is not None:
        values[chosen, WORDS] = [words.shortfalls[number] for number in chosen]
        if trusted is None:
            scales[SIGNS[WORDS]] = words.scale
    deviations = sign_deviations(values, scales)
    signs = _evidence(values, deviations)
    if false_alarms is None:
        word_threshold = conformal_threshold(word_pool(words.doubts, reference), WORD_RATE)
    else:
        # captions are listed from the threshold on, and false alarms counted above it
        threshold = float(np.nextafter(false_alarms.caption_threshold, np.inf))
        word_threshold = false_alarms.word_threshold
    suspicion = np.full(len(survey.own), np.nan)
    if trusted is None:
        usual_doubt = Scale.of_usual(caption_doubts(deviations[captions]))
    else:
        usual_doubt = trusted.doubt
    suspicion[captions] = combine(deviations[captions], usual_doubt)
    weights = None
    if checked:
        own = survey.own[captions].astype(np.float64)
        weighed = weighed_deviations(deviations[captions], own, neighbors)
        weights = learn_weights(weighed, *_labels(checked, captions))
        if weights.learned:
            suspicion[captions] = weights.suspicion(weighed)
    describer = Describer(
        split=split,
        survey=survey,
        signs=signs,
        suspicion=suspicion,
        duplicates=duplicates,
        effects=words.effects,
        usual=words.usual,
        doubts=words.doubts,
        word_threshold=word_threshold,
    )
    findings = describer.findings(threshold)
    if corrector is not None:
        findings = corrector.correct_all(findings, details, progress)
    too_long = int((~is_short).sum())
    summary = summarize(
        split, survey, signs, suspicion, threshold, duplicates, words.effects, too_long
    )
    if false_alarms is not None:
        notes = (*summary.notes, *false_alarms.notes(summary.images, words.surprise))
        summary = summary.model_copy(update={"notes": notes})
    if checked and weights is not None:
        more = [weights.note()]
        if unscored := len(checked) - weights.right - weights.wrong:
            one = "checked caption could not be scored; it was not used"
            many = "checked captions could not be scored; they were not used"
            more.append(plural(unscored, one, many))
        summary = summary.model_copy(update={"notes": (*summary.notes, *more)})
    return Audit(
        split=split,
        summary=summary,
        findings=findings,
        survey=survey,
        suspicion=suspicion,
        values=values,
        scales=Scales(scales, usual_doubt, dict(WEIGHTS)),
        signs=signs,
        word_doubts=words.doubts,
        word_effects=words.effects,
        word_threshold=word_threshold,
        reference=reference,
        surprise=words.surprise,
        weights=weights,
    )


def _check_labels(
    split: Split, checked: Mapping[int, bool] | None, false_alarms: FalseAlarms | None
) -> None:
    if checked and false_alarms is not None:
        raise ConfigError(
            "audit: a rate of false alarms is measured with the default weights of signs, which "
            "checked captions would change; use one of the two"
        )
    for number, wrong in (checked or {}).items():
        if not isinstance(number, int | np.integer) or not 0 <= number < len(split.texts):
            raise ConfigError(
                f"audit: split '{split.name}' has {len(split.texts)} captions, numbered from 0; "
                f"got the checked caption {number!r}"
            )
        if not isinstance(wrong, (bool, np.bool_)):
            raise ConfigError(
                f"audit: expected True (wrong) or False (right) for the checked caption {number}, "
                f"got {wrong!r}"
            )


def _labels(
    checked: Mapping[int, bool], captions: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Masks over the scored captions: the wrong ones, and those that were checked."""
    numbers = captions.tolist()
    wrong = np.array([checked.get(number, False) for number in numbers], dtype=np.bool_)
    return wrong, np.array([number in checked for number in numbers], dtype=np.bool_)


def _score_values(
    survey: SplitSurvey, duplicates: dict[int, Duplicate], neighbors: Neighbors
) -> Values:
    """Values [captions, signs] of the signs without those of words; NaN if not known."""
    captions, own = survey.captions, survey.own.astype(np.float64)
    reliable = reliability(own[captions])
    pool = np.where(survey.pool >= 0, survey.pool_score, np.nan).astype(np.float64)
    known = ~np.isnan(pool).all(1)
    best_captions = np.full(len(pool), np.nan)
    best_captions[known] = np.nanmean(pool[known], axis=1)
    columns = {
        "low-score": -own[captions],
        "other-image": _rival_leads(survey, duplicates)[captions],
        "other-caption": (best_captions[survey.image_of] - own)[captions],
        "neighbors": disagreement(neighbors.by_image, reliable),
        "neighbor-sum": summed_disagreement(neighbors.by_image, reliable),
    }
    values = np.full((len(own), len(MEASURED_SIGNS)), np.nan)
    for name, column in columns.items():
        values[captions, MEASURED_SIGNS.index(name)] = np.where(np.isfinite(column), column, np.nan)
    return values


def _evidence(values: Values, deviations: Values) -> Values:
    """Evidence [captions, signs]; 0 for a sign that is not known."""
    signs = np.zeros((len(deviations), len(SIGNS)))
    for k, name in enumerate(SIGNS):
        signs[:, k] = np.nan_to_num(evidence(deviations[:, k], CENTERS.get(name, CENTER)))
        if name in CENTERS:
            # No evidence if the own image, or this caption, is ahead of all others.
            signs[~(values[:, k] > 0), k] = 0.0
    return signs


def _rival_leads(survey: SplitSurvey, duplicates: dict[int, Duplicate]) -> Values:
    """Lead [captions] of the best other image without nearly the same caption; NaN if none is near.

    Only the stored `RIVALS` are looked at.
    """
    leads = (survey.other_score - survey.own).astype(np.float64)
    leads[survey.other < 0] = np.nan
    for number, duplicate in duplicates.items():
        free = np.array([int(image) not in duplicate.images for image in survey.rivals[number]])
        scores = survey.rival_score[number][free & (survey.rivals[number] >= 0)]
        leads[number] = scores[0] - survey.own[number] if len(scores) else np.nan
    return leads


def _have_usual_length(split: Split, captions: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether words of captions can be examined: the time grows with the square of their number."""
    lengths = [len(caption_words(split.texts[number])) for number in captions.tolist()]
    return np.array(lengths) <= MOST_WORDS


def _choose(
    suspicion: Values, captions: NDArray[np.int64], examined: int, seed: int
) -> tuple[list[int], list[int]]:
    """Captions whose words are examined, in order, and those of them used as the reference."""
    if len(captions) <= examined:
        every = captions.tolist()
        return every, every
    rng = np.random.default_rng(seed)
    size = min(MAX_REFERENCE, examined // 2)
    reference = captions[np.sort(rng.choice(len(captions), size=size, replace=False))]
    ranked = captions[np.argsort(-suspicion, kind="stable")]
    rest = ranked[~np.isin(ranked, reference)][: examined - size]
    return sorted({*rest.tolist(), *reference.tolist()}), reference.tolist()


@dataclass(frozen=True)
class _ExaminedWords:
    """What the words of the examined captions say about them.

    ``doubts`` name words; ``shortfalls`` are the sign of captions, and ``scale`` is what is usual
    of them, None without a word.
    """

    effects: WordEffects
    usual: WordDoubts
    doubts: dict[int, Values]
    shortfalls: dict[int, float]
    scale: Scale | None
    surprise: bool


def _examine_words(
    effects: WordEffects,
    split: Split,
    chosen: list[int],
    reference: list[int],
    *,
    with_surprise: bool,
    progress: Progress | None,
) -> _ExaminedWords:
    spoken = [number for number in chosen if effects.words[number]] if with_surprise else []
    surprise = cross_surprises(split.texts, split.image_of.tolist(), spoken, progress)
    by_effect, by_fall = {}, {}
    for number in chosen:
        text, own = split.texts[number], effects.words[number]
        known = np.array([word.known for word in own], dtype=np.bool_)
        values = np.array([(word.effect, word.fall) for word in own]).reshape(-1, 2)
        by_effect[number] = MeasuredCaption(text, values[:, 0], surprise.get(number), known)
        by_fall[number] = MeasuredCaption(text, values[:, 1], None, known)
    usual = WordDoubts(by_effect[number] for number in reference)
    usual_fall = WordDoubts(by_fall[number] for number in reference)
    shortfalls = {number: usual_fall.worst(caption) for number, caption in by_fall.items()}
    compared = [shortfalls[number] for number in reference if effects.words[number]]
    return _ExaminedWords(
        effects=effects,
        usual=usual,
        doubts={number: usual.of(caption) for number, caption in by_effect.items()},
        shortfalls=shortfalls,
        scale=Scale.of(np.array(compared)) if compared else None,
        surprise=any(number in surprise for number in chosen),
    )


def summarize(
    split: Split,
    survey: SplitSurvey,
    signs: Values,
    suspicion: Values,
    threshold: float,
    duplicates: dict[int, Duplicate],
    effects: WordEffects,
    too_long: int,
) -> Summary:
    """Counts of what was found in a split, and notes for the reader.

    Captions with a suspicion of at least ``threshold`` count as suspicious. ``too_long`` captions
    have more than `MOST_WORDS` words, which are not examined.
    """
    captions, examined = survey.captions, len(effects.words)
    wrong = captions[suspicion[captions] >= threshold]
    reasons = [SIGNS[k] for number in wrong for k in named_signs(signs[number])]
    notes = []
    if len(captions) < MIN_REFERENCE_CAPTIONS:
        notes.append(
            f"only {plural(len(captions), 'caption')}: too few to say what is usual, so suspicion "
            "is only good for ordering them"
        )
    if too_long:
        notes.append(
            "words were not examined in "
            f"{plural(too_long, 'caption that has', 'captions that have')} more than {MOST_WORDS}"
        )
    if examined < len(captions) - too_long:
        notes.append(
            f"words were examined in {examined} of {len(captions)} captions: the most suspicious "
            "by their scores, and a random sample; use --examine for more"
        )
    names = list(dict.fromkeys(w for each in survey.unknown.values() for w in each.unknown_words))
    skipped = sum(not each.is_readable for each in survey.unknown.values())
    if names:
        more = f" and {len(names) - NAMED_WORDS} more" if len(names) > NAMED_WORDS else ""
        notes.append(
            "words outside the model's vocabulary were left out of "
            f"{plural(len(survey.unknown), 'caption')}: {', '.join(names[:NAMED_WORDS])}{more}"
        )
    if skipped:
        these = plural(skipped, "caption was", "captions were")
        whose = "its" if skipped == 1 else "their"
        notes.append(f"{these} skipped: the model knows none of {whose} words")
    if survey.compared < 2:
        notes.append("there is no other image to compare with")
    return Summary(
        split=split.name,
        images=survey.compared,
        captions=len(captions),
        threshold=threshold,
        suspicious=len(wrong),
        false_negatives=len(duplicates),
        false_negative_images=len({duplicate.own for duplicate in duplicates.values()}),
        share=len(wrong) / max(1, len(captions)),
        signs={sign: reasons.count(sign) for sign in SIGNS},
        words_examined=examined,
        word_method=effects.method,
        score_median=float(np.median(survey.own[captions])),
        recall_at_1=float((survey.rank[captions] == 1).mean()),
        skipped_images=len(survey.skipped),
        skipped_captions=len(survey.own) - len(captions),
        unknown_captions=skipped,
        unknown_words=len(names),
        skipped=tuple(survey.skipped[:MAX_LISTED]),
        notes=tuple(notes),
    )
