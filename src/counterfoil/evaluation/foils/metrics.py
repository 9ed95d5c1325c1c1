"""A model judged on foils: does it prefer the true caption, and know what is wrong with the other?

What TAGS-DC asks of foils and of those who tell them: discrimination (§4.3), words (§4.4), whether
foils are negatives at all and whether they read well (§4.2). Shares are also given by kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from counterfoil.core.progress import Progress, Silent
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.batches.collate import TextBatch
from counterfoil.data.pairs import Split
from counterfoil.data.scenes import SceneCaption, tokens
from counterfoil.data.text.words import words
from counterfoil.evaluation.foils.fluency import Fluency
from counterfoil.evaluation.foils.report import FoilReport, KindShare
from counterfoil.evaluation.foils.scores import (
    Block,
    FoilScores,
    blocks,
    encode_sentences,
    score_foils,
)
from counterfoil.evaluation.foils.sets import FoilPair, FoilSet
from counterfoil.evaluation.foils.truth import (
    TrueFoilKind,
    Verdict,
    has_truth,
    makes_sense,
    places_of,
    true_foil_kind,
    truth_of,
    verdict_on,
)
from counterfoil.evaluation.words.evaluate import roc_auc
from counterfoil.foils.generation import MaskTokens
from counterfoil.foils.scene_graph import KINDS, PLAIN_WORD, GraphExtractor
from counterfoil.foils.spacy_graph import create_extractor
from counterfoil.matchers.cross_encoder import CrossEncoder
from counterfoil.models.correct import HEADS, can_correct
from counterfoil.models.foil_generator import cross_encoder_of, spell_foil, word_table
from counterfoil.models.model import Model

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

THRESHOLD = 0.5
Flags = NDArray[np.bool_]

READ_AT_MOST = 300
"""Sentences of which a perplexity is taken: each token of each is a sentence to read."""


# On the drawn scenes a kind is what the exchanged word says there (a colour, a number …);
# elsewhere it is what the caption's scene graph has it for.
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


def true_foil_kinds(split: Split, pairs: Sequence[FoilPair]) -> dict[TrueFoilKind, int]:
    """In which manners the foils that are true are so; empty without truth."""
    if not has_truth(split):
        return {}
    places = places_of(split, [pair.caption for pair in pairs])
    found = Counter(
        true_foil_kind(*truth_of(split, *place), pair.foil)
        for place, pair in zip(places, pairs, strict=True)
    )
    return {kind_of_truth: found[kind_of_truth] for kind_of_truth in get_args(TrueFoilKind)}


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


# Word discrimination and word correction (TAGS-DC §4.4), by the heads for them.


@dataclass(frozen=True)
class FoilWords:
    """What the heads say of the tokens of foils that are as long as their captions.

    Of each token, special ones left out: ``suspicion``, how likely it was put in, and ``replaced``,
    whether it was; of each replaced one, whether it was ``restored``. ``corrected`` are the foils
    with every suspected token replaced by what the correction head would write.
    """

    suspicion: NDArray[np.float64]
    replaced: Flags
    restored: Flags
    pairs: list[FoilPair]
    corrected: list[str]

    @property
    def auc(self) -> float:
        """How often a replaced token is suspected more than one that was not."""
        return roc_auc(self.suspicion, self.replaced)

    @property
    def accuracy(self) -> float:
        """Share of tokens that are judged rightly at a threshold of one half."""
        return float(np.mean((self.suspicion >= THRESHOLD) == self.replaced))

    @property
    def found(self) -> float:
        """Share of the replaced tokens that are suspected at that threshold."""
        return float(np.mean(self.suspicion[self.replaced] >= THRESHOLD))

    @property
    def correction(self) -> float:
        """Share of the replaced tokens for which the true one is the first that comes to mind."""
        return float(np.mean(self.restored))


@torch.inference_mode()
def judge_words(
    model: Model, split: Split, foils: FoilSet, progress: Progress | None = None
) -> FoilWords | None:
    """The heads' verdicts on the words of foils; None where no foil is as long as its caption."""
    matcher = cross_encoder_of(model, HEADS)
    ordinary = torch.from_numpy(MaskTokens.of(model.text).ordinary).to(model.device)
    found: list[FoilWords] = []
    with eval_mode(model):
        for block in blocks(model, split, foils.pairs, progress or Silent(), "words of foils"):
            same = _of_same_length(model, split, block)
            if same is not None:
                found.append(_judge(model, matcher, split, same, ordinary))
    if not found:
        return None
    return FoilWords(
        np.concatenate([one.suspicion for one in found]),
        np.concatenate([one.replaced for one in found]),
        np.concatenate([one.restored for one in found]),
        [pair for one in found for pair in one.pairs],
        [text for one in found for text in one.corrected],
    )


def _of_same_length(model: Model, split: Split, block: Block) -> Block | None:
    """The foils that have as many tokens as their captions, so that these stand side by side."""
    encode = model.text.encode
    kept = [
        place
        for place, pair in enumerate(block.pairs)
        if len(encode(pair.foil)) == len(encode(split.texts[pair.caption]))
    ]
    if not kept:
        return None
    rows = torch.tensor(kept, device=model.device)
    return Block([block.pairs[place] for place in kept], block.images[rows])


def _judge(
    model: Model, matcher: CrossEncoder, split: Split, block: Block, ordinary: Tensor
) -> FoilWords:
    foils = encode_sentences(model, [pair.foil for pair in block.pairs])
    true = encode_sentences(model, [split.texts[pair.caption] for pair in block.pairs])
    states = matcher.states(block.images, model.encode_texts(foils)).words
    suspicion = matcher.heads["discrimination"](states).float().softmax(-1)[..., 0]
    logits = matcher.heads["correction"](states, word_table(model))
    written = ordinary[logits[..., ordinary].argmax(-1)]
    asked = _asked(foils, true, ordinary)
    replaced = asked & (foils.ids != true.ids)
    mended = torch.where(asked & (suspicion >= THRESHOLD), written, foils.ids)
    return FoilWords(
        suspicion[asked].double().cpu().numpy(),
        replaced[asked].cpu().numpy(),
        (written == true.ids)[replaced].cpu().numpy(),
        block.pairs,
        [
            _spelt(model, pair.foil, old[real].tolist(), new[real].tolist())
            for pair, old, new, real in zip(block.pairs, foils.ids, mended, foils.mask, strict=True)
        ],
    )


def _spelt(model: Model, foil: str, ids: list[int], mended: list[int]) -> str:
    """The mended sentence; the foil as it is where nothing was mended, or no text stands for it."""
    found = spell_foil(model.text, foil, ids, mended)
    return foil if found is None else found.text


def _asked(foils: TextBatch, true: TextBatch, ordinary: Tensor) -> Tensor:
    """Tokens that say something: neither padding nor special in both sentences."""
    is_ordinary = torch.isin(foils.ids, ordinary) | torch.isin(true.ids, ordinary)
    return foils.mask & is_ordinary


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
        true_kinds=true_foil_kinds(split, scores.pairs) if by_kind else {},
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
