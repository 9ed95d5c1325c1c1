"""Words of photo captions from `lexicon.yaml`: nouns, relations, attributes and word classes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


def _load() -> dict[str, Any]:
    # libyaml, if installed, is ten times as fast as the loader in Python
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text = (Path(__file__).parent / "lexicon.yaml").read_text(encoding="utf-8")
    words: dict[str, Any] = yaml.load(text, Loader=loader)  # noqa: S506 - both are safe loaders
    return words


_WORDS = _load()


def _set(name: str) -> frozenset[str]:
    return frozenset(_WORDS[name].split())


@dataclass(frozen=True)
class NounForm:
    """An inflected noun: the thing that it names, and its grammatical number."""

    thing: str
    category: str
    is_singular: bool
    is_plural: bool


@dataclass(frozen=True)
class Thing:
    """A concept with its names; ``rivals`` are the things that can replace it in a foil.

    ``related`` are the words, in either number, that mention the thing or part of it.
    """

    names: tuple[tuple[str, str], ...]
    rivals: tuple[str, ...]
    related: frozenset[str]

    def name(self, plural: bool) -> str:
        """Its usual name; empty for the plural of an uncountable noun."""
        return self.names[0][plural]


Names = dict[str, tuple[tuple[str, str], ...]]


def _read() -> tuple[Names, dict[str, str]]:
    """The names and the category of each thing."""
    names: Names = {}
    category_of: dict[str, str] = {}
    for category, lines in _WORDS["nouns"].items():
        for line in lines:
            pairs = [name.partition("/") for name in line.split()]
            thing = pairs[0][0]
            names[thing] = tuple((one, many) for one, _, many in pairs)
            category_of[thing] = category
    return names, category_of


def _things(names: Names, category_of: dict[str, str]) -> dict[str, Thing]:
    same_as = group_by_line(_WORDS["may_be_the_same"])
    things = {}
    for thing, category in category_of.items():
        same = same_as[thing] | {thing}
        rivals = [
            other for other, its in category_of.items() if its == category and other not in same
        ]
        covered = _WORDS["covers"].get(thing, "").split()
        same |= {other for other, its in category_of.items() if its in covered}
        related = {form for other in same for pair in names[other] for form in pair if form}
        things[thing] = Thing(names[thing], tuple(rivals), frozenset(related))
    return things


def _forms(names: Names, category_of: dict[str, str]) -> dict[str, NounForm]:
    forms: dict[str, NounForm] = {}
    for thing, category in category_of.items():
        for one, many in names[thing]:
            forms[one] = NounForm(thing, category, True, one == many)
            if many and many != one:
                forms[many] = NounForm(thing, category, False, True)
    return forms


def group_by_line(lines: Iterable[str]) -> defaultdict[str, set[str]]:
    """For each word, the words that share a line with it, itself included."""
    groups: defaultdict[str, set[str]] = defaultdict(set)
    for line in lines:
        for word in line.split():
            groups[word] |= set(line.split())
    return groups


def _exchanges(line: str, groups: Iterable[str] = ()) -> dict[str, tuple[str, ...]]:
    """For every word of a line, the words of other meanings; ``/`` joins synonyms."""
    meanings = [entry.split("/") for entry in line.split()]
    same = group_by_line(groups)
    return {
        word: tuple(
            other[0] for other in meanings if other != entry and other[0] not in same[entry[0]]
        )
        for entry in meanings
        for word in entry
    }


def _attributes() -> dict[str, tuple[str, ...]]:
    groups = _exchanges(_WORDS["colors"], _WORDS["colors_alike"]) | _exchanges(_WORDS["patterns"])
    for line in _WORDS["sizes"]:
        for word, others in _exchanges(line).items():
            groups[word] = groups.get(word, ()) + others
    return groups


THINGS, NOUN_FORMS = _things(*_read()), _forms(*_read())

NUMERALS = tuple(_WORDS["numerals"].split())
DIGITS = tuple(str(number) for number in range(1, 11))

RELATIONS = {word: tuple(line.split()) for word, line in _WORDS["relations"].items()}
LONG_RELATIONS = {
    tuple(words.split()): tuple(tuple(other.split()) for other in others)
    for words, others in _WORDS["long_relations"].items()
}
PLACES = {word: tuple(line.split()) for word, line in _WORDS["places"].items()}
RELATIONS_ALIKE = group_by_line(_WORDS["relations_alike"])
SYMMETRIC = _set("symmetric")

ATTRIBUTES = _attributes()
ATTRIBUTES_ALIKE = group_by_line(
    entry.replace("/", " ")
    for line in (_WORDS["colors"], *_WORDS["sizes"], _WORDS["patterns"])
    for entry in line.split()
)

# Tags of words that have only one.
DETERMINER, PRONOUN, AUXILIARY, PREPOSITION = "determiner", "pronoun", "auxiliary", "preposition"
CONJUNCTION, ADVERB, NUMBER, TO = "conjunction", "adverb", "number", "to"
NOUN, VERB, ADJECTIVE, POSSESSIVE, SIGN = "noun", "verb", "adjective", "possessive", "sign"

CLOSED = {word: tag for tag, line in _WORDS["closed"].items() for word in line.split()}
CLOSED.update(dict.fromkeys((*NUMERALS, *DIGITS), NUMBER))

ADJECTIVES = _set("adjectives") | frozenset(ATTRIBUTES)
COLORS = _set("color_words")
ADJECTIVE_ENDINGS = tuple(_WORDS["adjective_endings"].split())
VERBS, PASTS = _set("verbs"), _set("pasts")
USUALLY_PLURALS, IRREGULAR_PLURALS = _set("usually_plurals"), _set("irregular_plurals")
ING_NOUNS, ED_NOUNS, LY_NOUNS = _set("ing_nouns"), _set("ed_nouns"), _set("ly_nouns")
PURPOSES = _set("purposes")
