"""A sentence as an argument: neither empty nor too long to be looked at word by word."""

from __future__ import annotations

from counterfoil.errors import ConfigError


def check_sentence(text: str, purpose: str) -> None:
    """Refuse a sentence before a model is loaded for it; ``purpose`` is a verb: explain, correct.

    A model that leaves out or exchanges one word at a time works for hours on thousands of them.
    """
    from counterfoil.data.words import MOST_LETTERS, MOST_WORDS, words

    if not text.strip():
        raise ConfigError(f"nothing to {purpose}: the sentence is empty")
    if len(text) > MOST_LETTERS:
        found, most = f"{len(text):,} letters", f"{MOST_LETTERS:,}"
    elif (count := len(words(text))) > MOST_WORDS:
        found, most = f"{count:,} words", str(MOST_WORDS)
    else:
        return
    raise ConfigError(f"the sentence has {found}, at most {most} are read: shorten it")
