"""The counts of an audit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from counterfoil.audit.findings import Finding, Summary
from counterfoil.audit.survey import Survey
from counterfoil.audit.suspicion import SIGNS
from counterfoil.audit.words import WordEffects
from counterfoil.data.pairs import Split

FEW = 50
LISTED = 20


def summarise(
    split: Split,
    survey: Survey,
    findings: Sequence[Finding],
    threshold: float,
    effects: WordEffects,
) -> Summary:
    """Counts of the findings of a split, and what a reader should know about them."""
    captions, examined = survey.captions, len(effects.words)
    wrong = [finding for finding in findings if finding.kind == "mismatch"]
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
    if survey.compared < 2:
        notes.append("there is no other image to compare with")
    return Summary(
        split=split.name,
        images=survey.compared,
        captions=len(captions),
        suspicious=len(wrong),
        false_negatives=len(findings) - len(wrong),
        share=len(wrong) / max(1, len(captions)),
        threshold=threshold,
        signs={sign: sum(sign in finding.signs for finding in wrong) for sign in SIGNS},
        words_examined=examined,
        word_method=effects.method,
        score_median=float(np.median(survey.own[captions])),
        recall_at_1=float((survey.rank[captions] == 1).mean()),
        skipped_images=len(survey.skipped),
        skipped_captions=len(survey.own) - len(captions),
        skipped=tuple(survey.skipped[:LISTED]),
        notes=tuple(notes),
    )
