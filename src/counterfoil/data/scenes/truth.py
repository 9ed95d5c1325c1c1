"""Statements of scene captions, and whether they are true for a scene (strictly or generously).

Captions must be true in the strict reading, for the objects they describe. A foil must be false in
the generous reading: no choice of objects makes it true, even for a lenient reader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any, overload

import numpy as np

from counterfoil.core.storage.reading import open_regular
from counterfoil.data.scenes.scene import SIZE, Scene, SceneObject
from counterfoil.data.scenes.vocabulary import (
    COLOR_WORDS,
    INVERSE,
    KINDS,
    NUMBERS,
    PATTERN_WORDS,
    PLURAL,
    RELATION_WORDS,
    SINGULAR,
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

NEAR = 26.0


def tokens(text: str) -> list[str]:
    """The words of a caption, in lower case and without punctuation.

    >>> tokens("A red ball, and a dog.")
    ['a', 'red', 'ball', 'and', 'a', 'dog']
    """
    return [match.lower() for match in _WORD.findall(text)]


@dataclass(frozen=True)
class Word:
    """One word of a caption and the objects it describes.

    ``objects`` are indices into the scene's objects; ``phrase`` is its span [start, end) of words.
    ``role`` is what the word asserts: ``colour:0`` the color of the first mentioned thing,
    ``relation:0:1`` the relation of the first to the second; empty for function words.
    """

    text: str
    objects: tuple[int, ...]
    phrase: tuple[int, int]
    role: str = ""

    @property
    def kind(self) -> str:
        """object, attribute, count, relation, position or none."""
        return KIND_OF_ROLE[self.role.split(":")[0]]

    @property
    def mention(self) -> int:
        """Number of the mentioned thing that the word is about; of a relation, its subject."""
        return int(self.role.split(":")[1])

    def as_list(self) -> list[Any]:
        """Compact form for storage."""
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
    """A caption; ``words[i]`` annotates ``tokens(text)[i]``."""

    text: str
    words: tuple[Word, ...]

    def as_dict(self) -> dict[str, Any]:
        return {"text": self.text, "words": [word.as_dict() for word in self.words]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SceneCaption:
        return cls(data["text"], tuple(Word.from_dict(word) for word in data["words"]))

    def with_word(self, position: int, text: str) -> SceneCaption:
        """The caption with one word exchanged; roles, punctuation and case stay."""
        match = list(_WORD.finditer(self.text))[position]
        spelling = text.capitalize() if match.group()[0].isupper() else text
        words = list(self.words)
        words[position] = replace(words[position], text=text)
        changed = self.text[: match.start()] + spelling + self.text[match.end() :]
        return SceneCaption(changed, tuple(words))


@dataclass
class Mention:
    """The claims of a noun phrase; None: no claim."""

    noun: str = ""
    kinds: frozenset[str] = frozenset()
    color: str | None = None
    size: str | None = None
    pattern: str | None = None
    count: int | None = None
    position: str | None = None
    objects: tuple[int, ...] = ()


@dataclass
class Statement:
    """The claims of a caption: mentions by number, and relations (subject, name, object)."""

    mentions: dict[int, Mention] = field(default_factory=dict)
    relations: list[tuple[int, str, int]] = field(default_factory=list)


def statement_of(caption: SceneCaption) -> Statement:
    """The claims of a caption, from the roles of its words."""
    statement = Statement()
    for word in caption.words:
        if not word.role:
            continue
        role, *numbers = word.role.split(":")
        if role == "relation":
            subject, other = map(int, numbers)
            statement.relations.append((subject, RELATION_WORDS[word.text], other))
            continue
        mention = statement.mentions.setdefault(int(numbers[0]), Mention())
        _claim(mention, role, word)
    return statement


def _claim(mention: Mention, role: str, word: Word) -> None:
    if role == "noun":
        mention.noun, mention.kinds = word.text, generous_kinds(word.text)
        mention.objects = word.objects
    elif role == "colour":
        mention.color = COLOR_WORDS[word.text]
    elif role == "size":
        mention.size = SIZE_WORDS[word.text]
    elif role == "pattern":
        mention.pattern = PATTERN_WORDS[word.text]
    elif role == "count":
        mention.count = NUMBERS[word.text]
    else:
        mention.position = word.text


def is_true(scene: Scene, statement: Statement) -> bool:
    """The strict reading: every claim is true for the annotated objects."""
    for mention in statement.mentions.values():
        if not all(_is(scene.objects[i], mention) for i in mention.objects):
            return False
    return all(
        related(scene, i, name, j)
        for subject, name, other in statement.relations
        for i in statement.mentions[subject].objects
        for j in statement.mentions[other].objects
    )


def could_be_true(scene: Scene, statement: Statement) -> bool:
    """The generous reading: the claims could be true for some choice of objects."""
    names = list(statement.mentions)
    choices = [list(_readings(scene, statement.mentions[name])) for name in names]
    for chosen in product(*choices):
        sets = dict(zip(names, chosen, strict=True))
        if all(
            any(_could_relate(scene, i, name, j) for i in sets[subject] for j in sets[other])
            for subject, name, other in statement.relations
        ):
            return True
    return False


def _readings(scene: Scene, mention: Mention) -> Iterator[tuple[int, ...]]:
    """Sets of objects that a mention could mean; counts of several objects may add up."""
    able = [i for i, obj in enumerate(scene.objects) if _could_be(obj, mention)]
    if mention.count is None or mention.count == 1:
        yield from ((i,) for i in able)
        return
    for size in range(1, len(able) + 1):
        for chosen in combinations(able, size):
            if sum(scene.objects[i].count for i in chosen) == mention.count:
                yield chosen


def _is(obj: SceneObject, mention: Mention) -> bool:
    noun = SINGULAR.get(mention.noun) or PLURAL[mention.noun]
    singular = mention.noun == noun.singular and mention.noun != noun.plural
    return (
        obj.kind in noun.kinds
        and mention.color in (None, obj.color)
        and mention.size in (None, obj.size)
        and mention.pattern in (None, obj.pattern)
        and mention.count in (None, obj.count)
        and (not singular or obj.count == 1)
        and (mention.position is None or mention.position in positions(obj))
    )


def positions(obj: SceneObject) -> list[str]:
    """Position words that are clearly true for an object."""
    x, _ = obj.center
    words = []
    if x < 0.36 * SIZE:
        words.append("left")
    if x > 0.64 * SIZE:
        words.append("right")
    if abs(x - 0.5 * SIZE) < 0.09 * SIZE:
        words.append("middle")
    words += {"front": ["foreground"], "back": ["background"], "sky": ["sky", "top"]}[obj.depth]
    if obj.depth == "front" and obj.center[1] > 0.72 * SIZE:
        words.append("bottom")
    return words


def related(scene: Scene, i: int, name: str, j: int) -> bool:
    """Whether a relation between two objects is clearly true."""
    known = {(r.subject, r.name, r.object) for r in scene.relations}
    if (i, name, j) in known or (name in INVERSE and (j, INVERSE[name], i) in known):
        return True
    if name in ("above", "below"):
        over, below = (i, j) if name == "above" else (j, i)
        return (below, "under", over) in known
    return name == "next to" and _are_near(scene.objects[i], scene.objects[j])


def _are_near(one: SceneObject, other: SceneObject) -> bool:
    gap = max(one.box[0], other.box[0]) - min(one.box[2], other.box[2])
    return one.depth == other.depth and one.depth != "sky" and 0 <= gap <= NEAR


def _could_be(obj: SceneObject, mention: Mention) -> bool:
    also = KINDS[obj.kind].also
    return (
        obj.kind in mention.kinds
        and (mention.color in (None, obj.color) or mention.color in also)
        and (mention.size in (None, obj.size) or obj.size == "medium")
        and (mention.pattern in (None, obj.pattern) or mention.pattern in also)
        and (mention.position is None or _could_be_at(obj, mention.position))
    )


def _could_be_at(obj: SceneObject, position: str) -> bool:
    x, y = obj.center[0] / SIZE, obj.center[1] / SIZE
    return {
        "left": x < 0.55,
        "right": x > 0.45,
        "middle": 0.3 < x < 0.7,
        "foreground": obj.depth == "front",
        "background": obj.depth != "front",
        "sky": obj.depth == "sky" or y < 0.5,
        "top": y < 0.55,
        "bottom": y > 0.45,
    }[position]


def _could_relate(scene: Scene, i: int, name: str, j: int) -> bool:
    if i == j:
        return False
    if related(scene, i, name, j):
        return True
    one, other = scene.objects[i], scene.objects[j]
    couple = {r.name for r in scene.relations if (r.subject, r.object) == (i, j)}
    if name == "on":
        return bool(couple & {"riding", "behind", "in front of"}) or _is_over(one, other, 12)
    if name == "above":
        return bool(couple & {"on", "riding"}) or _is_over(one, other, 4)
    if name in ("under", "below"):
        return _is_over(other, one, 4) or _could_relate(scene, j, "above", i)
    if name == "behind":
        return (one.depth != "front" and other.depth == "front") or _hides(other, one)
    if name == "in front of":
        return (other.depth != "front" and one.depth == "front") or _hides(one, other)
    if name == "left of":
        return one.center[0] < other.center[0] + 8
    if name == "right of":
        return one.center[0] > other.center[0] - 8
    return name == "next to"


def _is_over(one: SceneObject, other: SceneObject, margin: float) -> bool:
    """Whether one object is higher, and above the other or in the sky."""
    overlap = min(one.box[2], other.box[2]) - max(one.box[0], other.box[0])
    higher = one.center[1] + margin < other.center[1]
    return higher and (overlap > -4 or one.depth == "sky" != other.depth)


def _hides(one: SceneObject, other: SceneObject) -> bool:
    """Whether one object is drawn over part of the other."""
    a, b = one.box, other.box
    overlaps = a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
    return overlaps and one.layer >= other.layer


class SceneTruths(Sequence[dict[str, Any]]):
    """Item ``i`` is {"scene": …, "words": one list per caption} of image ``i``."""

    def __init__(self, path: Path, starts: Sequence[int]) -> None:
        self.path = path
        self._starts = np.asarray(starts, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        with open_regular(self.path) as file:
            file.seek(int(self._starts[index]))
            item = json.loads(file.readline())
        words = [[Word.from_list(word).as_dict() for word in words] for words in item["words"]]
        return {"scene": item["scene"], "words": words}


def scene_of(extras: dict[str, Any]) -> Scene:
    """The scene graph from an item of a split's ``extras``."""
    return Scene.from_dict(extras["scene"])


def captions_of(extras: dict[str, Any], texts: Sequence[str]) -> list[SceneCaption]:
    """Captions with annotated words, from ``extras`` and the split's captions."""
    return [
        SceneCaption(text, tuple(Word.from_dict(word) for word in words))
        for text, words in zip(texts, extras["words"], strict=True)
    ]
