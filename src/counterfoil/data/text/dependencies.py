"""Dependency parsers, by rules or spaCy, for the word graph of a caption."""

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
    """A spaCy pipeline for tokenized captions; raises at once if spaCy or the pipeline is missing.

    The error names its ``purpose`` and what to do ``instead``.
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
        # other processes load the pipeline themselves
        return {**self.__dict__, "_loaded": None}

    def parse(self, words: Sequence[str]) -> Any:
        from spacy.tokens import Doc

        nlp = self._load()
        return nlp(Doc(nlp.vocab, words=list(words)))


class Parser(Protocol):
    """Edges between words; the graph is undirected, so each edge is given once."""

    def edges(self, words: list[str]) -> list[Edge]:
        """Pairs of indices into ``words``."""
        ...


class LinkedIds(list[int]):
    """Token ids of a caption with the edges between them (pairs of indices)."""

    def __init__(self, ids: list[int], edges: list[Edge]) -> None:
        super().__init__(ids)
        self.edges = edges

    @classmethod
    def of_words(
        cls, ids: list[int], word_of: Sequence[int | None], edges: list[Edge]
    ) -> LinkedIds:
        """Edges of words as edges of their tokens; ``word_of`` is the word of each token.

        The tokens of one word are linked with each other; deleted words have no edges.
        """
        tokens: dict[int, list[int]] = {}
        for token, word in enumerate(word_of):
            if word is not None:
                tokens.setdefault(word, []).append(token)
        linked: list[Edge] = []
        for a, b in [*edges, *((word, word) for word in tokens)]:
            linked += itertools.product(tokens.get(a, []), tokens.get(b, []))
        return cls(ids, [(start, end) for start, end in linked if start != end])


class RuleParser:
    """Word links by a few rules; approximate, but deterministic and without a model.

    Determiners and describing words attach to the noun that ends their phrase. Verbs, prepositions
    and conjunctions attach to the nearest phrase on either side and, in a row, to each other. A
    verb is an -ing or -ed word that follows no determiner, or the last word of a phrase that runs
    into a determiner (*a man rides a horse*).

    >>> RuleParser().edges("a small dog on the grass".split())
    [(0, 2), (1, 2), (2, 3), (3, 5), (4, 5)]
    """

    def edges(self, words: list[str]) -> list[Edge]:
        links = [self._is_link(words, index) for index in range(len(words))]
        phrases = self._phrases(words, links)
        edges = {(index, head) for *before, head in phrases for index in before}
        heads = [phrase[-1] for phrase in phrases]
        for index in (index for index, link in enumerate(links) if link):
            left = [head for head in heads if head < index]
            right = [head for head in heads if head > index]
            edges |= {(left[-1], index)} if left else set()
            edges |= {(index, right[0])} if right else set()
            if index + 1 < len(words) and links[index + 1]:
                edges.add((index, index + 1))
        return sorted(edges)

    def _is_link(self, words: list[str], index: int) -> bool:
        """Whether a word joins phrases, rather than being part of one."""
        word = words[index]
        before = words[index - 1] if index else ""
        after = words[index + 1] if index + 1 < len(words) else ""
        if word in DETERMINERS or before in DETERMINERS or not word[0].isalnum():
            return False
        if word in LINKS or not before:
            return word in LINKS
        if word.endswith(("ing", "ed")) and len(word) > 4:
            return before in LINKS or after in DETERMINERS or after in LINKS or not after
        return after in DETERMINERS and before not in LINKS and before[0].isalnum()

    def _phrases(self, words: list[str], links: list[bool]) -> list[list[int]]:
        """Runs of words between links and punctuation; a determiner begins a new one."""
        phrases: list[list[int]] = [[]]
        for index, word in enumerate(words):
            if links[index] or not (word[0].isalnum() or word == "'s"):
                phrases.append([])
                continue
            named = any(words[earlier] not in DETERMINERS for earlier in phrases[-1])
            if word in DETERMINERS and named:
                phrases.append([])
            phrases[-1].append(index)
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
