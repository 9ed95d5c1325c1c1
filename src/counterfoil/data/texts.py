"""Captions to token ids: by a word vocabulary, or by any Hugging Face tokenizer."""

from __future__ import annotations

import copy
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

from counterfoil.data.parsing import Parser
from counterfoil.data.tokenised import Tokenised, WordNoise
from counterfoil.data.vocabulary import END, MASK, START, Vocabulary
from counterfoil.data.words import words
from counterfoil.errors import CheckpointError, ConfigError, MissingExtraError


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

    def tokenised(self, caption: str) -> Tokenised:
        """The first half of `encode`, which is the same each time."""
        ...

    def disturbed(self, tokens: Tokenised, noise: WordNoise | None = None) -> list[int]:
        """The second half of `encode`."""
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
        return self.disturbed(self.tokenised(caption), noise)

    def tokenised(self, caption: str) -> Tokenised:
        tokens = words(caption)
        edges = None if self.parser is None else self.parser.edges(tokens)
        ids = self.vocabulary.encode_words(tokens)
        return Tokenised.of(ids, _between_ends(len(tokens)), len(tokens), edges)

    def disturbed(self, tokens: Tokenised, noise: WordNoise | None = None) -> list[int]:
        return tokens.disturbed(noise, self.vocabulary.index[MASK], len(self.vocabulary))

    def pieces(self, caption: str) -> list[str]:
        return [START, *words(caption), END]

    def save(self, folder: Path) -> None:
        self.vocabulary.save(folder / self.file)

    @classmethod
    def load(cls, folder: Path) -> WordText:
        return cls(Vocabulary.load(folder / cls.file))


@lru_cache(maxsize=64)
def _between_ends(count: int) -> tuple[int | None, ...]:
    """The word behind each token of so many words; the same object for all captions of a length."""
    return (None, *range(count), None)


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
        return self.disturbed(self.tokenised(caption), noise)

    def tokenised(self, caption: str) -> Tokenised:
        coded = self.tokenizer(
            caption, truncation=True, max_length=self.max_length, return_token_type_ids=False
        )
        word_of = tuple(coded.word_ids()) if coded.is_fast else None
        count = 1 + max((word for word in word_of or () if word is not None), default=-1)
        edges = None
        if self.parser is not None:
            if word_of is None:
                raise ConfigError(
                    "this model reads which words belong together, but this tokenizer does not say "
                    "which tokens are of one word: use a fast one"
                )
            spans = [coded.word_to_chars(word) for word in range(count)]
            edges = self.parser.edges([caption[span.start : span.end].lower() for span in spans])
        return Tokenised.of(coded["input_ids"], word_of, count, edges)

    def disturbed(self, tokens: Tokenised, noise: WordNoise | None = None) -> list[int]:
        return tokens.disturbed(noise, self._mask, self._size)

    @cached_property
    def _mask(self) -> int | None:
        """What stands for a masked token; None: itself, where there is no such token."""
        return self.tokenizer.mask_token_id or self.tokenizer.unk_token_id or None

    @cached_property
    def _size(self) -> int:
        return len(self.tokenizer)

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
