"""The words of a caption, where they stand in it, and which of them each token belongs to.

Words are cut alike for every model, whatever its tokens are, so that explanations compare.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from counterfoil.data.caption_words import CaptionWord, caption_words
from counterfoil.data.texts import HuggingFaceText, TextProcessor
from counterfoil.errors import ConfigError

__all__ = ["CaptionWord", "caption_words", "without", "words_of_tokens"]


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
