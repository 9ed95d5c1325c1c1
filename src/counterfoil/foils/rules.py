"""Foils by rule, after VSE-C: a caption with a noun, numeral or relation exchanged.

The rules see only the caption, never the image. A foil is therefore false as a rule, not for
certain; words of the image's other captions, given as ``avoid``, make it more so.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from counterfoil.data.caption_words import CaptionWord, caption_words
from counterfoil.data.duplicates import spoken
from counterfoil.data.words import words
from counterfoil.errors import ConfigError, nearest
from counterfoil.foils.sites import SITES, Edit, Site

KINDS = tuple(SITES)
DEFAULT_KINDS = ("noun", "numeral", "relation")


@dataclass(frozen=True)
class Foil:
    """A caption made false; it has as many words as the true one.

    ``positions`` are the places, among the `words` of either, at which the two differ. There the
    caption has ``original`` and the foil has ``replacement``. An article that had to follow its
    noun (``a dog``, ``an elephant``) is one of them.
    """

    text: str
    kind: str
    positions: tuple[int, ...]
    original: tuple[str, ...]
    replacement: tuple[str, ...]


def rule_foils(
    caption: str,
    rng: random.Random,
    kinds: Sequence[str] = DEFAULT_KINDS,
    count: int = 1,
    avoid: Collection[str] = frozenset(),
    true: Collection[str] = frozenset(),
) -> list[Foil]:
    """Up to ``count`` different foils of a caption; none where no rule applies.

    ``kinds`` are ``noun``, ``numeral``, ``relation``, ``attribute`` (colour, size, pattern) and
    ``swap`` (subject and object of a relation change sides). Each foil has one of them, drawn
    evenly from those that the caption allows. No foil brings in a word of ``avoid`` (lower case),
    nor another word for the same thing; articles are exempt. No foil is one of the ``true``
    sentences, given as `spoken`: a swap may write what another caption of the image says.

    >>> rule_foils("A dog on a table.", random.Random(2), kinds=["swap"])[0].text
    'A table on a dog.'
    """
    _check(kinds, count)
    tokens = words(caption)
    spans = caption_words(caption)
    avoided = frozenset(avoid)
    able = {kind: _non_empty(tokens, kind, avoided) for kind in kinds}
    foils: dict[str, Foil] = {}
    while len(foils) < count and any(able.values()):
        kind = rng.choice([kind for kind in able if able[kind]])
        edit = _draw(able[kind], rng)
        foil = _foil(caption, tokens, spans, edit, kind)
        if foil is not None and not (true and spoken(foil.text) in true):
            foils.setdefault(foil.text, foil)
    return list(foils.values())


def _check(kinds: Sequence[str], count: int) -> None:
    for kind in kinds:
        if kind not in SITES:
            raise ConfigError(
                f"foils: unknown kind '{kind}'{nearest(kind, KINDS)} (known: {', '.join(KINDS)})"
            )
    if count < 1:
        raise ConfigError(f"foils: expected a count of at least 1, got {count}")


def _non_empty(tokens: list[str], kind: str, avoid: AbstractSet[str]) -> list[Site]:
    return [site for site in SITES[kind](tokens, avoid) if site]


def _draw(sites: list[Site], rng: random.Random) -> Edit:
    """Take an edit out, every site being as likely as any other."""
    chosen = rng.randrange(len(sites))
    edit = sites[chosen].pop(rng.randrange(len(sites[chosen])))
    if not sites[chosen]:
        sites[chosen] = sites[-1]
        sites.pop()
    return edit


def _foil(
    caption: str, tokens: list[str], spans: list[CaptionWord], edit: Edit, kind: str
) -> Foil | None:
    """The edited caption; None where its words would not be found again in the text."""
    edit = _with_articles(tokens, edit)
    new = list(tokens)
    for place, word in edit.items():
        new[place] = word
    parts, cursor = list[str](), 0
    for place in sorted(edit):
        span = spans[place]
        written = edit[place].upper() if caption.isupper() else in_case_of(span.text, edit[place])
        parts += [caption[cursor : span.start], written]
        cursor = span.end
    text = "".join([*parts, caption[cursor:]])
    if words(text) != new:
        return None
    places = tuple(sorted(edit))
    return Foil(
        text,
        kind,
        places,
        tuple(tokens[place] for place in places),
        tuple(edit[place] for place in places),
    )


def _with_articles(tokens: list[str], edit: Edit) -> Edit:
    """The edit, and the articles before its words where these begin otherwise."""
    articles = {}
    for place, word in edit.items():
        article = article_before(tokens[place - 1], word) if place else None
        if article and place - 1 not in edit:
            articles[place - 1] = article
    return {**edit, **articles}


def article_before(article: str, word: str) -> str | None:
    """The other indefinite article if a word needs it, in the same case; else None.

    >>> article_before("An", "dog")
    'A'
    """
    fitting = "an" if word[:1].lower() in tuple("aeiou") else "a"
    if article.lower() not in ("a", "an") or article.lower() == fitting:
        return None
    return in_case_of(article, fitting) if len(article) > 1 or article.islower() else "An"


def in_case_of(old: str, new: str) -> str:
    """A word with the capitals of another: all of them, the first, or none changed."""
    if len(old) > 1 and old.isupper():
        return new.upper()
    return new.capitalize() if old[0].isupper() else new
