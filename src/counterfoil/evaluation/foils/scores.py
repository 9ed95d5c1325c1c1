"""True captions and their foils with their images, block by block: what the foil metrics read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from counterfoil.core.errors import DataError
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.batches.collate import TextBatch, pad_fragments, pad_texts
from counterfoil.data.pairs import Split
from counterfoil.encoders import Encoded
from counterfoil.evaluation.foils.sets import FoilPair, FoilSet, readable_images
from counterfoil.matchers.base import paired_scores
from counterfoil.models.model import Model

PAIR_BATCH = 128

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Block:
    """Some foils, and the encoded image [n] of each."""

    pairs: list[FoilPair]
    images: Encoded


@dataclass(frozen=True)
class FoilScores:
    """Scores of the captions of ``pairs`` and of their foils; pairs that had no image are gone."""

    pairs: list[FoilPair]
    true: Values
    foil: Values

    @property
    def accuracy(self) -> float:
        """Share of foils that score below their caption; a tie counts against the model."""
        return float(np.mean(self.true > self.foil))

    @property
    def caption_accuracy(self) -> float:
        """Share of captions that score above every one of their foils."""
        beaten: dict[int, bool] = {}
        for pair, right in zip(self.pairs, self.true > self.foil, strict=True):
            beaten[pair.caption] = beaten.get(pair.caption, True) and bool(right)
        return float(np.mean(list(beaten.values())))

    def among(self, chosen: Sequence[bool]) -> FoilScores:
        """Of the pairs that are chosen alone."""
        kept = np.flatnonzero(chosen)
        return FoilScores([self.pairs[place] for place in kept], self.true[kept], self.foil[kept])

    @property
    def gap(self) -> float:
        """By how much captions score above their foils on average."""
        return float(np.mean(self.true - self.foil))


def blocks(
    model: Model, split: Split, pairs: Sequence[FoilPair], progress: Progress, told: str
) -> Iterator[Block]:
    """The foils in their order, with their images; those of unreadable images are left out."""
    starts = range(0, len(pairs), PAIR_BATCH)
    for start in progress.track(starts, f"{told} ({model.spec.name})", len(starts)):
        some = pairs[start : start + PAIR_BATCH]
        found = readable_images(split, [int(split.image_of[pair.caption]) for pair in some])
        kept = [pair for pair in some if int(split.image_of[pair.caption]) in found]
        if not kept:
            continue
        row_of = {image: row for row, image in enumerate(found)}
        rows = [row_of[int(split.image_of[pair.caption])] for pair in kept]
        images = model.encode_images(pad_fragments(list(found.values())).to(model.device))
        yield Block(kept, images[torch.tensor(rows, device=model.device)])


@torch.inference_mode()
def score_foils(
    model: Model, split: Split, foils: FoilSet, progress: Progress | None = None
) -> FoilScores:
    """Each caption and each foil with its own image, by whatever matcher the model has."""
    pairs: list[FoilPair] = []
    true: list[Tensor] = []
    false: list[Tensor] = []
    with eval_mode(model):
        for block in blocks(model, split, foils.pairs, progress or Silent(), "scoring foils"):
            captions = [split.texts[pair.caption] for pair in block.pairs]
            sentences = [pair.foil for pair in block.pairs]
            pairs += block.pairs
            right, wrong = (
                _own_scores(model, block.images, said) for said in (captions, sentences)
            )
            true.append(right)
            # what the model reads alike it scores alike, to the last digit
            false.append(torch.where(_read_alike(model, captions, sentences), right, wrong))
    if not pairs:
        raise DataError(f"split '{split.name}': no image of a foil could be read")
    return FoilScores(pairs, *(torch.cat(part).double().cpu().numpy() for part in (true, false)))


def encode_sentences(model: Model, sentences: Sequence[str]) -> TextBatch:
    """Sentences as the model's ids, in their order."""
    ids = [model.text.encode(sentence) for sentence in sentences]
    return pad_texts(ids, model.text.pad).to(model.device)


def _own_scores(model: Model, images: Encoded, sentences: Sequence[str]) -> Tensor:
    """Scores [n] of image ``k`` with sentence ``k``."""
    texts = model.encode_texts(encode_sentences(model, sentences))
    return paired_scores(model.matcher, images, texts).float()


def _read_alike(model: Model, one: Sequence[str], other: Sequence[str]) -> Tensor:
    """Which sentences [n] have the same ids as their counterparts: unknown words are one."""
    pairs = zip(one, other, strict=True)
    same = [list(model.text.encode(a)) == list(model.text.encode(b)) for a, b in pairs]
    return torch.tensor(same, device=model.device)
