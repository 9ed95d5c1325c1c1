"""Word discrimination and word correction of foils (TAGS-DC §4.4), by the heads for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from counterfoil.data.batches import TextBatch
from counterfoil.data.pairs import Split
from counterfoil.evaluation.foil_scores import Block, blocks, encode_sentences
from counterfoil.evaluation.foil_sets import FoilPair, FoilSet
from counterfoil.evaluation.word_metrics import roc_auc
from counterfoil.foils.masking import MaskTokens
from counterfoil.matchers.cross_encoder import CrossEncoder
from counterfoil.models.asking import asked
from counterfoil.models.correct import HEADS
from counterfoil.models.foil_maker import cross_encoder_of, word_table
from counterfoil.models.foil_text import spell_foil
from counterfoil.models.model import Model
from counterfoil.progress import Progress, Silent

THRESHOLD = 0.5

Flags = NDArray[np.bool_]


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
    with asked(model):
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
