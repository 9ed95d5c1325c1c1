"""Tokenizers: captions to token ids (word vocabulary or Hugging Face), and tokens to words.

Tokenizing is slow and deterministic, so it is separate from word noise, which differs per epoch.
All models share one split of captions into words, so that their explanations can be compared.
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
from counterfoil.data.text.words import CaptionWord, caption_words, without_punctuation, words


class WordNoise:
    """Caption augmentation of VSE∞: masks, replaces or deletes a word with probability ``rate``.

    Of these words, 50 % become the mask token, 10 % a random word, and 40 % are deleted.
    """

    def __init__(self, rate: float, rng: np.random.Generator) -> None:
        self.rate = rate
        self.rng = rng

    def actions(self, count: int) -> list[str]:
        """For each of ``count`` words: keep, mask, replace or delete. At least one word stays."""
        rate, masked, replaced = self.rate, self.rate * 0.5, self.rate * 0.6
        actions = ["keep"] * count
        # a loop is faster than arrays for the dozen words of a caption
        for index, draw in enumerate(self.rng.random(count).tolist()):
            if draw < rate:
                rest = "replace" if draw < replaced else "delete"
                actions[index] = "mask" if draw < masked else rest
        if count and actions.count("delete") == count:
            actions[0] = "keep"
        return actions


@dataclass(frozen=True, slots=True)
class Tokens:
    """A tokenized caption without noise, in compact form, as training caches many.

    ``words`` is the number of words. ``word_of`` is the word index of each token (None: a special
    token), or None if the tokenizer does not know it. ``ends`` are the flattened edges of the word
    graph.
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
        """The ids after noise, never empty; `LinkedIds` if there is a word graph.

        All tokens of a word get the same action; special tokens stay. A masked token becomes
        ``mask`` (None: unchanged), a replaced one a random id below ``size``.
        """
        ids: list[int] = self.ids.tolist()
        word_of: Sequence[int | None] = self.word_of or ()
        if noise is not None:
            noisy, noisy_words = self._apply(noise, mask, size)
            ids, word_of = (noisy, noisy_words) if noisy else (ids, word_of)
        if self.ends is None:
            return ids
        edges = list(zip(self.ends[::2], self.ends[1::2], strict=True))
        return LinkedIds.of_words(ids, word_of, edges)

    def _apply(
        self, noise: WordNoise, mask: int | None, size: int
    ) -> tuple[list[int], list[int | None]]:
        if self.word_of is None:
            raise ConfigError(
                "data.word_noise: this tokenizer does not say which tokens make up a word: "
                "set it to 0"
            )
        actions = noise.actions(self.words)
        ids: list[int] = []
        word_of: list[int | None] = []
        for token, word in zip(self.ids, self.word_of, strict=True):
            action = "keep" if word is None else actions[word]
            if action == "delete":
                continue
            if action == "mask" and mask is not None:
                token = mask
            elif action == "replace":
                token = int(noise.rng.integers(size))
            ids.append(token)
            word_of.append(word)
        return ids, word_of


class TextProcessor(Protocol):
    """A tokenizer, as text encoders use it.

    With a ``parser``, ids are `LinkedIds` with the edges of the word graph.
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
        """The deterministic first step of `encode`."""
        ...

    def with_noise(self, tokens: Tokens, noise: WordNoise | None = None) -> list[int]:
        """The second step of `encode`."""
        ...

    def pieces(self, caption: str) -> list[str]:
        """The token of each id of `encode` without noise."""
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
    """The word of each token of ``count`` words; one object for all captions of a length."""
    return (None, *range(count), None)


class HuggingFaceText:
    """Any tokenizer of `transformers`, from a local folder or the Hugging Face Hub."""

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
                    "this model needs a word graph, but this tokenizer does not say which tokens "
                    "make up a word: use a fast one"
                )
            spans = [coded.word_to_chars(word) for word in range(count)]
            edges = self.parser.edges([caption[span.start : span.end].lower() for span in spans])
        return Tokens.of(coded["input_ids"], word_of, count, edges)

    def with_noise(self, tokens: Tokens, noise: WordNoise | None = None) -> list[int]:
        return tokens.with_noise(noise, self._mask, self._size)

    @cached_property
    def _mask(self) -> int | None:
        """Id that replaces masked tokens: <mask>, else <unk>; None if there is neither."""
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
    """A copy of the processor that uses ``parser``."""
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


@dataclass(frozen=True)
class KnownText:
    """A sentence as a model reads it.

    In ``text``, spaces replace every word that the model does not know, so that the offsets of the
    other words stay. ``unknown`` are these words.
    """

    text: str
    unknown: tuple[CaptionWord, ...] = ()

    @property
    def unknown_words(self) -> list[str]:
        """The unknown words, each once, without punctuation marks."""
        return list(dict.fromkeys(word.text for word in without_punctuation(self.unknown)))

    @property
    def is_readable(self) -> bool:
        """Whether a known word is left to score."""
        if not self.unknown:
            return True
        return any(not word.is_punctuation for word in caption_words(self.text))


def known_text(processor: TextProcessor, sentence: str) -> KnownText:
    """A sentence without the words outside the model's vocabulary.

    Training and `evaluate` read such a word as ``<unk>``, as the papers do. That token changes the
    score, so it is left out of sentences that a user enters.
    """
    text, unknown = sentence, list[CaptionWord]()
    # tokens of quotation marks depend on the text before them, so check the rest again
    while new := _unknown_words(processor, text):
        unknown += new
        for word in new:
            text = text[: word.start] + " " * (word.end - word.start) + text[word.end :]
    return KnownText(text, tuple(sorted(unknown, key=lambda word: word.start)))


def require_known(processor: TextProcessor, sentence: str) -> KnownText:
    """`known_text` of a sentence; `DataError` if none of its words is known."""
    known = known_text(processor, sentence)
    if not known.is_readable:
        names = ", ".join(word.text for word in known.unknown)
        raise DataError(
            f"'{sentence}': the model knows no word of this sentence (unknown: {names}); "
            "use words of its training captions"
        )
    return known


def unknown_note(unknown: Sequence[str]) -> str:
    """Message about unknown words; empty if there are none."""
    return f"unknown words, left out: {', '.join(unknown)}" if unknown else ""


def _unknown_words(processor: TextProcessor, text: str) -> list[CaptionWord]:
    if isinstance(processor, WordText):
        known, tokens = processor.vocabulary.index, words(text)
        if all(token in known for token in tokens):  # the offsets take longest
            return []
        pairs = zip(caption_words(text), tokens, strict=True)
        return [word for word, token in pairs if token not in known]
    if not isinstance(processor, HuggingFaceText) or not processor.tokenizer.is_fast:
        return []
    tokenizer = processor.tokenizer
    ids, unk = processor.encode(text), tokenizer.unk_token_id
    if unk is None or unk not in ids:
        return []
    all_words = caption_words(text)
    owners = words_of_tokens(processor, text, all_words)
    unknown = {owner for token, owner in zip(ids, owners, strict=True) if token == unk}
    return [word for index, word in enumerate(all_words) if index in unknown]


def without(caption: str, word: CaptionWord) -> str:
    """The caption with one word left out.

    >>> without("a red  dog.", CaptionWord("red", 2, 5))
    'a dog.'
    """
    return " ".join(f"{caption[: word.start]} {caption[word.end :]}".split())


def words_of_tokens(
    text: TextProcessor, caption: str, word_list: Sequence[CaptionWord]
) -> list[int | None]:
    """Index into ``word_list`` of the word of each token of ``caption``; None for special tokens.

    A token that spans several words belongs to the first. Words beyond the tokenizer's maximum
    length have no token.
    """
    if not isinstance(text, HuggingFaceText):
        return [None, *range(len(word_list)), None]
    if not text.tokenizer.is_fast:
        raise ConfigError(
            "this tokenizer does not give the offsets of its tokens in a caption: use a fast one"
        )
    coded = text.tokenizer(
        caption, truncation=True, max_length=text.max_length, return_offsets_mapping=True
    )
    starts = [word.start for word in word_list]
    owners: list[int | None] = []
    for (start, end), group in zip(coded["offset_mapping"], coded.word_ids(), strict=True):
        # Tokens of byte-level tokenizers include the space before a word.
        first = next((i for i in range(start, end) if not caption[i].isspace()), None)
        owner = None if first is None or group is None else bisect_right(starts, first) - 1
        owners.append(owner)
    return owners
