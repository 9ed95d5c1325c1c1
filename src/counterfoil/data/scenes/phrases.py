"""Noun phrases and sentences under construction, every word with its truth."""

from __future__ import annotations

import random

from counterfoil.data.scenes.scene import Scene
from counterfoil.data.scenes.vocabulary import (
    COLOUR_WORDS,
    COUNT_WORDS,
    KINDS,
    NOUNS,
    PATTERN_WORDS,
    SIZE_WORDS,
)
from counterfoil.data.scenes.words import SceneCaption, Word

# People seldom say that something has no pattern.
_PLAIN_WORD_SHARE = 0.2


class Draft:
    """A caption in the making; phrases are added from left to right."""

    def __init__(self, scene: Scene, rng: random.Random, detail: float) -> None:
        self.scene, self.rng, self.detail = scene, rng, detail
        self.words: list[Word] = []
        self.commas: set[int] = set()
        self.mentions = 0
        self.bare = False

    def say(self, text: str, objects: tuple[int, ...] = ()) -> None:
        """Function words."""
        self._add([(word, "") for word in text.split()], objects)

    def comma(self) -> None:
        self.commas.add(len(self.words) - 1)

    def _add(self, pieces: list[tuple[str, str]], objects: tuple[int, ...]) -> None:
        start = len(self.words)
        span = (start, start + len(pieces))
        self.words.extend(Word(text, objects, span, role) for text, role in pieces)

    def relate(self, text: str, role: str, objects: tuple[int, ...]) -> None:
        """Words of a relation; the one that ends in ``*`` carries the role."""
        self._add(
            [(word.rstrip("*"), role if word.endswith("*") else "") for word in text.split()],
            objects,
        )

    def place(self, index: int, mention: int, position: str) -> None:
        """ "on the left", "in the sky"."""
        lead = "on" if position in ("left", "right") else "in"
        lead = "at" if position in ("top", "bottom") else lead
        self._add([(lead, ""), ("the", ""), (position, f"position:{mention}")], (index,))

    def thing(self, index: int, wanted: frozenset[str] = frozenset()) -> int:
        """A noun phrase about an object; returns the number of the mention.

        Attributes are named at random, more of them the higher `detail`; those in ``wanted``
        always.
        """
        obj, rng, mention = self.scene.objects[index], self.rng, self.mentions
        self.mentions += 1
        told = {what for what in ("colour", "size", "pattern") if rng.random() < self.detail}
        told |= wanted
        if obj.size == "medium":
            told.discard("size")
        plain = obj.pattern == "plain" and rng.random() > _PLAIN_WORD_SHARE
        if plain or not KINDS[obj.kind].patterned:
            told.discard("pattern")
        noun, generic = self._noun(index, exact="kind" in wanted)
        before = [("size", _word(SIZE_WORDS, obj.size, rng))] if "size" in told else []
        look = []
        if "pattern" in told:
            look.append(("pattern", _word(PATTERN_WORDS, obj.pattern, rng)))
        if "colour" in told:
            look.append(("colour", _word(COLOUR_WORDS, obj.colour, rng)))
        person = obj.size == "medium"
        adjectives = before if person else before + look
        pieces = [(word, f"{role}:{mention}") for role, word in adjectives]
        pieces.append((noun, f"noun:{mention}"))
        self._add(self._article(index, pieces, mention) + pieces, (index,))
        if person and look:
            self._clothes(index, mention, look, generic)
        return mention

    def _article(
        self, index: int, pieces: list[tuple[str, str]], mention: int
    ) -> list[tuple[str, str]]:
        count = self.scene.objects[index].count
        if count > 1:
            return [(COUNT_WORDS[count], f"count:{mention}")]
        return [] if self.bare else [(_a(pieces[0][0]), "")]

    def _noun(self, index: int, exact: bool) -> tuple[str, bool]:
        obj, rng = self.scene.objects[index], self.rng
        able = [noun for noun in NOUNS if obj.kind in noun.kinds]
        generic = [noun for noun in able if noun.generic]
        if exact or not generic or rng.random() > 0.12:
            named = [noun for noun in able if not noun.generic]
            noun = named[0] if rng.random() < 0.65 else rng.choice(named)
        else:
            noun = rng.choice(generic)
        return (noun.plural if obj.count > 1 else noun.singular), noun.generic

    def _clothes(
        self, index: int, mention: int, look: list[tuple[str, str]], generic: bool
    ) -> None:
        """ "in red", "in a striped shirt", "wearing dotted dresses"."""
        obj, rng = self.scene.objects[index], self.rng
        pieces = [(word, f"{role}:{mention}") for role, word in look]
        if len(look) == 1 and look[0][0] == "colour" and rng.random() < 0.45:
            self._add([("in", ""), *pieces], (index,))
            return
        verb = rng.choice(("in", "wearing"))
        if generic:
            self._add([(verb, ""), *pieces, ("clothes", "")], (index,))
            return
        garment = "shirt" if obj.kind in ("man", "boy") else "dress"
        if obj.count > 1:
            plural = {"shirt": "shirts", "dress": "dresses"}[garment]
            self._add([(verb, ""), *pieces, (plural, "")], (index,))
        else:
            self._add([(verb, ""), (_a(pieces[0][0]), ""), *pieces, (garment, "")], (index,))

    def caption(self, style: str) -> SceneCaption:
        """The finished text: ``plain`` lower case, or a ``sentence`` with capital and full stop."""
        parts = [word.text + ("," if i in self.commas else "") for i, word in enumerate(self.words)]
        text = " ".join(parts)
        if style == "sentence":
            text = text[0].upper() + text[1:] + "."
        return SceneCaption(text, tuple(self.words))


def _a(following: str) -> str:
    return "an" if following[0] in "aeiou" else "a"


def _word(table: dict[str, str], meaning: str, rng: random.Random) -> str:
    words = [word for word, meant in table.items() if meant == meaning]
    return words[0] if rng.random() < 0.6 else rng.choice(words)
