"""Captions to words: lower-case tokens in the manner of the Penn Treebank, and their places.

The public vocabularies were built with a Treebank tokeniser, so words must be cut the same way for
their ids to be of use: contractions apart (``do n't``), hyphens kept, punctuation apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from counterfoil.core.errors import ConfigError

MOST_WORDS, MOST_LETTERS = 200, 4000
"""Of a sentence that a person asks about; a caption has a dozen words, and time grows with them."""

STOP_WORDS = frozenset(
    word
    for line in (Path(__file__).parent / "stop_words.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
    for word in line.split()
)
"""English words that say how a caption is built rather than what it shows."""

_CONTRACTION = re.compile(r"(?<=\w)(n't|'(?:s|re|ve|ll|d|m))\b")
_TOKEN = re.compile(
    r"""
      \.{2,} | --+                          # ellipsis, dash
    | ``|''                                 # quotes, once turned
    | n't\b | '(?:s|re|ve|ll|d|m)\b         # the second half of a contraction
    | (?:[^\W\d_]\.){2,}                    # u.s.
    | \w+(?:(?:[-/'.&]|[,:](?=\d))\w+)*     # words, t-shirt, and/or, 1,000, 5:30
    | [^\w\s]                               # any other sign by itself
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


@dataclass(frozen=True)
class CaptionWord:
    """A word as written, ``caption[start:end]``; punctuation marks are words too."""

    text: str
    start: int
    end: int

    @property
    def is_punctuation(self) -> bool:
        return not any(character.isalnum() for character in self.text)


def caption_words(caption: str) -> list[CaptionWord]:
    """Words of a caption with their places; as many as `words` gives.

    >>> [(word.text, word.start) for word in caption_words('The "dog" isn\\'t red.')]
    [('The', 0), ('"', 4), ('dog', 5), ('"', 8), ('is', 10), ("n't", 12), ('red', 16), ('.', 19)]
    """
    # A few letters become two in lower case: ``origin`` leads back to the caption as written.
    origin = [place for place, letter in enumerate(caption) for _ in letter.lower()]
    origin.append(len(caption))
    lowered = caption.lower()
    found = []
    cursor = 0
    for word in words(caption):
        while lowered[cursor].isspace():
            cursor += 1
        length = 1 if lowered[cursor] == '"' else len(word)
        start, cursor = origin[cursor], cursor + length
        end = max(origin[cursor], start + 1)
        found.append(CaptionWord(caption[start:end], start, end))
    return found


def check_sentence(text: str, purpose: str) -> None:
    """Refuse a sentence before a model is loaded for it; ``purpose`` is a verb: explain, correct.

    A model that leaves out or exchanges one word at a time works for hours on thousands of them.
    """

    if not text.strip():
        raise ConfigError(f"nothing to {purpose}: the sentence is empty")
    if len(text) > MOST_LETTERS:
        found, most = f"{len(text):,} letters", f"{MOST_LETTERS:,}"
    elif (count := len(words(text))) > MOST_WORDS:
        found, most = f"{count:,} words", str(MOST_WORDS)
    else:
        return
    raise ConfigError(f"the sentence has {found}, at most {most} are read: shorten it")
