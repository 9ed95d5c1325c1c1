"""Foils by rule, after VSE-C: a caption with a noun, numeral or relation exchanged.

The rules see only the caption, never the image. A foil is therefore false as a rule, not for
certain; words of the image's other captions, given as ``avoid``, make it more so.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from counterfoil.core.errors import ConfigError, nearest
from counterfoil.data.duplicates import spoken
from counterfoil.data.text.words import STOP_WORDS, CaptionWord, caption_words, words
from counterfoil.foils.grammar import (
    Relating,
    Tokens,
    is_noun,
    is_plural,
    noun_after,
    relations_of,
    subject_of,
)
from counterfoil.foils.lexicon import (
    ATTRIBUTES,
    ATTRIBUTES_ALIKE,
    DIGITS,
    LONG_RELATIONS,
    NOUN_FORMS,
    NUMERALS,
    PLACES,
    RELATIONS,
    RELATIONS_ALIKE,
    SYMMETRIC,
    THINGS,
)

# New words by place; a site is all that can be done to one place, each edit on its own.
Edit = dict[int, str]
Site = list[Edit]

# Things that captions put people and animals *in* or *on* without telling where they are.
_SETTINGS = frozenset({"place", "ground", "clothing", "headwear"})
_ANY_OBJECT = frozenset(
    word for word in RELATIONS if word.endswith("ing") or word in ("with", "without")
)
_MAX_FROM_ONE = 5
_AGREEING = frozenset(
    {"is", "was", "has", "does", "'s", "it", "its", "itself", "he", "she", "his", "him", "her"}
    | {"himself", "herself", "that", "which", "who"}
)
_PLURAL_CLOTHES = frozenset({"clothes", "shorts", "jeans", "pants", "glasses", "gloves"})

DEFAULT_KINDS = ("noun", "numeral", "relation")


def noun_sites(tokens: Tokens, avoid: AbstractSet[str]) -> list[Site]:
    """Another thing of the same category, one that neither caption nor ``avoid`` speaks of."""
    known = avoid | set(tokens)
    sites = []
    for place in range(len(tokens)):
        if is_noun(tokens, place):
            plural = is_plural(tokens, place)
            rivals = (THINGS[rival] for rival in THINGS[NOUN_FORMS[tokens[place]].thing].rivals)
            names = [rival.name(plural) for rival in rivals if rival.related.isdisjoint(known)]
            sites.append([{place: name} for name in names if name])
    return sites


def numeral_sites(tokens: Tokens, avoid: AbstractSet[str]) -> list[Site]:
    """Another number; ``a dog`` becomes several where nothing else has to agree with it.

    Several never become one: whoever sees two dogs sees a dog.
    """
    agreeing = [place for place, word in enumerate(tokens) if _depends_on_number(word)]
    last_agreeing = agreeing[-1] if agreeing else -1
    sites = []
    for place, word in enumerate(tokens):
        if word in ("a", "an", "one"):
            sites.append(_several(tokens, place, avoid, last_agreeing))
        elif word in NUMERALS and _counts(tokens, place):
            sites.append(_other_numbers(NUMERALS, place, word, avoid))
        elif word in DIGITS[1:] and _counts_a_noun(tokens, place):
            sites.append(_other_numbers(DIGITS, place, word, avoid))
    return sites


def _other_numbers(names: tuple[str, ...], place: int, word: str, avoid: AbstractSet[str]) -> Site:
    return [{place: n} for n in names[1:] if n != word and not _is_known_number(n, avoid)]


def _counts(tokens: Tokens, place: int) -> bool:
    following = tokens[place + 1] if place + 1 < len(tokens) else ""
    return following.isalpha() and following not in ("year", "years")


def _counts_a_noun(tokens: Tokens, place: int) -> bool:
    """Figures may also be times, ages and shirt numbers, so they need a plural after them."""
    noun = noun_after(tokens, place + 1)
    return noun is not None and is_plural(tokens, noun)


def _is_known_number(number: str, avoid: AbstractSet[str]) -> bool:
    names = DIGITS if number in DIGITS else NUMERALS
    place = names.index(number)
    return NUMERALS[place] in avoid or DIGITS[place] in avoid


def _several(tokens: Tokens, place: int, avoid: AbstractSet[str], last_agreeing: int) -> Site:
    """``a red ball`` to ``three red balls``."""
    noun = noun_after(tokens, place + 1)
    if noun is None or is_plural(tokens, noun) or tokens[place - 1 : place] in (["is"], ["was"]):
        return []
    name = tokens[noun]
    plural = next(many for one, many in THINGS[NOUN_FORMS[name].thing].names if one == name)
    if not plural or plural in avoid or noun < last_agreeing or _may_go_on(tokens, noun):
        return []
    if NOUN_FORMS[name].category in _SETTINGS:
        return []
    numbers = [n for n in NUMERALS[1:_MAX_FROM_ONE] if not _is_known_number(n, avoid)]
    changed = {noun: plural} if plural != name else {}
    return [{place: number, **changed} for number in numbers]


def _may_go_on(tokens: Tokens, noun: int) -> bool:
    """Whether the noun may be the first half of a name that is not listed: ``dog sled``."""
    after = tokens[noun + 1] if noun + 1 < len(tokens) else ""
    known = after in STOP_WORDS or after in RELATIONS or after in ("left", "right")
    return after.isalpha() and not known and not after.endswith("ing")


def _depends_on_number(word: str) -> bool:
    """``is``, ``it``; ``sits``: anything in -s that is not a known plural or a function word."""
    if word in _AGREEING:
        return True
    verbal = word.endswith("s") and not word.endswith("ss") and word.isalpha()
    return verbal and not (word in NOUN_FORMS or word in STOP_WORDS or word in _PLURAL_CLOTHES)


def relation_sites(tokens: Tokens, avoid: AbstractSet[str]) -> list[Site]:
    """Another relation, or another place within the picture."""
    sites = [_exchanged(tokens, relating, avoid) for relating in relations_of(tokens)]
    for place in range(2, len(tokens)):
        lead, word = tokens[place - 2 : place], tokens[place]
        within = word in PLACES and lead[1] == "the" and lead[0] in ("on", "in", "at", "to")
        if within and tokens[place + 1 : place + 2] != ["of"]:
            sites.append([{place: other} for other in PLACES[word] if other not in avoid])
    return sites


def _exchanged(tokens: Tokens, relating: Relating, avoid: AbstractSet[str]) -> Site:
    start, old = relating.start, tuple(tokens[relating.start : relating.end])
    if old in LONG_RELATIONS:
        options = LONG_RELATIONS[old]
    elif _is_mere_setting(tokens, relating):
        return []
    else:
        options = tuple((word, *old[1:]) for word in RELATIONS[old[0]])
    edits = []
    for new in options:
        edit = {start + i: word for i, word in enumerate(new) if word != old[i]}
        if not any(_is_known(word, RELATIONS_ALIKE, avoid) for word in edit.values()):
            edits.append(edit)
    return edits


def _is_mere_setting(tokens: Tokens, relating: Relating) -> bool:
    """``in a park``, ``in a red dress``: said of the scene, not of where things are in it."""
    if relating.object is None or tokens[relating.start] in _ANY_OBJECT:
        return False
    return NOUN_FORMS[tokens[relating.object]].category in _SETTINGS


def _is_known(word: str, groups: dict[str, set[str]], avoid: AbstractSet[str]) -> bool:
    return not avoid.isdisjoint({word, *groups.get(word, ())})


def attribute_sites(tokens: Tokens, avoid: AbstractSet[str]) -> list[Site]:
    """Another colour, size or pattern."""
    return [
        [{place: o} for o in ATTRIBUTES[word] if not _is_known(o, ATTRIBUTES_ALIKE, avoid)]
        for place, word in enumerate(tokens)
        if word in ATTRIBUTES
    ]


def swap_sites(tokens: Tokens, avoid: AbstractSet[str]) -> list[Site]:
    """Subject and object change sides: ``a dog on a horse`` to ``a horse on a dog``.

    No word is new, except where one of them has to change its number.
    """
    sites = []
    for relating in relations_of(tokens):
        subject, other = subject_of(tokens, relating), relating.object
        if subject is None or other is None or tokens[relating.start] in SYMMETRIC:
            continue
        if _is_mere_setting(tokens, relating):
            continue
        one, two = tokens[subject], tokens[other]
        if _may_be_the_same(one, two):
            continue
        edit = {
            subject: _in_number(two, is_plural(tokens, subject)),
            other: _in_number(one, is_plural(tokens, other)),
        }
        new = set(edit.values()) - set(tokens)
        if all(edit.values()) and new.isdisjoint(avoid):
            sites.append([edit])
    return sites


def _may_be_the_same(one: str, two: str) -> bool:
    things = THINGS[NOUN_FORMS[one].thing], THINGS[NOUN_FORMS[two].thing]
    return two in things[0].related or one in things[1].related


def _in_number(word: str, plural: bool) -> str:
    names = THINGS[NOUN_FORMS[word].thing].names
    return next(pair[plural] for pair in names if word in pair)


SITES: dict[str, Callable[[Tokens, AbstractSet[str]], Iterable[Site]]] = {
    "noun": noun_sites,
    "numeral": numeral_sites,
    "relation": relation_sites,
    "attribute": attribute_sites,
    "swap": swap_sites,
}


KINDS = tuple(SITES)


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
