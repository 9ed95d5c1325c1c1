"""Foil generation with a cross-encoder: it fills masks, ranks the results and spells them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from counterfoil.core.errors import ConfigError
from counterfoil.data.batches.collate import ImageBatch, TextBatch, pad_texts
from counterfoil.data.batches.dataset import Once
from counterfoil.data.pairs import Split
from counterfoil.data.text.tokenizers import (
    HuggingFaceText,
    TextProcessor,
    WordText,
    words_of_tokens,
)
from counterfoil.data.text.words import caption_words
from counterfoil.encoders import Encoded
from counterfoil.foils.generation import (
    RATE,
    Filler,
    Foils,
    MaskedCaptions,
    MaskTokens,
    Positions,
    Scorer,
    graph_units,
    hardest_foils,
    mask_captions,
    own_tokens,
    refill,
    sampling_numbers,
    sentence_rate,
    token_units,
)
from counterfoil.foils.rules import in_case_of
from counterfoil.foils.spacy_graph import create_extractor
from counterfoil.matchers.base import paired_scores
from counterfoil.matchers.cross_encoder import CrossEncoder
from counterfoil.models.model import Model
from counterfoil.objectives.foils import anchor_rows, pair_images
from counterfoil.objectives.services import (
    BatchServices,
    Generated,
    GeneratorOptions,
    MaskedBatch,
    MaskShare,
    MaskUnit,
)

BLOCK = 4096
"""Sentences per forward pass."""


class Masker:
    """Draws masks over captions, per unit of their scene graph or per token."""

    def __init__(
        self, text: TextProcessor, unit: MaskUnit, extractor: str, share: MaskShare = "units"
    ) -> None:
        self.text, self.tokens, self.share = text, MaskTokens.of(text), share
        self.extractor = create_extractor(extractor) if unit == "graph" else None

    def units(self, caption: str) -> list[Positions]:
        """Token indices that are masked together."""
        word_of = self._words(caption)
        if self.extractor is None:
            return token_units(word_of)
        return graph_units(self.extractor.extract(caption), word_of)

    def rate(self, caption: str, units: Sequence[Positions]) -> float:
        """Rate at which units are chosen, so that the wanted share of words is masked."""
        if self.share == "units" or not units:
            return RATE
        return sentence_rate(units, len(token_units(self._words(caption))))

    def _words(self, caption: str) -> Sequence[int | None]:
        return words_of_tokens(self.text, caption, caption_words(caption))

    def mask(
        self, captions: Sequence[str], ids: Tensor, versions: int, rng: np.random.Generator
    ) -> MaskedCaptions:
        """Masked versions of captions; ``ids`` [B, W] are their own."""
        units = [self.units(caption) for caption in captions]
        rates = [self.rate(text, places) for text, places in zip(captions, units, strict=True)]
        return mask_captions(ids, units, versions, self.tokens, [rng] * len(units), rates)


class PairReader:
    """A model that reads sentences [n, W] with the images of captions [n]."""

    def __init__(self, model: Model, images: Encoded, lengths: Tensor) -> None:
        self.model, self.images, self.lengths = model, images, lengths

    def fill(self, rows: Tensor, ids: Tensor, masked: Tensor) -> Tensor:
        """A `Filler`: logits of the masked tokens by the head ``mlm``."""
        matcher = cross_encoder_of(self.model, ["mlm"])
        logits = []
        for at in torch.arange(len(rows), device=rows.device).split(BLOCK):
            states = matcher.states(self.images[rows[at]], self._texts(rows[at], ids[at])).words
            logits.append(matcher.heads["mlm"](states[masked[at]], word_table(self.model)))
        return torch.cat(logits)

    def score(self, rows: Tensor, ids: Tensor) -> Tensor:
        """A `Scorer`."""
        return torch.cat(
            [
                paired_scores(
                    self.model.matcher, self.images[rows[at]], self._texts(rows[at], ids[at])
                )
                for at in torch.arange(len(rows), device=rows.device).split(BLOCK)
            ]
        )

    def _texts(self, rows: Tensor, ids: Tensor) -> Encoded:
        return self.model.encode_texts(TextBatch(ids, self.lengths[rows]))


class FoilMaker:
    """Foils for the captions of training batches (`objectives.services.Generator`).

    Captions are read from the split, without augmentation. If a ``generator`` is given, it fills
    the masks, frozen. The model in training always selects the hardest foils, of those that the
    ``judge`` does not score as high as the caption.
    """

    def __init__(
        self,
        split: Split,
        model: Model,
        options: GeneratorOptions,
        seed: int,
        generator: Model | None = None,
        judge: Model | None = None,
    ) -> None:
        if min(options.masks, options.samples, options.kept) < 1:
            raise ConfigError("foils: masks, samples and kept must all be at least 1")
        if options.anchors < 0:
            raise ConfigError(f"foils: anchors must be 0 (all) or more, got {options.anchors}")
        cross_encoder_of(model)
        if generator is not None:
            cross_encoder_of(generator, ["mlm"])
            generator.eval().requires_grad_(False)
        self.split, self.model, self.options, self.seed = split, model, options, seed
        self.generator = generator
        self.judge = None if judge is None else judge.eval().requires_grad_(False)
        self.masker = Masker(model.text, options.unit, options.extractor, options.share)
        # captions repeat in every epoch, and tokenizing them takes longer than a step
        self.ids_of = Once(self._ids_of)
        self.units_of = Once(self._units_of)
        self.rate_of = Once(self._rate_of)
        self.tokens_of = Once(self._tokens_of)

    def _ids_of(self, caption: int) -> list[int]:
        return self.masker.text.encode(self.split.texts[caption])

    def _units_of(self, caption: int) -> list[Positions]:
        return self.masker.units(self.split.texts[caption])

    def _rate_of(self, caption: int) -> float:
        return self.masker.rate(self.split.texts[caption], self.units_of(caption))

    def _tokens_of(self, image: int) -> list[int]:
        """The tokens of an image's captions."""
        encoded = (self.masker.text.encode(caption) for caption in self.split.captions[image])
        return sorted({token for ids in encoded for token in ids})

    def mask(self, services: BatchServices, step: int) -> MaskedBatch:
        """Masked versions of the captions of a batch, reproducible per step of a run."""
        rows = anchor_rows(services.batch, self.options.anchors)
        captions, masked, _ = self._masked(services, rows, step)
        return MaskedBatch(rows, captions, masked.ids, masked.labels)

    def __call__(self, services: BatchServices, step: int) -> Generated:
        batch, rows = services.batch, anchor_rows(services.batch, self.options.anchors)
        captions, masked, numbers = self._masked(services, rows, step)
        own = own_tokens(map(self.tokens_of, batch.owners[rows].tolist()), captions.ids.device)
        images = pair_images(batch)[rows]
        with services.inference():
            foils = self._foils(batch.images, images, captions, masked, own, numbers)
        return Generated(
            rows, captions, masked.ids, masked.labels, foils.ids, foils.labels, foils.real
        )

    def _masked(
        self, services: BatchServices, rows: Tensor, step: int
    ) -> tuple[TextBatch, MaskedCaptions, Tensor]:
        """The captions ``rows`` of a batch, their masked versions, and numbers to refill these.

        A caption has a generator of its own, so that no other caption of the batch, and no division
        of the batch among processes, changes what is drawn for it.
        """
        batch, device = services.batch, services.batch.caption_ids.device
        indices = batch.caption_ids[rows].tolist()
        rngs = [np.random.default_rng([self.seed, step, index]) for index in indices]
        captions = pad_texts([*map(self.ids_of, indices)], self.masker.text.pad)
        units = [*map(self.units_of, indices)]
        rates = None if self.options.share == "units" else [*map(self.rate_of, indices)]
        tokens, versions = self.masker.tokens, self.options.masks
        masked = mask_captions(captions.ids, units, versions, tokens, rngs, rates)
        numbers = sampling_numbers(masked, self.options.samples, rngs)
        return captions.to(device), masked.to(device), numbers

    def _foils(
        self,
        images: ImageBatch,
        rows: Tensor,
        captions: TextBatch,
        masked: MaskedCaptions,
        own: Tensor,
        numbers: Tensor,
    ) -> Foils:
        def reader(model: Model) -> PairReader:
            return PairReader(model, model.encode_images(images)[rows], captions.mask)

        scorer = reader(self.model)
        filler = scorer if self.generator is None else reader(self.generator)
        judge = None if self.judge is None else reader(self.judge).score
        return write_foils(
            captions.ids,
            masked,
            self.masker.tokens,
            own,
            filler.fill,
            scorer.score,
            self.options,
            numbers,
            judge,
        )


def write_foils(
    captions: Tensor,
    masked: MaskedCaptions,
    tokens: MaskTokens,
    own: Tensor,
    fill: Filler,
    score: Scorer,
    options: GeneratorOptions,
    numbers: Tensor | None = None,
    judge: Scorer | None = None,
) -> Foils:
    """Refill masked captions, and select the hardest that are no false negatives.

    ``numbers`` as in `refill`, ``judge`` as in `hardest_foils`.
    """
    ordinary = torch.from_numpy(tokens.ordinary).to(captions.device)
    candidates = refill(masked, fill, ordinary, options.samples, options.temperature, numbers)
    return hardest_foils(captions, masked, candidates, own, score, options.kept, judge)


def cross_encoder_of(model: Model, heads: Sequence[str] = ()) -> CrossEncoder:
    """The cross-encoder of a model, checked to have the given heads."""
    matcher = model.matcher
    if not isinstance(matcher, CrossEncoder):
        raise ConfigError(
            f"the model '{model.spec.name}' encodes words and regions separately, so it cannot "
            "fill masks given an image: that takes uniter-small, uniter-base or uniter-large, "
            "trained with model.name=uniter-small, say"
        )
    missing = [head for head in heads if head not in matcher.heads]
    if missing:
        wanted = dict.fromkeys([*(h for h in matcher.heads if h != "rank"), *heads])
        raise ConfigError(
            f"this cross-encoder lacks the heads {', '.join(missing)}: set "
            f"model.matcher.extras=[{','.join(wanted)}]"
        )
    return matcher


def word_table(model: Model) -> Tensor:
    """Word embeddings [V, D], which the language heads of a cross-encoder use as output weights."""
    table: Tensor = model.text_encoder.word_table.weight
    return table


@dataclass(frozen=True)
class SpeltFoil:
    """A foil as text, and the indices of the caption's words that it changes."""

    text: str
    positions: tuple[int, ...]


def spell_foil(
    text: TextProcessor, caption: str, true: Sequence[int], foil: Sequence[int]
) -> SpeltFoil | None:
    """The caption with the words replaced whose tokens differ in the foil.

    The rest stays as written, unknown words included. None if the result is not tokenized as the
    foil (such as a word piece alone), or if its number of words differs from the caption's.
    """
    words = caption_words(caption)
    word_of = words_of_tokens(text, caption, words)
    pairs = zip(word_of, true, foil, strict=True)
    changed = {word for word, old, new in pairs if old != new}
    if not changed or None in changed:
        return None
    positions = sorted(word for word in changed if word is not None)
    tokens = list(zip(foil, word_of, strict=True))
    spelt = {at: _spell(text, [t for t, word in tokens if word == at]) for at in positions}
    for cased in (True, False):
        sentence = caption
        for at in reversed(positions):
            span = words[at]
            word = in_case_of(span.text, spelt[at]) if cased else spelt[at]
            sentence = _joined(sentence[: span.start], word, sentence[span.end :])
        if list(text.encode(sentence)) == list(foil) and len(caption_words(sentence)) == len(words):
            return SpeltFoil(sentence, tuple(positions))
    return None


def _joined(before: str, word: str, after: str) -> str:
    """A word between two parts, with spaces where it would merge with letters."""
    left = " " if before[-1:].isalnum() and word[:1].isalnum() else ""
    right = " " if word[-1:].isalnum() and after[:1].isalnum() else ""
    return f"{before}{left}{word}{right}{after}"


def _spell(text: TextProcessor, ids: Sequence[int]) -> str:
    if isinstance(text, WordText):
        return text.vocabulary.entries[ids[0]]
    if not isinstance(text, HuggingFaceText):
        raise ConfigError(f"foils: cannot decode tokens of a '{text.kind}' text processor")
    pieces: list[str] = text.tokenizer.convert_ids_to_tokens(list(ids))
    spelt: str = text.tokenizer.convert_tokens_to_string(pieces)
    return spelt.strip()
