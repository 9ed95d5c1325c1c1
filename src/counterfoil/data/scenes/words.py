"""Captions of scenes with the truth of every word, and what they state."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from counterfoil.data.scenes.vocabulary import (
    COLOUR_WORDS,
    NUMBERS,
    PATTERN_WORDS,
    RELATION_WORDS,
    SIZE_WORDS,
    generous_kinds,
)

_WORD = re.compile(r"[A-Za-z]+")
KIND_OF_ROLE = {
    "noun": "object",
    "colour": "attribute",
    "size": "attribute",
    "pattern": "attribute",
    "count": "count",
    "relation": "relation",
    "position": "position",
    "": "none",
}


def tokens(text: str) -> list[str]:
    """The words of a caption, in lower case and without punctuation.

    >>> tokens("A red ball, and a dog.")
    ['a', 'red', 'ball', 'and', 'a', 'dog']
    """
    return [match.lower() for match in _WORD.findall(text)]


@dataclass(frozen=True)
class Word:
    """One word of a caption and what it is about.

    ``objects`` are indices into the scene's objects; ``phrase`` is the span [start, end) of words
    it belongs to. ``role`` says what the word asserts: ``colour:0`` the colour of the first thing
    mentioned, ``relation:0:1`` how the first relates to the second, empty for function words.
    """

    text: str
    objects: tuple[int, ...]
    phrase: tuple[int, int]
    role: str = ""

    @property
    def kind(self) -> str:
        """object, attribute, count, relation, position or none."""
        return KIND_OF_ROLE[self.role.split(":")[0]]

    def as_list(self) -> list[Any]:
        """A compact form for storage."""
        return [self.text, list(self.objects), list(self.phrase), self.role]

    @classmethod
    def from_list(cls, data: Sequence[Any]) -> Word:
        text, objects, phrase, role = data
        return cls(text, tuple(objects), (phrase[0], phrase[1]), role)

    def as_dict(self) -> dict[str, Any]:
        return {
            "word": self.text,
            "kind": self.kind,
            "objects": list(self.objects),
            "phrase": list(self.phrase),
            "role": self.role,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Word:
        return cls(
            data["word"],
            tuple(data["objects"]),
            (data["phrase"][0], data["phrase"][1]),
            data["role"],
        )


@dataclass(frozen=True)
class SceneCaption:
    """A caption; ``words[i]`` is the truth of ``tokens(text)[i]``."""

    text: str
    words: tuple[Word, ...]

    def as_dict(self) -> dict[str, Any]:
        return {"text": self.text, "words": [word.as_dict() for word in self.words]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SceneCaption:
        return cls(data["text"], tuple(Word.from_dict(word) for word in data["words"]))

    def with_word(self, position: int, text: str) -> SceneCaption:
        """The caption with one word exchanged, its roles kept, punctuation and case with it."""
        match = list(_WORD.finditer(self.text))[position]
        shown = text.capitalize() if match.group()[0].isupper() else text
        words = list(self.words)
        words[position] = replace(words[position], text=text)
        changed = self.text[: match.start()] + shown + self.text[match.end() :]
        return SceneCaption(changed, tuple(words))


@dataclass
class Mention:
    """What a noun phrase claims; None where it claims nothing."""

    noun: str = ""
    kinds: frozenset[str] = frozenset()
    colour: str | None = None
    size: str | None = None
    pattern: str | None = None
    count: int | None = None
    position: str | None = None
    objects: tuple[int, ...] = ()


@dataclass
class Statement:
    """All that a caption claims: things, and relations (subject, name, object) between them."""

    mentions: dict[int, Mention] = field(default_factory=dict)
    relations: list[tuple[int, str, int]] = field(default_factory=list)


def statement_of(caption: SceneCaption) -> Statement:
    """What a caption claims, read off the roles of its words."""
    statement = Statement()
    for word in caption.words:
        if not word.role:
            continue
        role, *places = word.role.split(":")
        if role == "relation":
            subject, other = (int(place) for place in places)
            statement.relations.append((subject, RELATION_WORDS[word.text], other))
            continue
        mention = statement.mentions.setdefault(int(places[0]), Mention())
        _claim(mention, role, word)
    return statement


def _claim(mention: Mention, role: str, word: Word) -> None:
    if role == "noun":
        mention.noun, mention.kinds = word.text, generous_kinds(word.text)
        mention.objects = word.objects
    elif role == "colour":
        mention.colour = COLOUR_WORDS[word.text]
    elif role == "size":
        mention.size = SIZE_WORDS[word.text]
    elif role == "pattern":
        mention.pattern = PATTERN_WORDS[word.text]
    elif role == "count":
        mention.count = NUMBERS[word.text]
    else:
        mention.position = word.text
