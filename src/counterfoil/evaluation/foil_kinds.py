"""Foils by what they exchange: which kinds are false of their image, and which a model tells.

On the drawn scenes a kind is what the exchanged word says there (a colour, a number …); elsewhere
it is what the caption's scene graph has it for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import get_args

from counterfoil.data.pairs import Split
from counterfoil.data.scenes import SceneCaption, tokens
from counterfoil.data.words import words
from counterfoil.evaluation.foil_report import KindShare
from counterfoil.evaluation.foil_scores import FoilScores
from counterfoil.evaluation.foil_sets import FoilPair
from counterfoil.evaluation.foil_truth import (
    Manner,
    Verdict,
    has_truth,
    manner_of,
    places_of,
    truth_of,
)
from counterfoil.foils.extractors import create_extractor
from counterfoil.foils.graph import KINDS, PLAIN_WORD, GraphExtractor

SEVERAL, OTHER = "several", "other words"
_ROLES = {
    "noun": "object",
    "colour": "colour",
    "size": "size",
    "pattern": "pattern",
    "count": "number",
    "relation": "relation",
    "position": "place",
}
_ORDER = ("object", "colour", "size", "pattern", "number", "attribute", "relation", "place")


def shares_by_kind(
    scores: FoilScores, kinds: Sequence[str], verdicts: Sequence[Verdict]
) -> list[KindShare]:
    """The foils of each kind, with what is known of their truth; ``verdicts`` may be empty."""
    found = Counter(kinds)
    ordered = [kind for kind in (*_ORDER, SEVERAL, OTHER) if kind in found]
    return [_share(kind, scores, [one == kind for one in kinds], verdicts) for kind in ordered]


def _share(
    kind: str, scores: FoilScores, chosen: Sequence[bool], verdicts: Sequence[Verdict]
) -> KindShare:
    told = Counter(one for one, mine in zip(verdicts, chosen, strict=False) if mine)
    false = [mine and one == "false" for one, mine in zip(verdicts, chosen, strict=False)]
    return KindShare(
        kind=kind,
        foils=sum(chosen),
        false=told["false"],
        true=told["true"],
        accuracy=100 * scores.among(chosen).accuracy,
        false_accuracy=100 * scores.among(false).accuracy if any(false) else None,
    )


def kinds_on(split: Split, pairs: Sequence[FoilPair]) -> list[str]:
    """What each foil exchanges."""
    if has_truth(split):
        places = places_of(split, [pair.caption for pair in pairs])
        return [
            _by_role(truth_of(split, *place)[1], pair.foil)
            for place, pair in zip(places, pairs, strict=True)
        ]
    extractor = create_extractor("rules")
    return [_by_graph(extractor, split.texts[pair.caption], pair.foil) for pair in pairs]


def manners_on(split: Split, pairs: Sequence[FoilPair]) -> dict[Manner, int]:
    """In which manners the foils that are true are so; empty without truth."""
    if not has_truth(split):
        return {}
    places = places_of(split, [pair.caption for pair in pairs])
    found = Counter(
        manner_of(*truth_of(split, *place), pair.foil)
        for place, pair in zip(places, pairs, strict=True)
    )
    return {manner: found[manner] for manner in get_args(Manner)}


def _by_role(caption: SceneCaption, foil: str) -> str:
    """By what the exchanged words say of the scene; words that say nothing count beside none."""
    new = tokens(foil)
    if len(new) != len(caption.words):
        return SEVERAL
    roles = {
        word.role.split(":")[0]
        for word, text in zip(caption.words, new, strict=True)
        if word.role and word.text.lower() != text
    }
    return _ROLES[roles.pop()] if len(roles) == 1 else SEVERAL if roles else OTHER


def _by_graph(extractor: GraphExtractor, caption: str, foil: str) -> str:
    old, new = words(caption), words(foil)
    if len(old) != len(new):
        return SEVERAL
    changed = [place for place, pair in enumerate(zip(old, new, strict=True)) if len({*pair}) > 1]
    kind = extractor.extract(caption).kind_of(changed)
    return kind if kind in KINDS else OTHER if kind == PLAIN_WORD else SEVERAL
