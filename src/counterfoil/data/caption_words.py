"""The words of a caption and where they stand in it."""

from __future__ import annotations

from dataclasses import dataclass

from counterfoil.data.words import words


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
