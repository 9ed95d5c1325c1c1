"""Scores of true captions and of their foils with their images, block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from counterfoil.core.errors import DataError
from counterfoil.core.progress import Progress, Silent
from counterfoil.core.tensors.modes import eval_mode
from counterfoil.data.batches.collate import TextBatch, pad_fragments, pad_texts
from counterfoil.data.pairs import Split
from counterfoil.encoders import Encoded
from counterfoil.evaluation.foils.sets import FoilPair, FoilSet, readable_images
from counterfoil.evaluation.ranks import Values
from counterfoil.matchers.base import paired_scores
from counterfoil.models.model import Model

PAIR_BATCH = 128


@dataclass(frozen=True)
class Block:
    """Foils [n] and their encoded images [n]."""

    pairs: list[FoilPair]
    images: Encoded


@dataclass(frozen=True)
class FoilScores:
    """Scores [n] of the captions of ``pairs`` and of their foils, for all readable images.

    ``elsewhere`` is the score of the caption minus that of the foil with the image of another
    pair; NaN without one.
    """

    pairs: list[FoilPair]
    true: Values
    foil: Values
    elsewhere: Values

    @property
    def accuracy(self) -> float:
        """Share of foils that score below their caption; a tie counts against the model."""
        return float(np.mean(self.true > self.foil))

    @property
    def caption_accuracy(self) -> float:
        """Share of captions that score above every one of their foils."""
        wins: dict[int, bool] = {}
        for pair, right in zip(self.pairs, self.true > self.foil, strict=True):
            wins[pair.caption] = wins.get(pair.caption, True) and bool(right)
        return float(np.mean(list(wins.values())))

    def among(self, chosen: Sequence[bool]) -> FoilScores:
        """The scores of a subset; ``chosen`` is a mask."""
        rows = np.flatnonzero(chosen)
        return FoilScores(
            [self.pairs[row] for row in rows],
            self.true[rows],
            self.foil[rows],
            self.elsewhere[rows],
        )

    @property
    def other_image(self) -> float | None:
        """Share of foils that score below their caption with another image, a tie as a half.

        What training with foils adds to it is a preference for sentences like the captions,
        whatever the image shows.
        """
        known = self.elsewhere[~np.isnan(self.elsewhere)]
        return float(np.mean((np.sign(known) + 1) / 2)) if len(known) else None

    @property
    def own_image(self) -> float | None:
        """Share of foils that their own image rejects more clearly than another, a tie as a half.

        A preference for a sentence, whatever the image shows, is the same with both images and
        cancels.
        """
        known = ~np.isnan(self.elsewhere)
        gains = (self.true - self.foil - self.elsewhere)[known]
        return float(np.mean((np.sign(gains) + 1) / 2)) if len(gains) else None

    @property
    def gap(self) -> float:
        """Mean score of captions minus that of their foils."""
        return float(np.mean(self.true - self.foil))


def blocks(
    model: Model, split: Split, pairs: Sequence[FoilPair], progress: Progress, task: str
) -> Iterator[Block]:
    """Blocks of foils in their order, with their images; unreadable images are skipped."""
    model.fragments_of(split)
    starts = range(0, len(pairs), PAIR_BATCH)
    for start in progress.track(starts, f"{task} ({model.spec.name})", len(starts)):
        chunk = pairs[start : start + PAIR_BATCH]
        fragments = readable_images(split, [int(split.image_of[pair.caption]) for pair in chunk])
        readable = [pair for pair in chunk if int(split.image_of[pair.caption]) in fragments]
        if not readable:
            continue
        row_of = {image: row for row, image in enumerate(fragments)}
        rows = [row_of[int(split.image_of[pair.caption])] for pair in readable]
        images = model.encode_images(pad_fragments(list(fragments.values())).to(model.device))
        yield Block(readable, images[torch.tensor(rows, device=model.device)])


@torch.inference_mode()
def score_foils(
    model: Model, split: Split, foils: FoilSet, progress: Progress | None = None
) -> FoilScores:
    """Score each caption and each foil with its own image, and with another one."""
    pairs: list[FoilPair] = []
    true: list[Tensor] = []
    false: list[Tensor] = []
    elsewhere: list[Tensor] = []
    with eval_mode(model):
        for block in blocks(model, split, foils.pairs, progress or Silent(), "scoring foils"):
            captions = [split.texts[pair.caption] for pair in block.pairs]
            sentences = [pair.foil for pair in block.pairs]
            pairs += block.pairs
            same = _same_ids(model, captions, sentences)
            others, differs = _other_images(split, block)
            right, wrong = (
                _paired_scores(model, (block.images, block.images[others]), texts)
                for texts in (captions, sentences)
            )
            # The same token ids must give exactly the same score, whatever the batch.
            own, other = (torch.where(same, r, w) for r, w in zip(right, wrong, strict=True))
            true.append(right[0])
            false.append(own)
            elsewhere.append((right[1] - other).masked_fill(~differs, torch.nan))
    if not pairs:
        raise DataError(f"split '{split.name}': no image of a foil could be read")
    scores = (torch.cat(part).double().cpu().numpy() for part in (true, false, elsewhere))
    return FoilScores(pairs, *scores)


def _other_images(split: Split, block: Block) -> tuple[Tensor, Tensor]:
    """For each pair of a block, the row of another pair's image, and whether that differs."""
    images = torch.tensor([int(split.image_of[pair.caption]) for pair in block.pairs])
    others = torch.arange(len(images)).roll(len(images) // 2)
    device = block.images.mask.device
    return others.to(device), (images != images[others]).to(device)


def encode_sentences(model: Model, sentences: Sequence[str]) -> TextBatch:
    """Token ids of sentences as a padded batch, in their order."""
    ids = [model.text.encode(sentence) for sentence in sentences]
    return pad_texts(ids, model.text.pad).to(model.device)


def _paired_scores(
    model: Model, images: Sequence[Encoded], sentences: Sequence[str]
) -> list[Tensor]:
    """For each of ``images``, the scores [n] of its image ``k`` with sentence ``k``."""
    texts = model.encode_texts(encode_sentences(model, sentences))
    return [paired_scores(model.matcher, one, texts).float() for one in images]


def _same_ids(model: Model, one: Sequence[str], other: Sequence[str]) -> Tensor:
    """Mask [n] of sentences with the same token ids; all unknown words share one id."""
    pairs = zip(one, other, strict=True)
    same = [list(model.text.encode(a)) == list(model.text.encode(b)) for a, b in pairs]
    return torch.tensor(same, device=model.device)
