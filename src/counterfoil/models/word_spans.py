"""The words of a caption, where they stand in it, and which of them each token belongs to.

Words are cut alike for every model, whatever its tokens are, so that explanations compare. Words
that a model does not know are left out of a person's sentence here (`known_text`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from counterfoil.data.caption_words import CaptionWord, caption_words
from counterfoil.data.texts import HuggingFaceText, TextProcessor, WordText
from counterfoil.data.words import words
from counterfoil.errors import ConfigError, DataError

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
