"""Precision of a model's corrections, and the choice of the rule that accepts them.

A caption with words exchanged by rule has a known right correction; an unchanged caption must stay
as it is. The rule is chosen on one split (dev) and measured on another (test).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
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
from counterfoil.evaluation.foils.truth import caption_positions, has_truth, verdict_on
from counterfoil.foils.lexicon import NOUN_FORMS
from counterfoil.models.correct import CaptionReader, Change, Correction, ReadCaption, correct_batch
from counterfoil.models.correction_rule import CorrectionRule, choose_change
from counterfoil.models.model import Model

WRONG_COSTS = 3.0
"""Cost of a wrong change, in right changes: accepting pays above a precision of 3/4."""
MIN_CHANGES = 5
CASES = 1000
AT_ONCE = 32
THRESHOLDS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
MARGINS = (
    *(0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    *(0.92, 0.94, 0.95, 0.96, 0.97, 0.975, 0.98, 0.985, 0.99, 0.995),
)
"""Quantiles of the gains that are tried as margins; denser near 1, with few changes left."""


@dataclass(frozen=True)
class CorrectionCase:
    """A caption to correct: its index into the split's texts, and its text after any exchange."""

    caption: int
    text: str

    def exchanged(self, split: Split) -> dict[int, str]:
        """The original words, by the positions at which they were exchanged."""
        true, now = words(split.texts[self.caption]), words(self.text)
        return {at: old for at, (old, new) in enumerate(zip(true, now, strict=True)) if old != new}


@dataclass(frozen=True)
class CorrectionReport:
    """Corrections of captions with exchanged words, and of as many untouched captions.

    Of the exchanged captions, ``changed`` were corrected in ``changes`` words. ``right`` of these
    changes replaced an exchanged word by a true one, ``restored`` by the original one. Of the
    untouched captions, ``untouched_changed`` had a word replaced, which is always wrong.
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
        """Share of right changes in the exchanged captions."""
        return self.right / self.changes if self.changes else float("nan")

    @property
    def overall_precision(self) -> float:
        """Share of right changes in exchanged and untouched captions together."""
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
        """A header and one row of text per kind of caption."""
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
    captions: int | None = CASES,
    seed: int = 1,
    progress: Progress | None = None,
) -> CorrectionReport:
    """Correct captions with words exchanged by rule, and as many true captions."""
    progress = progress or Silent()
    exchanged, untouched = make_cases(split, captions, seed)
    corrected = _corrections(model, split, exchanged, rule, progress)
    unchanged = _corrections(model, split, untouched, rule, progress)
    changes = [(case, change) for case, one in corrected for change in one.changes]
    right = [is_right(split, case, change) for case, change in changes]
    restored = [_restores_word(split, case, change) for case, change in changes]
    return CorrectionReport(
        split.name,
        rule,
        len(corrected),
        sum(bool(one.changes) for _, one in corrected),
        len(changes),
        sum(right),
        sum(restored),
        len(unchanged),
        sum(bool(one.changes) for _, one in unchanged),
        sum(len(one.changes) for _, one in unchanged),
    )


def make_cases(
    split: Split, captions: int | None, seed: int
) -> tuple[list[CorrectionCase], list[CorrectionCase]]:
    """Captions with words exchanged by rule, and as many untouched captions."""
    foils = rule_set(split, most=captions, seed=seed)
    exchanged = [CorrectionCase(pair.caption, pair.foil) for pair in foils.pairs]
    chosen = choose_captions(split, len(exchanged), seed + 1)
    untouched = [CorrectionCase(at, split.texts[at]) for at in chosen if words(split.texts[at])]
    return exchanged, untouched


def is_right(split: Split, case: CorrectionCase, change: Change) -> bool:
    """Whether a change replaces an exchanged word by a true one.

    On drawn scenes the ground truth decides. On photos, the new word must be the original one,
    another form of it, or another name of the same thing.
    """
    true = case.exchanged(split)
    if change.position not in true:
        return False
    if _restores_word(split, case, change):
        return True
    if not has_truth(split):
        return _same_thing(true[change.position], change.instead.lower())
    parts = words(split.texts[case.caption])
    parts[change.position] = change.instead.lower()
    (position,) = caption_positions(split, [case.caption])
    return verdict_on(split, *position, " ".join(parts)) == "true"


def _restores_word(split: Split, case: CorrectionCase, change: Change) -> bool:
    true = case.exchanged(split).get(change.position)
    return true is not None and stem(true) == stem(change.instead.lower())


def _same_thing(one: str, two: str) -> bool:
    known = one in NOUN_FORMS and two in NOUN_FORMS
    return known and NOUN_FORMS[one].thing == NOUN_FORMS[two].thing


def choose_rule(
    model: Model,
    split: Split,
    *,
    captions: int | None = CASES,
    seed: int = 0,
    progress: Progress | None = None,
) -> CorrectionRule:
    """The rule of the highest worth on a split: right changes minus `WRONG_COSTS` × wrong ones.

    Half of the captions have words exchanged, half are untouched. The rule is not usable if no
    threshold and margin have a positive worth.
    """
    progress = progress or Silent()
    exchanged, untouched = make_cases(split, captions, seed)
    read = list(_read_captions(model, split, [*exchanged, *untouched], progress))
    gains = [gain for _, one in read for p in one.proposals for gain in p.gains]
    gains = [gain for gain in gains if 0 < gain < float("inf")]
    margins = [0.0]
    if gains:
        margins += np.quantile(gains, MARGINS).tolist()
    grid = product(THRESHOLDS, margins, [1])  # less likely candidates are wrong more often
    verdict = cache(partial(_is_right_word, split))
    best, best_worth = CorrectionRule(usable=False, precision=0.0, made=0), 0.0
    for rule in (CorrectionRule(*values) for values in grid):
        right, made = _count_right(read, rule, verdict)
        worth = right - WRONG_COSTS * (made - right)
        if made >= MIN_CHANGES and worth > best_worth:
            best, best_worth = replace(rule, precision=right / made, made=made), worth
    return best


def _is_right_word(split: Split, case: CorrectionCase, position: int, word: str) -> bool:
    return is_right(split, case, Change(position, "", word, 0.0))


def _count_right(
    read: Sequence[tuple[CorrectionCase, ReadCaption]],
    rule: CorrectionRule,
    verdict: Callable[[CorrectionCase, int, str], bool],
) -> tuple[int, int]:
    """How many first changes of captions are right, and how many the rule makes."""
    right = made = 0
    for case, caption in read:
        choice = choose_change(caption.proposals, rule)
        if choice is not None:
            proposal = caption.proposals[choice[0]]
            made += 1
            right += verdict(case, proposal.position, proposal.candidates[choice[1]])
    return right, made


@torch.inference_mode()
def _read_captions(
    model: Model, split: Split, cases: Sequence[CorrectionCase], progress: Progress
) -> Iterator[tuple[CorrectionCase, ReadCaption]]:
    model.fragments_of(split)
    with eval_mode(model):
        for block, images in _blocks(split, cases, progress, "choosing a rule for corrections"):
            reader = CaptionReader(model, images, 1)
            texts = [case.text for case in block]
            yield from zip(
                block, reader.read(range(len(block)), texts, min(THRESHOLDS)), strict=True
            )


def _corrections(
    model: Model,
    split: Split,
    cases: Sequence[CorrectionCase],
    rule: CorrectionRule,
    progress: Progress,
) -> list[tuple[CorrectionCase, Correction]]:
    model.fragments_of(split)
    corrections: list[tuple[CorrectionCase, Correction]] = []
    for block, images in _blocks(split, cases, progress, "correcting"):
        texts = [case.text for case in block]
        corrected = correct_batch(model, images, texts, rule)
        corrections += zip(block, corrected, strict=True)
    return corrections


def _blocks(
    split: Split, cases: Sequence[CorrectionCase], progress: Progress, task: str
) -> Iterator[tuple[list[CorrectionCase], list[Fragments]]]:
    """Blocks of captions with their images; captions of unreadable images are ignored."""
    starts = range(0, len(cases), AT_ONCE)
    for start in progress.track(starts, task, len(starts)):
        block = list(cases[start : start + AT_ONCE])
        images = readable_images(split, [int(split.image_of[case.caption]) for case in block])
        readable = [case for case in block if int(split.image_of[case.caption]) in images]
        if readable:
            yield readable, [images[int(split.image_of[case.caption])] for case in readable]
