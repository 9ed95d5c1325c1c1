"""Captions to token ids, by a word vocabulary or a Hugging Face tokenizer, and tokens to words.

Cutting a caption takes longest and gives the same each time, so it is apart from the noise that
training puts on words, which differs from epoch to epoch. Words are cut alike for every model,
whatever its tokens are, so that explanations compare.
"""

from __future__ import annotations

import copy
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from counterfoil.core.errors import CheckpointError, ConfigError, DataError, MissingExtraError
from counterfoil.data.text.dependencies import Edge, LinkedIds, Parser
from counterfoil.data.text.vocabulary import END, MASK, START, Vocabulary
from counterfoil.data.text.words import CaptionWord, caption_words, words


class WordNoise:
    """Caption augmentation of VSE∞: each word is, with ``rate``, masked, replaced or deleted.

    Of the touched words 50 % become the mask token, 10 % a random word and 40 % vanish.
    """

    def __init__(self, rate: float, rng: np.random.Generator) -> None:
        self.rate = rate
        self.rng = rng

    def actions(self, count: int) -> list[str]:
        """For each of ``count`` words: keep, mask, replace or delete. At least one word stays."""
        rate, masked, replaced = self.rate, self.rate * 0.5, self.rate * 0.6
        actions = ["keep"] * count
        # for the dozen words of a caption, a loop is faster than arrays
        for place, draw in enumerate(self.rng.random(count).tolist()):
            if draw < rate:
                late = "replace" if draw < replaced else "delete"
                actions[place] = "mask" if draw < masked else late
        if count and actions.count("delete") == count:
            actions[0] = "keep"
        return actions


@dataclass(frozen=True, slots=True)
class Tokens:
    """A caption before anything is done to it; small, as training remembers many.

    ``word_of`` is which of its ``words`` is behind each id, None for a special token; None at all
    where a tokenizer cannot say. ``ends`` are those of the word graph's edges, one edge after the
    other.
    """

    ids: array[int]
    word_of: tuple[int | None, ...] | None
    words: int
    ends: array[int] | None

    @classmethod
    def of(
        cls,
        ids: Iterable[int],
        word_of: tuple[int | None, ...] | None,
        words: int,
        edges: Sequence[Edge] | None,
    ) -> Tokens:
        ends = None if edges is None else array("i", chain.from_iterable(edges))
        return cls(array("i", ids), word_of, words, ends)

    def with_noise(self, noise: WordNoise | None, mask: int | None, size: int) -> list[int]:
        """The ids that noise leaves, never none; with their edges where the words have some.

        Whole words share one fate; special tokens are never touched. A masked token becomes
        ``mask`` (None: it stays), a replaced one any of ``size``.
        """
        ids: list[int] = self.ids.tolist()
        word_of: Sequence[int | None] = self.word_of or ()
        if noise is not None:
            left, words_left = self._after(noise, mask, size)
            ids, word_of = (left, words_left) if left else (ids, word_of)
        if self.ends is None:
            return ids
        edges = list(zip(self.ends[::2], self.ends[1::2], strict=True))
        return LinkedIds.of_words(ids, word_of, edges)

    def _after(
        self, noise: WordNoise, mask: int | None, size: int
    ) -> tuple[list[int], list[int | None]]:
        if self.word_of is None:
            raise ConfigError(
                "data.word_noise: this tokenizer does not say which tokens make up a word: "
                "set it to 0"
            )
        actions = noise.actions(self.words)
        left: list[int] = []
        words_left: list[int | None] = []
        for token, word in zip(self.ids, self.word_of, strict=True):
            action = "keep" if word is None else actions[word]
            if action == "delete":
                continue
            if action == "mask" and mask is not None:
                token = mask
            elif action == "replace":
                token = int(noise.rng.integers(size))
            left.append(token)
            words_left.append(word)
        return left, words_left


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

    def tokenize(self, caption: str) -> Tokens:
        """The first half of `encode`, which is the same each time."""
        ...

    def with_noise(self, tokens: Tokens, noise: WordNoise | None = None) -> list[int]:
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
        return self.with_noise(self.tokenize(caption), noise)

    def tokenize(self, caption: str) -> Tokens:
        tokens = words(caption)
        edges = None if self.parser is None else self.parser.edges(tokens)
        ids = self.vocabulary.encode_words(tokens)
        return Tokens.of(ids, _between_ends(len(tokens)), len(tokens), edges)

    def with_noise(self, tokens: Tokens, noise: WordNoise | None = None) -> list[int]:
        return tokens.with_noise(noise, self.vocabulary.index[MASK], len(self.vocabulary))

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
        return self.with_noise(self.tokenize(caption), noise)

    def tokenize(self, caption: str) -> Tokens:
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
        return Tokens.of(coded["input_ids"], word_of, count, edges)

    def with_noise(self, tokens: Tokens, noise: WordNoise | None = None) -> list[int]:
        return tokens.with_noise(noise, self._mask, self._size)

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


__all__ = [
    "CaptionWord",
    "KnownText",
    "caption_words",
    "known_text",
    "require_known",
    "unknown_note",
    "without",
    "words_of_tokens",
]


@dataclass(frozen=True)
class KnownText:
    """A sentence as a model reads it.

    In ``text`` every word that the model does not know is blanks, so that the other words keep
    their places. ``unknown`` are these words.
    """

    text: str
    unknown: tuple[CaptionWord, ...] = ()

    @property
    def unknown_words(self) -> list[str]:
        """The words that were left out, each once; punctuation marks are not named."""
        return list(dict.fromkeys(w.text for w in self.unknown if not w.is_punctuation))

    @property
    def is_readable(self) -> bool:
        """Whether something is left to score."""
        if not self.unknown:
            return True
        return any(not word.is_punctuation for word in caption_words(self.text))


def known_text(processor: TextProcessor, sentence: str) -> KnownText:
    """A sentence without the words outside the model's vocabulary.

    Training and `evaluate` read such a word as ``<unk>``, as the papers do. That token has an
    effect of its own, so it would raise or lower the score of a person's sentence.
    """
    text, unknown = sentence, list[CaptionWord]()
    # a quotation mark is read by what stands before it, so what is left is looked at again
    while found := _unknown_words(processor, text):
        unknown += found
        for word in found:
            text = text[: word.start] + " " * (word.end - word.start) + text[word.end :]
    return KnownText(text, tuple(sorted(unknown, key=lambda word: word.start)))


def require_known(processor: TextProcessor, sentence: str) -> KnownText:
    """`known_text` of a sentence with at least one known word; any other is refused."""
    read = known_text(processor, sentence)
    if not read.is_readable:
        names = ", ".join(word.text for word in read.unknown)
        raise DataError(
            f"'{sentence}': the model knows no word of this sentence (unknown: {names}); "
            "use words of its training captions"
        )
    return read


def unknown_note(unknown: Sequence[str]) -> str:
    """What is printed about unknown words; empty if there are none."""
    return f"unknown words, left out: {', '.join(unknown)}" if unknown else ""


def _unknown_words(processor: TextProcessor, text: str) -> list[CaptionWord]:
    if isinstance(processor, WordText):
        known = processor.vocabulary.index
        pairs = zip(caption_words(text), words(text), strict=True)
        return [word for word, token in pairs if token not in known]
    if not isinstance(processor, HuggingFaceText) or not processor.tokenizer.is_fast:
        return []
    tokenizer = processor.tokenizer
    ids, unk = processor.encode(text), tokenizer.unk_token_id
    if unk is None or unk not in ids:
        return []
    found = caption_words(text)
    owners = words_of_tokens(processor, text, found)
    lost = {owner for token, owner in zip(ids, owners, strict=True) if token == unk}
    return [word for place, word in enumerate(found) if place in lost]


def without(caption: str, word: CaptionWord) -> str:
    """The caption with one word left out.

    >>> without("a red  dog.", CaptionWord("red", 2, 5))
    'a dog.'
    """
    return " ".join(f"{caption[: word.start]} {caption[word.end :]}".split())


def words_of_tokens(
    text: TextProcessor, caption: str, found: Sequence[CaptionWord]
) -> list[int | None]:
    """Index into ``found`` of the word behind each token of ``caption``; None for special ones.

    A token that reaches over several words belongs to the first. Words beyond what the tokenizer
    keeps have no token.
    """
    if not isinstance(text, HuggingFaceText):
        return [None, *range(len(found)), None]
    if not text.tokenizer.is_fast:
        raise ConfigError(
            "this tokenizer does not say where its pieces stand in a caption: use a fast one"
        )
    coded = text.tokenizer(
        caption, truncation=True, max_length=text.max_length, return_offsets_mapping=True
    )
    starts = [word.start for word in found]
    owners: list[int | None] = []
    for (start, end), group in zip(coded["offset_mapping"], coded.word_ids(), strict=True):
        # Byte-level tokenizers count the space before a word as part of it.
        letters = (place for place in range(start, end) if not caption[place].isspace())
        first = next(letters, None)
        owner = None if first is None or group is None else bisect_right(starts, first) - 1
        owners.append(owner)
    return owners
