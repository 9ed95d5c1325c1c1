"""From the tokens of a foil back to a sentence, as its caption is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterfoil.data.texts import HuggingFaceText, TextProcessor, WordText
from counterfoil.errors import ConfigError
from counterfoil.models.word_spans import caption_words, words_of_tokens


@dataclass(frozen=True)
class SpeltFoil:
    """A foil as text, and at which of the caption's words it differs."""

    text: str
    positions: tuple[int, ...]


def spell_foil(
    text: TextProcessor, caption: str, true: Sequence[int], foil: Sequence[int]
) -> SpeltFoil | None:
    """The caption with the words exchanged whose tokens are others in the foil.

    All else stays as written, words that the model does not know included. None where no such
    sentence is read as those tokens again (a piece of a word that stands alone), or where one has
    more or fewer words than the caption.
    """
    found = caption_words(caption)
    word_of = words_of_tokens(text, caption, found)
    pairs = zip(word_of, true, foil, strict=True)
    changed = {word for word, old, new in pairs if old != new}
    if not changed or None in changed:
        return None
    places = sorted(word for word in changed if word is not None)
    spelt = {
        place: _spell(
            text, [token for token, word in zip(foil, word_of, strict=True) if word == place]
        )
        for place in places
    }
    for cased in (True, False):
        sentence = caption
        for place in reversed(places):
            span = found[place]
            word = _in_case_of(span.text, spelt[place]) if cased else spelt[place]
            sentence = _joined(sentence[: span.start], word, sentence[span.end :])
        if list(text.encode(sentence)) == list(foil) and len(caption_words(sentence)) == len(found):
            return SpeltFoil(sentence, tuple(places))
    return None


def _joined(before: str, word: str, after: str) -> str:
    """A word between two parts; apart from letters that would become part of it."""
    left = " " if before[-1:].isalnum() and word[:1].isalnum() else ""
    right = " " if word[-1:].isalnum() and after[:1].isalnum() else ""
    return f"{before}{left}{word}{right}{after}"


def _spell(text: TextProcessor, ids: Sequence[int]) -> str:
    if isinstance(text, WordText):
        return text.vocabulary.entries[ids[0]]
    if not isinstance(text, HuggingFaceText):
        raise ConfigError(f"foils: text of kind '{text.kind}' cannot be spelt back")
    pieces: list[str] = text.tokenizer.convert_ids_to_tokens(list(ids))
    spelt: str = text.tokenizer.convert_tokens_to_string(pieces)
    return spelt.strip()


def _in_case_of(old: str, new: str) -> str:
    if len(old) > 1 and old.isupper():
        return new.upper()
    return new[:1].upper() + new[1:] if old[:1].isupper() else new
