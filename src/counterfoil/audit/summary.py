"""The counts of an audit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from counterfoil.audit.findings import Summary
from counterfoil.audit.survey import Survey
from counterfoil.audit.suspicion import SIGNS, SUSPICIOUS, named_signs
from counterfoil.audit.words import WordEffects
from counterfoil.data.duplicates import Duplicate
from counterfoil.data.pairs import Split

Values = NDArray[np.float64]

FEW = 50
LISTED = 20
NAMED_WORDS = 10


def summarise(
    split: Split,
    survey: Survey,
    signs: Values,
    suspicion: Values,
    duplicates: dict[int, Duplicate],
    effects: WordEffects,
) -> Summary:
    """What was found in a split, and what a reader should know about it."""
    captions, examined = survey.captions, len(effects.words)
    wrong = captions[suspicion[captions] >= SUSPICIOUS]
    reasons = [SIGNS[k] for number in wrong for k in named_signs(signs[number])]
    notes = []
    if len(captions) < FEW:
        notes.append(
            f"only {len(captions)} captions: too few to say what is usual, so take suspicion as an "
            "order and not as a measure"
        )
    if examined < len(captions):
        notes.append(
            f"words were examined in {examined} of {len(captions)} captions: the most suspicious "
            "by their scores, and some drawn at random; --examine looks at more"
        )
    names = list(dict.fromkeys(w for each in survey.unknown.values() for w in each.unknown_words))
    skipped = sum(not each.is_readable for each in survey.unknown.values())
    if names:
        more = f" and {len(names) - NAMED_WORDS} more" if len(names) > NAMED_WORDS else ""
        notes.append(
            f"words outside the model's vocabulary were left out of {len(survey.unknown)} "
            f"captions: {', '.join(names[:NAMED_WORDS])}{more}"
        )
    if skipped:
        notes.append(f"{skipped} captions were skipped: the model knows none of their words")
    if survey.compared < 2:
        notes.append("there is no other image to compare with")
    return Summary(
        split=split.name,
        images=survey.compared,
        captions=len(captions),
        suspicious=len(wrong),
        false_negatives=len(duplicates),
        false_negative_images=len({found.own for found in duplicates.values()}),
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
        skipped=tuple(survey.skipped[:LISTED]),
        notes=tuple(notes),
    )
