"""Captions to token ids: by a word vocabulary, or by any Hugging Face tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from counterfoil.data.vocabulary import END, MASK, START, UNK, Vocabulary
from counterfoil.data.words import words
from counterfoil.errors import CheckpointError, MissingExtraError


class WordNoise:
    """Caption augmentation of VSE∞: each word is, with ``rate``, masked, replaced or deleted.

    Of the touched words 50 % become the mask token, 10 % a random word and 40 % vanish.
    """

    def __init__(self, rate: float, rng: np.random.Generator) -> None:
        self.rate = rate
        self.rng = rng

    def fates(self, count: int) -> list[str]:
        """For each of ``count`` words: keep, mask, replace or delete. At least one word stays."""
        draw = self.rng.random(count)
        fate = np.where(draw < self.rate * 0.5, "mask", "keep").astype(object)
        fate[(draw >= self.rate * 0.5) & (draw < self.rate * 0.6)] = "replace"
        fate[(draw >= self.rate * 0.6) & (draw < self.rate)] = "delete"
        if count and all(f == "delete" for f in fate):
            fate[0] = "keep"
        return [str(f) for f in fate]


class TextProcessor(Protocol):
    """What a text encoder needs to know of its tokens."""

    kind: str

    @property
    def pad(self) -> int: ...

    def __len__(self) -> int:
        """Number of distinct token ids."""
        ...

    def encode(self, caption: str, noise: WordNoise | None = None) -> list[int]:
        """Ids of a caption, special tokens included; never empty."""
        ...

    def pieces(self, caption: str) -> list[str]:
        """The token behind each id of `encode` without noise."""
        ...

    def save(self, folder: Path) -> None: ...


class WordText:
    """Words of a `Vocabulary` between ``<start>`` and ``<end>``."""

    kind = "words"
    file = "vocabulary.json"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    @property
    def pad(self) -> int:
        return self.vocabulary.pad

    def __len__(self) -> int:
        return len(self.vocabulary)

    def encode(self, caption: str, noise: WordNoise | None = None) -> list[int]:
        tokens = words(caption)
        if noise is None:
            return self.vocabulary.encode_words(tokens)
        index, ids = self.vocabulary.index, [self.vocabulary.index[START]]
        for word, fate in zip(tokens, noise.fates(len(tokens)), strict=True):
            if fate == "keep":
                ids.append(index.get(word, index[UNK]))
            elif fate == "mask":
                ids.append(index[MASK])
            elif fate == "replace":
                ids.append(int(noise.rng.integers(len(index))))
        return [*ids, index[END]]

    def pieces(self, caption: str) -> list[str]:
        return [START, *words(caption), END]

    def save(self, folder: Path) -> None:
        self.vocabulary.save(folder / self.file)

    @classmethod
    def load(cls, folder: Path) -> WordText:
        return cls(Vocabulary.load(folder / cls.file))


class HuggingFaceText:
    """Any tokenizer of `transformers`, from a local folder or, where there is a network, a hub."""

    kind = "huggingface"
    folder = "tokenizer"

    def __init__(self, tokenizer: Any, max_length: int | None = None) -> None:
        self.tokenizer = tokenizer
        limit = int(tokenizer.model_max_length)
        self.max_length = min(max_length or limit, limit if limit < 100_000 else 512)

    @classmethod
    def from_pretrained(cls, name: str) -> HuggingFaceText:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise MissingExtraError("transformers", "hf", "a Hugging Face tokenizer") from None
        try:
            return cls(AutoTokenizer.from_pretrained(name, use_fast=True))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"no tokenizer could be loaded from '{name}': {error}") from None

    @property
    def pad(self) -> int:
        return int(self.tokenizer.pad_token_id or 0)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def encode(self, caption: str, noise: WordNoise | None = None) -> list[int]:
        ids: list[int] = self.tokenizer(
            caption, truncation=True, max_length=self.max_length, return_token_type_ids=False
        )["input_ids"]
        return ids if noise is None else self._disturb(caption, noise) or ids

    def _disturb(self, caption: str, noise: WordNoise) -> list[int]:
        """Whole words share one fate; special tokens are never touched."""
        coded = self.tokenizer(caption, truncation=True, max_length=self.max_length)
        word_of, ids = coded.word_ids(), coded["input_ids"]
        count = 1 + max((word for word in word_of if word is not None), default=-1)
        fates = noise.fates(count)
        mask = self.tokenizer.mask_token_id
        mask = int(self.tokenizer.unk_token_id if mask is None else mask)
        out: list[int] = []
        for token, word in zip(ids, word_of, strict=True):
            fate = "keep" if word is None else fates[word]
            if fate == "keep":
                out.append(token)
            elif fate == "mask":
                out.append(
                    int(self.tokenizer.mask_token_id or self.tokenizer.unk_token_id or token)
                )
            elif fate == "replace":
                out.append(int(noise.rng.integers(len(self.tokenizer))))
        return out

    def pieces(self, caption: str) -> list[str]:
        pieces: list[str] = self.tokenizer.convert_ids_to_tokens(self.encode(caption))
        return pieces

    def save(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder / self.folder)

    @classmethod
    def load(cls, folder: Path) -> HuggingFaceText:
        return cls.from_pretrained(str(folder / cls.folder))


def load_text_processor(kind: str, folder: Path) -> TextProcessor:
    """The processor saved with a model."""
    if kind == WordText.kind:
        return WordText.load(folder)
    if kind == HuggingFaceText.kind:
        return HuggingFaceText.load(folder)
    raise CheckpointError(f"{folder}: unknown kind of text processor '{kind}'")
