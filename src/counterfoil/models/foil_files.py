"""Foils written by a trained cross-encoder, for given captions or a whole split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.progress import Progress, Silent
from counterfoil.data.batches.collate import TextBatch, pad_fragments, pad_texts
from counterfoil.data.fragments import Fragments
from counterfoil.data.pairs import Split
from counterfoil.foils.files import (
    Caption,
    FoilCounts,
    FoilWriter,
    StoredFoil,
    batch_generator,
    batches_of,
    captions_of,
)
from counterfoil.foils.generation import Foils, own_tokens
from counterfoil.foils.spacy_graph import create_extractor
from counterfoil.models.foil_generator import (
    Masker,
    PairReader,
    cross_encoder_of,
    spell_foil,
    write_foils,
)
from counterfoil.models.model import Model
from counterfoil.objectives.services import GeneratorOptions

OVERSAMPLING = 2
"""Foils selected per wanted foil, because some cannot be spelt."""


@dataclass(frozen=True)
class WrittenFoil:
    """A foil: its text, the indices of changed words, their kind, and its score."""

    text: str
    positions: tuple[int, ...]
    kind: str
    score: float


class FoilAuthor:
    """Writes foils of captions with a trained cross-encoder: mask, refill, filter, rank."""

    def __init__(self, model: Model, options: GeneratorOptions) -> None:
        if min(options.masks, options.samples, options.kept) < 1:
            raise ConfigError("foils: masks, samples and kept must all be at least 1")
        cross_encoder_of(model, ["mlm"])
        self.model, self.options = model.eval(), options
        self.masker = Masker(model.text, options.unit, options.extractor)
        self.extractor = create_extractor(options.extractor)
        self.unspelt = 0

    @torch.inference_mode()
    def write(
        self,
        images: Sequence[Fragments],
        captions: Sequence[str],
        own: Sequence[Sequence[str]],
        rng: np.random.Generator,
    ) -> list[list[WrittenFoil]]:
        """Foils of each caption given its image, best first; deterministic for a given ``rng``.

        ``own`` are the known captions of each image: a foil whose new tokens all occur in them
        counts as true and is dropped.
        """
        text, device = self.model.text, self.model.device
        texts = pad_texts([text.encode(caption) for caption in captions], text.pad).to(device)
        masked = self.masker.mask(captions, texts.ids, self.options.masks, rng)
        known = own_tokens((chain.from_iterable(map(text.encode, true)) for true in own), device)
        encoded = self.model.encode_images(pad_fragments(images).to(device))
        reader = PairReader(self.model, encoded, texts.mask)
        wanted = replace(self.options, kept=OVERSAMPLING * self.options.kept)
        with _seeded(int(rng.integers(1 << 62)), device):
            foils = write_foils(
                texts.ids, masked, self.masker.tokens, known, reader.fill, reader.score, wanted
            )
        return [self._spelt(row, caption, texts, foils) for row, caption in enumerate(captions)]

    def _spelt(self, row: int, caption: str, texts: TextBatch, foils: Foils) -> list[WrittenFoil]:
        """The foils of one caption as text, up to the wanted number."""
        length = int(texts.mask[row].sum())
        true, real = texts.ids[row, :length].tolist(), foils.real[row]
        graph, written = self.extractor.extract(caption), dict[str, WrittenFoil]()
        scores: Tensor = foils.scores[row][real]
        for ids, score in zip(
            foils.ids[row, :, :length][real].tolist(), scores.tolist(), strict=True
        ):
            spelt = spell_foil(self.model.text, caption, true, ids)
            if spelt is None:
                self.unspelt += 1
                continue
            kind = graph.kind_of(spelt.positions)
            foil = WrittenFoil(spelt.text, spelt.positions, kind, round(score, 6))
            written.setdefault(spelt.text, foil)
            if len(written) == self.options.kept:
                break
        return list(written.values())


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch inside the block; restore its random state afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def write_model_foils(
    model: Model,
    split: Split,
    path: Path,
    options: GeneratorOptions,
    *,
    weights: str,
    seed: int = 0,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> FoilCounts:
    """Write model-made foils of every caption of a split; the same call resumes after a kill.

    ``weights`` identifies the model, so that a file is not resumed with another one. Unreadable
    images have no foils and are retried by a later call.
    """
    model.fragments_of(split)  # fail before a file is created
    author, progress = FoilAuthor(model, options), progress or Silent()
    settings = {
        "maker": "model",
        "weights": weights,
        "options": vars(options),
        "seed": seed,
        "batch_size": batch_size,
        "captions": split.digest,
    }
    batches = batches_of(captions_of(split), batch_size)
    unreadable: dict[str, None] = {}
    with FoilWriter(path, settings) as writer:
        left = [
            (number, batch)
            for number, batch in enumerate(batches)
            if not all(writer.is_done(one.image, one.text) for one in batch)
        ]
        done = len(batches) - len(left)
        label = f"writing foils ({split.name})"
        for number, batch in progress.track(left, label, len(batches), done):
            rng = batch_generator(seed, number)
            for one, foils in _of_batch(author, split, batch, rng, unreadable):
                writer.add(one.image, one.text, foils)
        return FoilCounts.of(writer, list(unreadable), author.unspelt)


def _of_batch(
    author: FoilAuthor,
    split: Split,
    batch: Sequence[Caption],
    rng: np.random.Generator,
    unreadable: dict[str, None],
) -> Iterator[tuple[Caption, list[StoredFoil]]]:
    """The captions of a batch with readable images, with their foils."""
    table = split.require_fragments()
    images, captions = [], []
    for one in batch:
        try:
            images.append(table.read(one.row))
            captions.append(one)
        except DataError as error:
            unreadable[f"image {one.image}: {error}"] = None
    if not captions:
        return
    own = [split.captions[one.row] for one in captions]
    written = author.write(images, [one.text for one in captions], own, rng)
    for one, foils in zip(captions, written, strict=True):
        yield (
            one,
            [
                StoredFoil(one.image, one.text, x.text, x.positions, x.kind, x.score, one.id)
                for x in foils
            ],
        )
