"""A model judged on foils: does it prefer the true caption, and know what is wrong with the other?

What TAGS-DC asks of foils and of those who tell them: discrimination (§4.3), words
(§4.4), whether foils are negatives at all and whether they read well (§4.2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from counterfoil.data.pairs import Split
from counterfoil.evaluation.foil_fluency import Fluency
from counterfoil.evaluation.foil_kinds import kinds_on, manners_on, shares_by_kind
from counterfoil.evaluation.foil_report import FoilReport
from counterfoil.evaluation.foil_scores import FoilScores, score_foils
from counterfoil.evaluation.foil_sets import FoilPair, FoilSet
from counterfoil.evaluation.foil_truth import (
    Verdict,
    has_truth,
    makes_sense,
    places_of,
    truth_of,
    verdict_on,
)
from counterfoil.evaluation.foil_words import FoilWords, judge_words
from counterfoil.models.correct import can_correct
from counterfoil.models.model import Model
from counterfoil.progress import Progress

READ_AT_MOST = 300
"""Sentences of which a perplexity is taken: each token of each is a sentence to read."""


def judge_foils(
    model: Model,
    split: Split,
    foils: FoilSet,
    *,
    fluency: Fluency | None = None,
    by_kind: bool = False,
    progress: Progress | None = None,
) -> FoilReport:
    """Everything that can be measured of a model and foils: words where it has heads for them, true
    negatives where the split knows the truth, perplexity where a language model is given; and, if
    asked for, the same by what the foils exchange."""
    scores = score_foils(model, split, foils, progress)
    words = judge_words(model, split, foils, progress) if can_correct(model) else None
    verdicts = verdicts_on(split, scores.pairs)
    return FoilReport(
        split=split.name,
        foils=foils.name,
        captions=foils.captions,
        left_out=foils.left_out,
        pairs=len(scores.pairs),
        accuracy=100 * scores.accuracy,
        caption_accuracy=100 * scores.caption_accuracy,
        harder=100 * float(np.mean(scores.foil > scores.true)),
        gap=scores.gap,
        **_truths(split, foils.pairs),
        **_on_false(scores, verdicts),
        **(_words(words) if words is not None else {}),
        **(_perplexities(fluency, split, foils, words) if fluency is not None else {}),
        by_kind=shares_by_kind(scores, kinds_on(split, scores.pairs), verdicts) if by_kind else [],
        manners=manners_on(split, scores.pairs) if by_kind else {},
    )


def verdicts_on(split: Split, pairs: Sequence[FoilPair]) -> list[Verdict]:
    """Whether each foil is false of its image, true of it, or unsure; empty without truth."""
    if not has_truth(split):
        return []
    places = places_of(split, [pair.caption for pair in pairs])
    return [verdict_on(split, *place, pair.foil) for place, pair in zip(places, pairs, strict=True)]


def _truths(split: Split, pairs: Sequence[FoilPair]) -> dict[str, Any]:
    """How many foils are false of their image; the other shares only if some could be checked."""
    counts = Counter(verdicts_on(split, pairs))
    checked = counts["false"] + counts["true"]
    found = {"checked": checked, "unsure": counts["unsure"]}
    if not checked:
        return found
    places = places_of(split, [pair.caption for pair in pairs])
    senseless = sum(
        not makes_sense(truth_of(split, *place)[1], pair.foil)
        for place, pair in zip(places, pairs, strict=True)
    )
    return found | {
        "true_negatives": 100 * counts["false"] / checked,
        "false_negatives": 100 * counts["true"] / checked,
        "senseless": 100 * senseless / checked,
        "undecided": 100 * counts["unsure"] / len(pairs),
    }


def _on_false(scores: FoilScores, verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Accuracy on foils that are false for sure: to rank another one lower is no virtue."""
    false = [verdict == "false" for verdict in verdicts]
    return {"false_accuracy": 100 * scores.among(false).accuracy} if any(false) else {}


def _words(words: FoilWords) -> dict[str, float | int]:
    return {
        "wod_auc": 100 * words.auc,
        "wod_accuracy": 100 * words.accuracy,
        "wod_found": 100 * words.found,
        "woc_accuracy": 100 * words.correction,
        "word_pairs": len(words.pairs),
    }


def _perplexities(
    fluency: Fluency, split: Split, foils: FoilSet, words: FoilWords | None
) -> dict[str, float | str | None]:
    some = foils.pairs[:: -(-len(foils.pairs) // READ_AT_MOST)]
    captions = [FoilPair(pair.caption, split.texts[pair.caption]) for pair in some]
    corrected = None
    if words is not None:
        mended = zip(words.pairs, words.corrected, strict=True)
        sentences = [FoilPair(pair.caption, text) for pair, text in mended]
        corrected = sentences[:: -(-len(sentences) // READ_AT_MOST)]
    return {
        "perplexity_true": fluency.perplexity(split, captions),
        "perplexity_foils": fluency.perplexity(split, some),
        "perplexity_corrected": fluency.perplexity(split, corrected) if corrected else None,
        "language_model": fluency.name,
    }
