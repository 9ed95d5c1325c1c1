"""Captions to token ids: by a word vocabulary, or by any Hugging Face tokenizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from counterfoil.data.parsing import LinkedIds, Parser
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
    """What a text encoder needs to know of its tokens.

    With a ``parser``, the ids are `LinkedIds`, which know the edges of the word graph.
    """

    kind: str
    parser: Parser | None

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

    def __init__(self, vocabulary: Vocabulary, parser: Parser | None = None) -> None:
        self.vocabulary, self.parser = vocabulary, parser

    @property
    def pad(self) -> int:
        return self.vocabulary.pad

    def __len__(self) -> int:
        return len(self.vocabulary)

    def encode(self, caption: str, noise: WordNoise | None = None) -> list[int]:
        tokens = words(caption)
        fates = noise.fates(len(tokens)) if noise is not None else ["keep"] * len(tokens)
        index, ids = self.vocabulary.index, [self.vocabulary.index[START]]
        word_of: list[int | None] = [None]
        for place, (word, fate) in enumerate(zip(tokens, fates, strict=True)):
            if fate == "keep":
                ids.append(index.get(word, index[UNK]))
            elif fate == "mask":
                ids.append(index[MASK])
            elif fate == "replace" and noise is not None:
                ids.append(int(noise.rng.integers(len(index))))
            word_of += [] if fate == "delete" else [place]
        ids.append(index[END])
        if self.parser is None:
            return ids
        return LinkedIds.of_words(ids, [*word_of, None], self.parser.edges(tokens))

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

    def __init__(
        self, tokenizer: Any, max_length: int | None = None, parser: Parser | None = None
    ) -> None:
        self.tokenizer, self.parser = tokenizer, parser
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
        coded = self.tokenizer(
            caption, truncation=True, max_length=self.max_length, return_token_type_ids=False
        )
        ids: list[int] = coded["input_ids"]
        if noise is None and self.parser is None:
            return ids
        word_of: list[int | None] = coded.word_ids()
        count = 1 + max((word for word in word_of if word is not None), default=-1)
        if noise is not None:
            disturbed, words_left = self._disturb(ids, word_of, noise.fates(count), noise.rng)
            ids, word_of = (disturbed, words_left) if disturbed else (ids, word_of)
        if self.parser is None:
            return ids
        spans = [coded.word_to_chars(word) for word in range(count)]
        edges = self.parser.edges([caption[span.start : span.end].lower() for span in spans])
        return LinkedIds.of_words(ids, word_of, edges)

    def _disturb(
        self,
        ids: list[int],
        word_of: list[int | None],
        fates: list[str],
        rng: np.random.Generator,
    ) -> tuple[list[int], list[int | None]]:
        """Whole words share one fate; special tokens are never touched."""
        out: list[int] = []
        words_left: list[int | None] = []
        for token, word in zip(ids, word_of, strict=True):
            fate = "keep" if word is None else fates[word]
            if fate == "keep":
                out.append(token)
            elif fate == "mask":
                out.append(
                    int(self.tokenizer.mask_token_id or self.tokenizer.unk_token_id or token)
                )
            elif fate == "replace":
                out.append(int(rng.integers(len(self.tokenizer))))
            words_left += [] if fate == "delete" else [word]
        return out, words_left

    def pieces(self, caption: str) -> list[str]:
        pieces: list[str] = self.tokenizer.convert_ids_to_tokens(self.encode(caption))
        return pieces

    def save(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder / self.folder)

    @classmethod
    def load(cls, folder: Path) -> HuggingFaceText:
        return cls.from_pretrained(str(folder / cls.folder))


def with_parser(text: TextProcessor, parser: Parser) -> TextProcessor:
    """The same processor, its ids linked as ``parser`` sees the words."""
    linked = copy.copy(text)
    linked.parser = parser
    return linked


def load_text_processor(kind: str, folder: Path) -> TextProcessor:
    """The processor saved with a model."""
    if kind == WordText.kind:
        return WordText.load(folder)
    if kind == HuggingFaceText.kind:
        return HuggingFaceText.load(folder)
    raise CheckpointError(f"{folder}: unknown kind of text processor '{kind}'")
