"""Word tokenizer for captions in Penn Treebank style, with character offsets and Porter stems.

The public vocabularies were built with a Treebank tokenizer. Captions must be split the same way to
match their ids: contractions apart (``do n't``), hyphens kept, punctuation apart.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import snowballstemmer

from counterfoil.core.errors import ConfigError

MOST_WORDS, MOST_LETTERS = 200, 4000
"""Limits of a sentence that a user enters; the time to explain or correct it grows with both."""

STOP_WORDS = frozenset(
    word
    for line in (Path(__file__).parent / "stop_words.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
    for word in line.split()
)
"""English function words, which say nothing about what an image shows."""


def is_content_word(word: str) -> bool:
    """Whether a word says something about an image: neither a function word nor punctuation.

    >>> [is_content_word(word) for word in ("Dog", "The", "n’t", "two", ".")]
    [True, False, False, True, False]
    """
    word = word.lower().replace("’", "'")
    return word not in STOP_WORDS and any(map(str.isalnum, word))


_PORTER = snowballstemmer.stemmer("porter")

_CONTRACTION = re.compile(r"(?<=\w)(n't|'(?:s|re|ve|ll|d|m))\b")
_TOKEN = re.compile(
    r"""
      \.{2,} | --+                          # ellipsis, dash
    | ``|''                                 # quotation marks, rewritten by `words`
    | n't\b | '(?:s|re|ve|ll|d|m)\b         # the second half of a contraction
    | (?:[^\W\d_]\.){2,}                    # u.s.
    | \w+(?:(?:[-/'.&]|[,:](?=\d))\w+)*     # words, t-shirt, and/or, 1,000, 5:30
    | [^\w\s]                               # any other sign
    """,
    re.VERBOSE,
)


def words(caption: str) -> list[str]:
    """Tokens of a caption.

    >>> words("A man's dog doesn't chase the 3 T-shirts.")
    ['a', 'man', "'s", 'dog', 'does', "n't", 'chase', 'the', '3', 't-shirts', '.']
    """
    text = caption.lower().replace("’", "'").replace("‘", "'")
    text = re.sub(r'(^|[\s(\[{<])"', r"\1`` ", text).replace('"', " '' ")
    return _TOKEN.findall(_CONTRACTION.sub(r" \1", text))


@lru_cache(maxsize=65536)
def stem(word: str) -> str:
    """The stem of a lower-case word by Porter's algorithm (1980); up to two letters stay unchanged.

    >>> [stem(word) for word in ("riding", "rides", "ponies", "happily", "is")]
    ['ride', 'ride', 'poni', 'happili', 'is']
    """
    return word if len(word) <= 2 else str(_PORTER.stemWord(word))


@dataclass(frozen=True)
class CaptionWord:
    """A word as written, ``caption[start:end]``; punctuation marks are words too."""

    text: str
    start: int
    end: int

    @property
    def is_punctuation(self) -> bool:
        return not any(character.isalnum() for character in self.text)

    @property
    def is_symbol(self) -> bool:
        """Whether it is an emoji or another pictograph, which `is_punctuation` is true for, too."""
        return any(
            unicodedata.category(character) == "So" and character > LAST_LETTERLIKE
            for character in self.text
        )


def caption_words(caption: str) -> list[CaptionWord]:
    """Words of a caption with their offsets, one for each token of `words`.

    >>> [(word.text, word.start) for word in caption_words('The "dog" isn\\'t red.')]
    [('The', 0), ('"', 4), ('dog', 5), ('"', 8), ('is', 10), ("n't", 12), ('red', 16), ('.', 19)]
    """
    # Some letters become two in lower case: ``origin`` maps lower-case offsets to the original.
    origin = [index for index, letter in enumerate(caption) for _ in letter.lower()]
    origin.append(len(caption))
    lowered = caption.lower()
    result = []
    cursor = 0
    for word in words(caption):
        while lowered[cursor].isspace():
            cursor += 1
        length = 1 if lowered[cursor] == '"' else len(word)
        start, cursor = origin[cursor], cursor + length
        end = max(origin[cursor], start + 1)
        result.append(CaptionWord(caption[start:end], start, end))
    return result


LAST_LETTERLIKE = "\u218f"
"""Symbols up to here, such as °, © and ™, are no pictographs."""

_EMOJI_PARTS = frozenset({"So", "Sk", "Mn", "Me", "Cf"})
"""Unicode categories: pictographs, skin tones, variation selectors, keycaps, joiners."""


def join_emoji(words: Iterable[CaptionWord]) -> list[CaptionWord]:
    """The words, with the characters of adjacent emoji, each of which is a token, as one word."""
    joined: list[CaptionWord] = []
    for word in words:
        last = joined[-1] if joined else None
        is_part = all(unicodedata.category(character) in _EMOJI_PARTS for character in word.text)
        if last is not None and last.is_symbol and last.end == word.start and is_part:
            joined[-1] = CaptionWord(last.text + word.text, last.start, word.end)
        else:
            joined.append(word)
    return joined


def without_punctuation(words: Iterable[CaptionWord]) -> list[CaptionWord]:
    """Words and emoji, as a reader would count them.

    >>> [word.text for word in without_punctuation(caption_words("A dog, \U0001f44d\U0001f3fd!"))]
    ['A', 'dog', '👍🏽']
    """
    return [word for word in join_emoji(words) if word.is_symbol or not word.is_punctuation]


def check_sentence(text: str, purpose: str) -> None:
    """Refuse an empty or too long sentence before a model is loaded; ``purpose`` is a verb.

    Explaining and correcting run the model once or more per word.
    """
    if not text.strip():
        raise ConfigError(f"nothing to {purpose}: the sentence is empty")
    if len(text) > MOST_LETTERS:
        size, limit = f"{len(text):,} letters", f"{MOST_LETTERS:,}"
    elif (count := len(words(text))) > MOST_WORDS:
        size, limit = f"{count:,} words", str(MOST_WORDS)
    else:
        return
    raise ConfigError(f"the sentence has {size}, at most {limit} are read: shorten it")
