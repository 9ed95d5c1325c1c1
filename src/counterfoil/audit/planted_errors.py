"""Plant errors into captions and words of drawn scenes, and count what an audit finds of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from counterfoil.audit.audit import Audit
from counterfoil.audit.findings import Finding, Planted
from counterfoil.audit.noise import Marks, drawn_foils, with_texts
from counterfoil.audit.suspicion import Values
from counterfoil.core.errors import ConfigError
from counterfoil.data.pairs import Split
from counterfoil.data.splits import shuffled_captions
from counterfoil.evaluation.report import Report
from counterfoil.evaluation.words.evaluate import Ranking


@dataclass(frozen=True)
class Corrupted:
    """A split with some captions made wrong, and which ones.

    ``swapped[k]``: whether caption ``k`` came from another image. ``wrong[k]``: for a caption with
    exchanged words, the kind of error of each word without punctuation ("" if it is right).
    """

    split: Split
    swapped: NDArray[np.bool_]
    wrong: dict[int, tuple[str, ...]]

    @property
    def labels(self) -> NDArray[np.bool_]:
        """Mask of the wrong captions of either kind."""
        labels = self.swapped.copy()
        labels[list(self.wrong)] = True
        return labels


def corrupt(split: Split, swapped: float, words: float, seed: int = 0) -> Corrupted:
    """Give a share ``swapped`` of the captions to other images, and falsify words of others.

    Both are shares of all captions, so their sum is at most 1. ``words`` needs drawn scenes, and is
    reduced if too few captions can be made false.
    """
    if swapped < 0 or words < 0 or swapped + words > 1:
        raise ConfigError(f"corruption: expected shares of at most 1 in all, got {swapped}+{words}")
    shuffled, index = shuffled_captions(split, swapped, seed)
    swapped_mask = split.image_of[index] != split.image_of
    texts = list(shuffled.texts)
    wrong: dict[int, tuple[str, ...]] = {}
    if words > 0:
        cases = drawn_foils(split, seed)
        eligible = np.array([k for k in sorted(cases) if index[k] == k], dtype=np.int64)
        count = min(round(words * len(texts)), len(eligible))
        for caption in np.random.default_rng(seed).choice(eligible, size=count, replace=False):
            case = cases[int(caption)]
            texts[int(caption)], wrong[int(caption)] = case.foil, case.wrong
    return Corrupted(with_texts(shuffled, texts), swapped_mask, wrong)


class DetectionMeasures(Report):
    """In percent: precision and recall of the listed items; AP and AUC of the ranking of all.

    ``chance`` is the share of wrong items, which is the AP of a random order.
    """

    wrong: int
    items: int
    listed: int
    precision: float
    recall: float
    ap: float
    auc: float
    chance: float


class AuditMeasures(Report):
    """Detection of wrong captions, of all kinds and per kind against unchanged captions.

    ``words``: wrong words in captions with exchanged words. ``everywhere``: wrong words in all
    captions but the swapped ones, whose words are neither right nor wrong. ``plain``: as ``words``,
    by effect alone, without the usual effect of the word. ``signs``: wrong captions by one sign
    alone. ``clean_listed``: percent of captions listed before the split was corrupted, if audited.
    """

    captions: DetectionMeasures
    swapped: DetectionMeasures | None
    exchanged: DetectionMeasures | None
    signs: dict[str, DetectionMeasures]
    words: DetectionMeasures | None
    everywhere: DetectionMeasures | None
    plain: DetectionMeasures | None
    clean_listed: float | None = None

    def rows(self) -> list[tuple[str, ...]]:
        """A header and one row of text per measure."""
        header = ("", "wrong", "of", "listed", "precision", "recall", "AP", "AUC", "AP by chance")
        named = [
            ("wrong captions", self.captions),
            ("  swapped", self.swapped),
            ("  words exchanged", self.exchanged),
            *((f"  by {sign} alone", measures) for sign, measures in self.signs.items()),
            ("wrong words, in captions with such", self.words),
            ("  by effect alone", self.plain),
            ("wrong words, everywhere", self.everywhere),
        ]
        return [header, *(_row(name, measures) for name, measures in named if measures is not None)]


class PlantedCaption(Planted):
    """A planted caption, and whether the audit lists it."""

    image: str
    caption: int
    text: str
    suspicion: float
    listed: bool


def planted_captions(audit: Audit, truth: Corrupted, original: Split) -> list[PlantedCaption]:
    """The captions of ``original`` that were made wrong, most suspicious first."""
    first = np.cumsum([0, *(len(texts) for texts in original.captions)])
    threshold = audit.threshold
    planted = []
    for number in np.flatnonzero(truth.labels & ~np.isnan(audit.suspicion)).tolist():
        image = int(original.image_of[number])
        planted.append(
            PlantedCaption(
                error="swapped" if truth.swapped[number] else "words",
                original=original.texts[number],
                image=original.ids[image],
                caption=number - int(first[image]),
                text=truth.split.texts[number],
                suspicion=float(audit.suspicion[number]),
                listed=bool(audit.suspicion[number] >= threshold),
            )
        )
    return sorted(planted, key=lambda one: -one.suspicion)


def mark_planted(findings: list[Finding], planted: list[PlantedCaption]) -> list[Finding]:
    """The findings, with ``planted`` set for those of planted captions."""
    errors = {
        (one.image, one.caption): Planted(error=one.error, original=one.original) for one in planted
    }
    return [
        finding.model_copy(update={"planted": errors.get((finding.image, finding.caption))})
        for finding in findings
    ]


def measure_audit(
    audit: Audit, truth: Corrupted, signs: tuple[str, ...] = (), clean: Audit | None = None
) -> AuditMeasures:
    """Compare an audit with the truth; captions of unreadable images are ignored.

    ``clean`` is an audit of the same split before it was corrupted; all it lists is a false alarm.
    """
    read = ~np.isnan(audit.suspicion)
    labels, suspicion = truth.labels[read], audit.suspicion[read]
    listed = suspicion >= audit.threshold
    exchanged = np.isin(np.arange(len(read)), list(truth.wrong))[read]
    swapped = truth.swapped[read]

    def of_kind(kind: Marks) -> DetectionMeasures | None:
        judged = kind | ~labels
        return _detection(suspicion[judged], kind[judged], listed[judged]) if kind.any() else None

    whole = _detection(suspicion, labels, listed)
    inside = [number for number in truth.wrong if number in audit.word_doubts]
    outside = [n for n in audit.word_doubts if not truth.swapped[n] and n not in truth.wrong]
    return AuditMeasures(
        captions=whole,
        swapped=of_kind(swapped),
        exchanged=of_kind(exchanged),
        signs={
            name: _detection(audit.signs[read, k], labels, audit.signs[read, k] >= 0.5)
            for k, name in enumerate(signs)
        },
        words=_words(audit, truth, inside, audit.word_doubts),
        everywhere=_words(audit, truth, [*inside, *outside], audit.word_doubts),
        plain=_words(audit, truth, inside, _plain_doubts(audit)),
        clean_listed=None if clean is None else 100.0 * clean.listed / clean.summary.captions,
    )


def _plain_doubts(audit: Audit) -> dict[int, Values]:
    """Doubts by the effects of words alone; a negative effect counts as wrong."""
    return {
        number: np.array([audit.word_threshold - word.effect for word in words])
        for number, words in audit.word_effects.words.items()
    }


def _words(
    audit: Audit, truth: Corrupted, captions: list[int], by: dict[int, Values]
) -> DetectionMeasures | None:
    doubts = [by[number] for number in captions]
    marks = [
        np.array([bool(kind) for kind in truth.wrong[number]])
        if number in truth.wrong
        else np.zeros(len(doubt), dtype=np.bool_)
        for number, doubt in zip(captions, doubts, strict=True)
    ]
    if not any(mark.any() for mark in marks):
        return None
    # A word is listed only if its caption is.
    threshold = audit.threshold
    listed = [
        (doubt > audit.word_threshold) & bool(audit.suspicion[number] >= threshold)
        for number, doubt in zip(captions, doubts, strict=True)
    ]
    return _detection(np.concatenate(doubts), np.concatenate(marks), np.concatenate(listed))


def _detection(values: Values, labels: Marks, listed: Marks) -> DetectionMeasures:
    ranking = Ranking(values, labels)
    hits = int((listed & labels).sum())
    return DetectionMeasures(
        wrong=int(labels.sum()),
        items=len(labels),
        listed=int(listed.sum()),
        precision=100.0 * hits / listed.sum() if listed.any() else float("nan"),
        recall=100.0 * hits / labels.sum() if labels.any() else float("nan"),
        ap=100.0 * float(ranking.average_precision()),
        auc=100.0 * float(ranking.auc()),
        chance=100.0 * float(labels.mean()),
    )


def _row(name: str, measures: DetectionMeasures) -> tuple[str, ...]:
    shares = (measures.precision, measures.recall, measures.ap, measures.auc, measures.chance)
    counts = (measures.wrong, measures.items, measures.listed)
    return (name, *map(str, counts), *(f"{share:.1f}" for share in shares))
