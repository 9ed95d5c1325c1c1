"""False captions of real photos whose wrong words are known: those that a rule exchanged.

Unlike foils of drawn scenes these are false as a rule, not for certain (see `counterfoil.foils`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from counterfoil.data.pairs import Split
from counterfoil.data.words import words
from counterfoil.errors import DataError
from counterfoil.evaluation.foil_sets import choose_captions
from counterfoil.evaluation.word_effects import measure_words
from counterfoil.evaluation.word_foils import FoilCase, Foils
from counterfoil.evaluation.word_report import WordReport
from counterfoil.evaluation.words import report_words
from counterfoil.foils import DEFAULT_KINDS, rule_foils
from counterfoil.foils.rules import Foil
from counterfoil.models.model import Model
from counterfoil.models.word_spans import caption_words
from counterfoil.progress import Progress

ARTICLES = ("a", "an")


def rule_cases(
    split: Split,
    *,
    kinds: Sequence[str] = DEFAULT_KINDS,
    per_caption: int = 1,
    most: int | None = None,
    seed: int = 0,
) -> Foils:
    """The foils of `rule_set`, with the words that each of them exchanged.

    An article that only followed its noun is not counted as wrong.
    """
    chosen = choose_captions(split, most, seed)
    cases: list[FoilCase] = []
    left_out = 0
    for index in chosen:
        image, caption = int(split.image_of[index]), split.texts[index]
        avoid = frozenset(word for text in split.captions[image] for word in words(text))
        rng = random.Random(f"{seed}/{index}/{caption}")
        found = rule_foils(caption, rng, kinds, per_caption, avoid)
        cases += [FoilCase(image, caption, foil.text, _wrong(foil)) for foil in found]
        left_out += not found
    if not cases:
        raise DataError(f"split '{split.name}': no rule can make any of its captions false")
    return Foils(cases, len(chosen), left_out)


def _wrong(foil: Foil) -> tuple[str, ...]:
    """Of each word of a foil, punctuation left out, the rule that put it there, or nothing."""
    exchanged = {
        place
        for place, old, new in zip(foil.positions, foil.original, foil.replacement, strict=True)
        if not (old in ARTICLES and new in ARTICLES)
    }
    return tuple(
        foil.kind if place in exchanged else ""
        for place, word in enumerate(caption_words(foil.text))
        if not word.is_punctuation
    )


def evaluate_rule_words(
    model: Model,
    split: Split,
    *,
    kinds: Sequence[str] = DEFAULT_KINDS,
    per_caption: int = 1,
    most: int | None = None,
    bootstrap: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> WordReport:
    """Do the effects of a model's words find those that a rule made wrong?"""
    made = rule_cases(split, kinds=kinds, per_caption=per_caption, most=most, seed=seed)
    found = measure_words(model, split, made.cases, progress)
    return report_words(found, made, split.name, bootstrap=bootstrap, seed=seed)
