"""Which words of a caption belong together: parsers, by rule or spaCy, for its word graph."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

from counterfoil.core.errors import ConfigError, MissingExtraError, nearest

Edge = tuple[int, int]

DETERMINERS = frozenset(
    """a an the this these those some any each every another both all no one two three four five six
    seven eight nine ten several many few other his her its their my your our""".split()  # noqa: SIM905
)

LINKS = frozenset(
    """in on at of with without to from by near behind under over above below beside besides between
    into onto through across along around against inside outside beneath underneath toward towards
    next front left right top for as off up down out and or but while who which that is are was were
    be being been has have had do does can there""".split()  # noqa: SIM905
)


class SpacyPipeline:
    """Parses words that are already cut; a missing spaCy or pipeline is told when it is made.

    ``purpose`` and ``instead`` say what it is for and what to do without it.
    """

    def __init__(
        self, name: str, *, purpose: str, instead: str, exclude: Sequence[str] = ()
    ) -> None:
        self.name, self.purpose, self.instead = name, purpose, instead
        self.exclude = list(exclude)
        self._loaded: Any = None
        self._load()

    def _load(self) -> Any:
        if self._loaded is None:
            try:
                import spacy
            except ImportError:
                raise MissingExtraError("spacy", "foils", self.purpose) from None
            try:
                self._loaded = spacy.load(self.name, exclude=self.exclude)
            except OSError:
                raise ConfigError(
                    f"spaCy has no pipeline '{self.name}'; get it with: python -m spacy "
                    f"download {self.name}, or {self.instead}"
                ) from None
        return self._loaded

    def __getstate__(self) -> dict[str, Any]:
        # another process loads the pipeline anew rather than receiving it
        return {**self.__dict__, "_loaded": None}

    def parse(self, words: Sequence[str]) -> Any:
        from spacy.tokens import Doc

        nlp = self._load()
        return nlp(Doc(nlp.vocab, words=list(words)))


class Parser(Protocol):
    """Links between words; a word graph is undirected, so an edge is given once, either way."""

    def edges(self, words: list[str]) -> list[Edge]:
        """Pairs of places in ``words``, 0 the first word."""
        ...


class LinkedIds(list[int]):
    """Token ids of a caption that know the edges between their places."""

    def __init__(self, ids: list[int], edges: list[Edge]) -> None:
        super().__init__(ids)
        self.edges = edges

    @classmethod
    def of_words(
        cls, ids: list[int], word_of: Sequence[int | None], edges: list[Edge]
    ) -> LinkedIds:
        """Edges of words to edges of their tokens; ``word_of`` is the word behind each token.

        The pieces of one word are linked with each other; a word left out has no edges.
        """
        places: dict[int, list[int]] = {}
        for place, word in enumerate(word_of):
            if word is not None:
                places.setdefault(word, []).append(place)
        linked: list[Edge] = []
        for a, b in [*edges, *((word, word) for word in places)]:
            linked += itertools.product(places.get(a, []), places.get(b, []))
        return cls(ids, [(start, end) for start, end in linked if start != end])


class RuleParser:
    """Word links by a few rules; approximate, but it needs no model and is the same everywhere.

    Determiners and describing words attach to the noun that ends their phrase. Verbs, prepositions
    and conjunctions attach to the nearest phrase on either side and, in a row, to each other. A
    verb is an -ing or -ed word that follows no determiner, or the last word of a phrase that runs
    into a determiner (*a man rides a horse*).

    >>> RuleParser().edges("a small dog on the grass".split())
    [(0, 2), (1, 2), (2, 3), (3, 5), (4, 5)]
    """

    def edges(self, words: list[str]) -> list[Edge]:
        links = [self._links(words, place) for place in range(len(words))]
        phrases = self._phrases(words, links)
        found = {(place, head) for *before, head in phrases for place in before}
        heads = [phrase[-1] for phrase in phrases]
        for place in (place for place, link in enumerate(links) if link):
            left = [head for head in heads if head < place]
            right = [head for head in heads if head > place]
            found |= {(left[-1], place)} if left else set()
            found |= {(place, right[0])} if right else set()
            if place + 1 < len(words) and links[place + 1]:
                found.add((place, place + 1))
        return sorted(found)

    def _links(self, words: list[str], place: int) -> bool:
        """Whether a word joins phrases rather than being part of one."""
        word = words[place]
        before = words[place - 1] if place else ""
        after = words[place + 1] if place + 1 < len(words) else ""
        if word in DETERMINERS or before in DETERMINERS or not word[0].isalnum():
            return False
        if word in LINKS or not before:
            return word in LINKS
        if word.endswith(("ing", "ed")) and len(word) > 4:
            return before in LINKS or after in DETERMINERS or after in LINKS or not after
        return after in DETERMINERS and before not in LINKS and before[0].isalnum()

    def _phrases(self, words: list[str], links: list[bool]) -> list[list[int]]:
        """Runs of words between links and signs; a determiner begins a new one."""
        phrases: list[list[int]] = [[]]
        for place, word in enumerate(words):
            if links[place] or not (word[0].isalnum() or word == "'s"):
                phrases.append([])
                continue
            named = any(words[earlier] not in DETERMINERS for earlier in phrases[-1])
            if word in DETERMINERS and named:
                phrases.append([])
            phrases[-1].append(place)
        return [phrase for phrase in phrases if phrase]


class SpacyParser:
    """The dependency tree of a spaCy pipeline: an edge from each word to its head."""

    def __init__(self, pipeline: str = "en_core_web_sm") -> None:
        self.pipeline = SpacyPipeline(
            pipeline, purpose="a dependency parser", instead="use model.matcher.parser=rules"
        )

    def edges(self, words: list[str]) -> list[Edge]:
        if not words:
            return []
        tree = self.pipeline.parse(words)
        return [(token.i, token.head.i) for token in tree if token.i != token.head.i]


def create_parser(name: str) -> Parser:
    """``rules``, ``spacy``, or ``spacy:NAME`` for another of its pipelines."""
    kind, _, pipeline = name.partition(":")
    if kind == "rules" and not pipeline:
        return RuleParser()
    if kind == "spacy":
        return SpacyParser(pipeline or "en_core_web_sm")
    raise ConfigError(
        f"model.matcher.parser: unknown parser '{name}'{nearest(kind, ('rules', 'spacy'))} "
        "(known: rules, spacy, spacy:PIPELINE)"
    )
