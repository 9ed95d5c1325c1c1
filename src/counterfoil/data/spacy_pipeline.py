"""A spaCy pipeline that is loaded where it is used: once in each process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from counterfoil.errors import ConfigError, MissingExtraError


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
