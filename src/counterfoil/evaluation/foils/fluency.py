"""Perplexity of sentences under a causal or masked language model.

A masked model gives a pseudo-perplexity: each token is predicted from all others. The head of a run
also sees the image, so fluent but false sentences have a higher perplexity there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from counterfoil.core.errors import CheckpointError, ConfigError, MissingExtraError
from counterfoil.core.progress import Progress, Silent
from counterfoil.data.batches.collate import TextBatch
from counterfoil.data.pairs import Split
from counterfoil.encoders import Encoded
from counterfoil.evaluation.foils.scores import blocks, encode_sentences
from counterfoil.evaluation.foils.sets import FoilPair
from counterfoil.features.pretrained import refusals
from counterfoil.foils.generation import MaskTokens
from counterfoil.models.foil_generator import PairReader, cross_encoder_of
from counterfoil.models.model import Model


class Fluency(Protocol):
    """A language model that scores sentences, with or without their images."""

    name: str

    def perplexity(self, split: Split, pairs: Sequence[FoilPair]) -> float:
        """Perplexity over all tokens of the sentences ``pair.foil``."""
        ...


class RunFluency:
    """The masked language head of a run, given the image."""

    def __init__(
        self, model: Model, name: str = "its own head", progress: Progress | None = None
    ) -> None:
        cross_encoder_of(model, ["mlm"])
        self.model, self.name, self.progress = model.eval(), name, progress or Silent()
        self.tokens = MaskTokens.of(model.text)

    @torch.inference_mode()
    def perplexity(self, split: Split, pairs: Sequence[FoilPair]) -> float:
        total = count = 0.0
        for block in blocks(self.model, split, pairs, self.progress, "perplexity"):
            texts = encode_sentences(self.model, [pair.foil for pair in block.pairs])
            losses = self._losses(block.images, texts)
            total, count = total + float(losses.sum()), count + len(losses)
        return math.exp(total / count) if count else math.nan

    def _losses(self, images: Encoded, texts: TextBatch) -> Tensor:
        """Losses [n] of all ordinary tokens, with one token masked at a time."""
        ordinary = torch.from_numpy(self.tokens.ordinary).to(texts.ids.device)
        rows, positions = (torch.isin(texts.ids, ordinary) & texts.mask).nonzero(as_tuple=True)
        index = torch.arange(len(rows), device=rows.device)
        ids = texts.ids[rows]
        ids[index, positions] = self.tokens.mask
        masked = torch.zeros_like(ids, dtype=torch.bool)
        masked[index, positions] = True
        logits = PairReader(self.model, images, texts.mask).fill(rows, ids, masked).float()
        log_probs = logits[:, ordinary].log_softmax(-1)
        targets = torch.searchsorted(ordinary, texts.ids[rows, positions])
        return -log_probs.gather(1, targets[:, None])[:, 0]


class TransformersFluency:
    """A causal or masked language model of `transformers` from a folder, without images."""

    def __init__(self, folder: str, device: torch.device | None = None) -> None:
        self.name = folder
        self.masked, self.model, self.tokenizer = _load(folder)
        self.device = device or torch.device("cpu")
        self.model.to(self.device).eval()

    @torch.inference_mode()
    def perplexity(self, split: Split, pairs: Sequence[FoilPair]) -> float:
        losses = [self._losses(pair.foil) for pair in pairs]
        every = torch.cat(losses) if losses else torch.zeros(0)
        return math.exp(float(every.double().mean())) if len(every) else math.nan

    def _losses(self, sentence: str) -> Tensor:
        ids = torch.tensor(self.tokenizer(sentence)["input_ids"], device=self.device)
        return self._masked_losses(ids) if self.masked else self._causal_losses(ids)

    def _causal_losses(self, ids: Tensor) -> Tensor:
        """Losses of all tokens but the first; a missing BOS token is added."""
        begin = self.tokenizer.bos_token_id
        if begin is not None and (not len(ids) or ids[0] != begin):
            ids = torch.cat([ids.new_tensor([begin]), ids])
        logits = self.model(ids[None]).logits[0, :-1]
        return torch.nn.functional.cross_entropy(logits.float(), ids[1:], reduction="none")

    def _masked_losses(self, ids: Tensor) -> Tensor:
        """Losses of all tokens that are not special, with one token masked at a time."""
        special = ids.new_tensor(self.tokenizer.all_special_ids)
        positions = (~torch.isin(ids, special)).nonzero()[:, 0]
        index = torch.arange(len(positions), device=self.device)
        inputs = ids.repeat(len(positions), 1)
        inputs[index, positions] = self.tokenizer.mask_token_id
        logits = self.model(inputs).logits[index, positions]
        return torch.nn.functional.cross_entropy(logits.float(), ids[positions], reduction="none")


def _load(folder: str) -> tuple[bool, Any, Any]:
    """Whether the model is a masked one, the model and its tokenizer."""
    try:
        import transformers
    except ImportError:
        raise MissingExtraError("transformers", "hf", "a language model") from None
    try:
        with refusals(folder, "language model", "name a local folder"):
            config = transformers.AutoConfig.from_pretrained(folder)
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            masked = any("MaskedLM" in name for name in config.architectures or ())
            auto = (
                transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
            )
            return masked, auto.from_pretrained(folder), tokenizer
    except CheckpointError as error:
        raise ConfigError(
            f"{folder}: not a causal or masked language model of transformers ({error})"
        ) from None
