"""How good a model's corrections are, and the rule that makes them good enough.

Captions with words exchanged by rule say what a right correction is; captions left as they are must
stay so. The rule is chosen on one split (dev) and measured on another (test).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch

from counterfoil.core.progress import Progress, Silent
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.fragments import Fragments
from counterfoil.data.pairs import Split
from counterfoil.data.text.words import stem, words
from counterfoil.evaluation.foils.sets import choose_captions, readable_images, rule_set
from counterfoil.evaluation.foils.truth import has_truth, places_of, verdict_on
from counterfoil.foils.lexicon import NOUN_FORMS
from counterfoil.models.correct import CaptionReader, Change, Correction, ReadCaption, correct_batch
from counterfoil.models.correction_rule import CorrectionRule, choose_change
from counterfoil.models.model import Model

WRONG_COSTS = 3.0
"""What a wrong change costs, in right ones: a change pays if it is right three times of four."""
MIN_CHANGES = 5
TRIALS = 1000
AT_ONCE = 32
THRESHOLDS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
MARGINS = (
    *(0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    *(0.92, 0.94, 0.95, 0.96, 0.97, 0.975, 0.98, 0.985, 0.99, 0.995),
)
"""Quantiles of the gains that are tried as margins: closest where few changes are left."""


@dataclass(frozen=True)
class Trial:
    """A caption of an image, by its index into the split's texts; ``text`` has words exchanged."""

    caption: int
    text: str

    def exchanged(self, split: Split) -> dict[int, str]:
        """The true words, by the places at which others stand."""
        true, now = words(split.texts[self.caption]), words(self.text)
        return {at: old for at, (old, new) in enumerate(zip(true, now, strict=True)) if old != new}


@dataclass(frozen=True)
class CorrectionReport:
    """Corrections of captions with exchanged words, and of as many that were left as they are.

    Of the former, ``changed`` were corrected in some way by ``changes`` words, of which ``right``
    put a true word in the place of an exchanged one; ``restored`` of these were the original word.
    Of the latter, ``untouched_changed`` had a word replaced: all of these changes are wrong.
    """

    split: str
    rule: CorrectionRule
    exchanged: int
    changed: int
    changes: int
    right: int
    restored: int
    untouched: int
    untouched_changed: int
    untouched_changes: int

    @property
    def precision(self) -> float:
        """Share of the changes of exchanged captions that are right."""
        return self.right / self.changes if self.changes else float("nan")

    @property
    def overall_precision(self) -> float:
        """The same, with as many captions among them that needed no change."""
        made = self.changes + self.untouched_changes
        return self.right / made if made else float("nan")

    def as_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold; shares are None if no change was made."""
        shares = {"precision": self.precision, "overall_precision": self.overall_precision}
        return {
            **asdict(self),
            **{name: None if np.isnan(value) else value for name, value in shares.items()},
            "none_made": 1 - self.changed / self.exchanged if self.exchanged else None,
        }

    def rows(self) -> list[list[str]]:
        """A table for people: a line for each kind of caption, the header first."""
        made = self.changes + self.untouched_changes
        return [
            ["captions", "number", "no change made", "changes", "right", "precision"],
            [
                "one exchange by rule",
                str(self.exchanged),
                _percent(self.exchanged - self.changed, self.exchanged),
                str(self.changes),
                str(self.right),
                _percent(self.right, self.changes),
            ],
            [
                "as they are",
                str(self.untouched),
                _percent(self.untouched - self.untouched_changed, self.untouched),
                str(self.untouched_changes),
                "0",
                "–",
            ],
            ["both", "", "", str(made), str(self.right), _percent(self.right, made)],
        ]

    def headline(self) -> str:
        rule = self.rule
        if not rule.usable:
            return f"split {self.split}: no change is made ({rule.obstacle()})"
        return (
            f"split {self.split}: a word is replaced if it is wrong with a probability of at least "
            f"{rule.threshold:g} and the score rises by more than {rule.margin:.4g} "
            f"(candidates: {rule.candidates}); "
            f"{_percent(self.restored, self.changes)} of the changes restore the original word"
        )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


def measure_corrections(
    model: Model,
    split: Split,
    rule: CorrectionRule,
    *,
    captions: int | None = TRIALS,
    seed: int = 1,
    progress: Progress | None = None,
) -> CorrectionReport:
    """Corrections of captions with words exchanged by rule, and of as many true captions."""
    progress = progress or Silent()
    exchanged, untouched = trials_of(split, captions, seed)
    made = _corrections(model, split, exchanged, rule, progress)
    kept = _corrections(model, split, untouched, rule, progress)
    changes = [(trial, change) for trial, one in made for change in one.changes]
    right = [is_right(split, trial, change) for trial, change in changes]
    restored = [_restores(split, trial, change) for trial, change in changes]
    return CorrectionReport(
        split.name,
        rule,
        len(made),
        sum(bool(one.changes) for _, one in made),
        len(changes),
        sum(right),
        sum(restored),
        len(kept),
        sum(bool(one.changes) for _, one in kept),
        sum(len(one.changes) for _, one in kept),
    )


def trials_of(split: Split, captions: int | None, seed: int) -> tuple[list[Trial], list[Trial]]:
    """Captions with words exchanged by rule, and as many as they are."""
    made = rule_set(split, most=captions, seed=seed)
    exchanged = [Trial(pair.caption, pair.foil) for pair in made.pairs]
    chosen = choose_captions(split, len(exchanged), seed + 1)
    untouched = [Trial(at, split.texts[at]) for at in chosen if words(split.texts[at])]
    return exchanged, untouched


def is_right(split: Split, trial: Trial, change: Change) -> bool:
    """Whether a change puts a true word in the place of an exchanged one.

    On drawn scenes their truth decides. On photos, the word must be the original one, another form
    of it, or another name of the same thing.
    """
    true = trial.exchanged(split)
    if change.position not in true:
        return False
    if _restores(split, trial, change):
        return True
    if not has_truth(split):
        return _same_thing(true[change.position], change.instead.lower())
    parts = words(split.texts[trial.caption])
    parts[change.position] = change.instead.lower()
    ((image, place),) = places_of(split, [trial.caption])
    return verdict_on(split, image, place, " ".join(parts)) == "true"


def _restores(split: Split, trial: Trial, change: Change) -> bool:
    true = trial.exchanged(split).get(change.position)
    return true is not None and stem(true) == stem(change.instead.lower())


def _same_thing(one: str, two: str) -> bool:
    known = one in NOUN_FORMS and two in NOUN_FORMS
    return known and NOUN_FORMS[one].thing == NOUN_FORMS[two].thing


def choose_rule(
    model: Model,
    split: Split,
    *,
    captions: int | None = TRIALS,
    seed: int = 0,
    progress: Progress | None = None,
) -> CorrectionRule:
    """The rule that is worth most on a split: right changes less `WRONG_COSTS` times the wrong.

    Half of the captions have words exchanged, half are as they are. A rule is not usable if no
    choice of threshold and margin is worth anything.
    """
    progress = progress or Silent()
    exchanged, untouched = trials_of(split, captions, seed)
    read = list(_read(model, split, [*exchanged, *untouched], progress))
    gains = [gain for _, one in read for p in one.proposals for gain in p.gains]
    gains = [gain for gain in gains if 0 < gain < float("inf")]
    margins = [0.0]
    if gains:
        margins += np.quantile(gains, MARGINS).tolist()
    grid = product(THRESHOLDS, margins, [1])  # words that are less likely are wrong more often
    verdicts = _Verdicts(split)
    best, most = CorrectionRule(usable=False, precision=0.0, made=0), 0.0
    for rule in (CorrectionRule(*values) for values in grid):
        right, made = verdicts.count(read, rule)
        worth = right - WRONG_COSTS * (made - right)
        if made >= MIN_CHANGES and worth > most:
            best, most = replace(rule, precision=right / made, made=made), worth
    return best


class _Verdicts:
    """Which changes are right; each is judged once."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self.known: dict[tuple[Trial, int, str], bool] = {}

    def count(
        self, read: Sequence[tuple[Trial, ReadCaption]], rule: CorrectionRule
    ) -> tuple[int, int]:
        """Right and made among the first changes of captions."""
        right = made = 0
        for trial, one in read:
            chosen = choose_change(one.proposals, rule)
            if chosen is not None:
                proposal = one.proposals[chosen[0]]
                made += 1
                right += self.is_right(trial, proposal.position, proposal.candidates[chosen[1]])
        return right, made

    def is_right(self, trial: Trial, place: int, new: str) -> bool:
        key = (trial, place, new)
        if key not in self.known:
            self.known[key] = is_right(self.split, trial, Change(place, "", new, 0.0))
        return self.known[key]


@torch.inference_mode()
def _read(
    model: Model, split: Split, trials: Sequence[Trial], progress: Progress
) -> Iterator[tuple[Trial, ReadCaption]]:
    with eval_mode(model):
        for some, images in _blocks(split, trials, progress, "choosing a rule for corrections"):
            reader = CaptionReader(model, images, 1)
            texts = [trial.text for trial in some]
            yield from zip(some, reader.read(range(len(some)), texts, min(THRESHOLDS)), strict=True)


def _corrections(
    model: Model, split: Split, trials: Sequence[Trial], rule: CorrectionRule, progress: Progress
) -> list[tuple[Trial, Correction]]:
    made: list[tuple[Trial, Correction]] = []
    for some, images in _blocks(split, trials, progress, "correcting"):
        texts = [trial.text for trial in some]
        corrected = correct_batch(model, images, texts, rule)
        made += zip(some, corrected, strict=True)
    return made


def _blocks(
    split: Split, trials: Sequence[Trial], progress: Progress, task: str
) -> Iterator[tuple[list[Trial], list[Fragments]]]:
    """Trials and their images; those of unreadable images are left out."""
    starts = range(0, len(trials), AT_ONCE)
    for start in progress.track(starts, task, len(starts)):
        some = list(trials[start : start + AT_ONCE])
        images = readable_images(split, [int(split.image_of[one.caption]) for one in some])
        kept = [one for one in some if int(split.image_of[one.caption]) in images]
        if kept:
            yield kept, [images[int(split.image_of[one.caption])] for one in kept]
