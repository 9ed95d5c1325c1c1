"""Evaluate a model on foils: does it prefer the true caption, and find the wrong words?

The measures of TAGS-DC: discrimination (§4.3), words (§4.4), and whether foils are really false and
fluent (§4.2). Shares are also given per kind of exchange.
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
from counterfoil.data.scenes import Scene, SceneCaption, tokens
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
    caption_positions,
    foil_verdict,
    has_truth,
    makes_sense,
    true_foil_kind,
    truth_of,
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

MAX_SENTENCES = 300
"""Sentences for a perplexity; each token of each is a forward pass."""


# On drawn scenes, the kind is the role of the exchanged word (a color, a number …); elsewhere it
# comes from the caption's scene graph.
def shares_by_kind(
    scores: FoilScores, kinds: Sequence[str], verdicts: Sequence[Verdict]
) -> list[KindShare]:
    """Shares per kind of exchange; ``verdicts`` is empty without ground truth."""
    counts = Counter(kinds)
    ordered = [kind for kind in (*_ORDER, SEVERAL, OTHER) if kind in counts]
    return [_share(kind, scores, [one == kind for one in kinds], verdicts) for kind in ordered]


def _share(
    kind: str, scores: FoilScores, chosen: Sequence[bool], verdicts: Sequence[Verdict]
) -> KindShare:
    counts = Counter(one for one, mine in zip(verdicts, chosen, strict=False) if mine)
    false = [mine and one == "false" for one, mine in zip(verdicts, chosen, strict=False)]
    return KindShare(
        kind=kind,
        foils=sum(chosen),
        false=counts["false"],
        true=counts["true"],
        accuracy=100 * scores.among(chosen).accuracy,
        false_accuracy=100 * scores.among(false).accuracy if any(false) else None,
    )


def kinds_on(split: Split, pairs: Sequence[FoilPair]) -> list[str]:
    """The kind of exchange of each foil."""
    if has_truth(split):
        return [
            _kind_by_role(caption, foil) for _, caption, foil in _foils_with_truth(split, pairs)
        ]
    extractor = create_extractor("rules")
    return [_kind_by_graph(extractor, split.texts[pair.caption], pair.foil) for pair in pairs]


def true_foil_kinds(split: Split, pairs: Sequence[FoilPair]) -> dict[TrueFoilKind, int]:
    """Number of true foils per kind of truth; empty without ground truth."""
    if not has_truth(split):
        return {}
    counts = Counter(true_foil_kind(*foil) for foil in _foils_with_truth(split, pairs))
    return {kind: counts[kind] for kind in get_args(TrueFoilKind)}


def _kind_by_role(caption: SceneCaption, foil: str) -> str:
    """The role of the exchanged words in the scene; words without a role are ignored."""
    new = tokens(foil)
    if len(new) != len(caption.words):
        return SEVERAL
    roles = {
        word.role.split(":")[0]
        for word, text in zip(caption.words, new, strict=True)
        if word.role and word.text.lower() != text
    }
    return _ROLES[roles.pop()] if len(roles) == 1 else SEVERAL if roles else OTHER


def _kind_by_graph(extractor: GraphExtractor, caption: str, foil: str) -> str:
    old, new = words(caption), words(foil)
    if len(old) != len(new):
        return SEVERAL
    changed = [
        position for position, pair in enumerate(zip(old, new, strict=True)) if len({*pair}) > 1
    ]
    kind = extractor.extract(caption).kind_of(changed)
    return kind if kind in KINDS else OTHER if kind == PLAIN_WORD else SEVERAL


# Word discrimination and word correction (TAGS-DC §4.4).


@dataclass(frozen=True)
class FoilWords:
    """Outputs of the word heads on foils with as many tokens as their captions.

    Per token, without special ones: ``suspicion``, the predicted probability that it was replaced,
    and ``replaced``, whether it was. Per replaced token: whether it was ``restored``. ``corrected``
    are the foils with suspected tokens replaced by the correction head's choice.
    """

    suspicion: NDArray[np.float64]
    replaced: Flags
    restored: Flags
    pairs: list[FoilPair]
    corrected: list[str]

    @property
    def auc(self) -> float:
        """ROC AUC of suspicion for replaced tokens."""
        return roc_auc(self.suspicion, self.replaced)

    @property
    def accuracy(self) -> float:
        """Share of tokens classified correctly at a threshold of 0.5."""
        return float(np.mean((self.suspicion >= THRESHOLD) == self.replaced))

    @property
    def recall(self) -> float:
        """Share of the replaced tokens that are suspected at a threshold of 0.5."""
        return float(np.mean(self.suspicion[self.replaced] >= THRESHOLD))

    @property
    def correction(self) -> float:
        """Share of the replaced tokens for which the original token is predicted first."""
        return float(np.mean(self.restored))


@torch.inference_mode()
def judge_words(
    model: Model, split: Split, foils: FoilSet, progress: Progress | None = None
) -> FoilWords | None:
    """The heads' outputs on the words of foils; None if no foil is as long as its caption."""
    matcher = cross_encoder_of(model, HEADS)
    ordinary = torch.from_numpy(MaskTokens.of(model.text).ordinary).to(model.device)
    parts: list[FoilWords] = []
    with eval_mode(model):
        for block in blocks(model, split, foils.pairs, progress or Silent(), "words of foils"):
            same = _of_same_length(model, split, block)
            if same is not None:
                parts.append(_judge(model, matcher, split, same, ordinary))
    if not parts:
        return None
    return FoilWords(
        np.concatenate([one.suspicion for one in parts]),
        np.concatenate([one.replaced for one in parts]),
        np.concatenate([one.restored for one in parts]),
        [pair for one in parts for pair in one.pairs],
        [text for one in parts for text in one.corrected],
    )


def _of_same_length(model: Model, split: Split, block: Block) -> Block | None:
    """The foils with as many tokens as their captions, or None; their tokens are aligned."""
    encode = model.text.encode
    rows = [
        row
        for row, pair in enumerate(block.pairs)
        if len(encode(pair.foil)) == len(encode(split.texts[pair.caption]))
    ]
    if not rows:
        return None
    index = torch.tensor(rows, device=model.device)
    return Block([block.pairs[row] for row in rows], block.images[index])


def _judge(
    model: Model, matcher: CrossEncoder, split: Split, block: Block, ordinary: Tensor
) -> FoilWords:
    foils = encode_sentences(model, [pair.foil for pair in block.pairs])
    true = encode_sentences(model, [split.texts[pair.caption] for pair in block.pairs])
    states = matcher.states(block.images, model.encode_texts(foils)).words
    suspicion = matcher.heads["discrimination"](states).float().softmax(-1)[..., 0]
    logits = matcher.heads["correction"](states, word_table(model))
    written = ordinary[logits[..., ordinary].argmax(-1)]
    content = _content_tokens(foils, true, ordinary)
    replaced = content & (foils.ids != true.ids)
    mended = torch.where(content & (suspicion >= THRESHOLD), written, foils.ids)
    return FoilWords(
        suspicion[content].double().cpu().numpy(),
        replaced[content].cpu().numpy(),
        (written == true.ids)[replaced].cpu().numpy(),
        block.pairs,
        [
            _spell(model, pair.foil, old[real].tolist(), new[real].tolist())
            for pair, old, new, real in zip(block.pairs, foils.ids, mended, foils.mask, strict=True)
        ],
    )


def _spell(model: Model, foil: str, ids: list[int], mended: list[int]) -> str:
    """The corrected sentence; the foil itself if nothing changed or the ids have no text."""
    spelled = spell_foil(model.text, foil, ids, mended)
    return foil if spelled is None else spelled.text


def _content_tokens(foils: TextBatch, true: TextBatch, ordinary: Tensor) -> Tensor:
    """Mask of tokens that are not padding, and not special in both sentences."""
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
    """All metrics of a model on foils.

    Word metrics need the heads for them, true negatives a split with ground truth, perplexity a
    language model. ``by_kind`` adds shares per kind of exchange.
    """
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
        other_image=_percent(scores.other_image),
        own_image=_percent(scores.own_image),
        **_truth_shares(split, foils.pairs),
        **_false_accuracy(scores, verdicts),
        **(_word_shares(words) if words is not None else {}),
        **(_perplexities(fluency, split, foils, words) if fluency is not None else {}),
        by_kind=shares_by_kind(scores, kinds_on(split, scores.pairs), verdicts) if by_kind else [],
        true_kinds=true_foil_kinds(split, scores.pairs) if by_kind else {},
    )


def verdicts_on(split: Split, pairs: Sequence[FoilPair]) -> list[Verdict]:
    """Whether each foil is false of its image, true or unsure; empty without ground truth."""
    if not has_truth(split):
        return []
    return [foil_verdict(*foil) for foil in _foils_with_truth(split, pairs)]


def _foils_with_truth(
    split: Split, pairs: Sequence[FoilPair]
) -> list[tuple[Scene, SceneCaption, str]]:
    """The scene, the caption and the foil of each pair, on a split with ground truth."""
    positions = caption_positions(split, [pair.caption for pair in pairs])
    return [
        (*truth_of(split, *position), pair.foil)
        for position, pair in zip(positions, pairs, strict=True)
    ]


def _truth_shares(split: Split, pairs: Sequence[FoilPair]) -> dict[str, Any]:
    """Shares of foils that are false of their image; only counts if none could be checked."""
    counts = Counter(verdicts_on(split, pairs))
    checked = counts["false"] + counts["true"]
    shares = {"checked": checked, "unsure": counts["unsure"]}
    if not checked:
        return shares
    foils = _foils_with_truth(split, pairs)
    senseless = sum(not makes_sense(caption, foil) for _, caption, foil in foils)
    return shares | {
        "true_negatives": 100 * counts["false"] / checked,
        "false_negatives": 100 * counts["true"] / checked,
        "senseless": 100 * senseless / checked,
        "undecided": 100 * counts["unsure"] / len(pairs),
    }


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _false_accuracy(scores: FoilScores, verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Accuracy on foils that are certainly false; ranking a true foil lower is no success."""
    false = [verdict == "false" for verdict in verdicts]
    return {"false_accuracy": 100 * scores.among(false).accuracy} if any(false) else {}


def _word_shares(words: FoilWords) -> dict[str, float | int]:
    return {
        "wod_auc": 100 * words.auc,
        "wod_accuracy": 100 * words.accuracy,
        "wod_found": 100 * words.recall,
        "woc_accuracy": 100 * words.correction,
        "word_pairs": len(words.pairs),
    }


def _perplexities(
    fluency: Fluency, split: Split, foils: FoilSet, words: FoilWords | None
) -> dict[str, float | str | None]:
    sample = foils.pairs[:: -(-len(foils.pairs) // MAX_SENTENCES)]
    captions = [FoilPair(pair.caption, split.texts[pair.caption]) for pair in sample]
    corrected = None
    if words is not None:
        mended = zip(words.pairs, words.corrected, strict=True)
        sentences = [FoilPair(pair.caption, text) for pair, text in mended]
        corrected = sentences[:: -(-len(sentences) // MAX_SENTENCES)]
    return {
        "perplexity_true": fluency.perplexity(split, captions),
        "perplexity_foils": fluency.perplexity(split, sample),
        "perplexity_corrected": fluency.perplexity(split, corrected) if corrected else None,
        "language_model": fluency.name,
    }
