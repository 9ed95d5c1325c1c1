"""Foils by rule: a word replaced, after VSE-C, or two words exchanged, after NegCLIP.

The rules see the caption, not the image, so a foil may happen to be true. Pass the words of the
image's other captions as ``avoid`` to make that less likely.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby

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
from counterfoil.foils.word_swap import Edit, Site, may_be_the_same, word_swap_sites

# Categories of things that people and animals are *in* or *on* in any scene.
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


PackedSite = tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]

DEFAULT_KINDS = ("noun", "numeral", "relation")
REORDERING = frozenset({"swap", "word-swap"})
"""Kinds that only reorder words, so that a foil can equal another caption of its image."""


def noun_sites(tokens: Tokens, avoid: AbstractSet[str]) -> list[Site]:
    """Another thing of the same category that neither the caption nor ``avoid`` mentions."""
    known = avoid | set(tokens)
    sites = []
    for index in range(len(tokens)):
        if is_noun(tokens, index):
            plural = is_plural(tokens, index)
            rivals = (THINGS[rival] for rival in THINGS[NOUN_FORMS[tokens[index]].thing].rivals)
            names = [rival.name(plural) for rival in rivals if rival.related.isdisjoint(known)]
            sites.append([{index: name} for name in names if name])
    return sites


def numeral_sites(tokens: Tokens, avoid: AbstractSet[str]) -> list[Site]:
    """Another number; ``a dog`` becomes plural if no other word has to agree with it.

    A plural never becomes singular: an image of two dogs also shows a dog.
    """
    agreeing = [index for index, word in enumerate(tokens) if _depends_on_number(word)]
    last_agreeing = agreeing[-1] if agreeing else -1
    sites = []
    for index, word in enumerate(tokens):
        if word in ("a", "an", "one"):
            sites.append(_several(tokens, index, avoid, last_agreeing))
        elif word in NUMERALS and _counts(tokens, index):
            sites.append(_other_numbers(NUMERALS, index, word, avoid))
        elif word in DIGITS[1:] and _counts_a_noun(tokens, index):
            sites.append(_other_numbers(DIGITS, index, word, avoid))
    return sites


def _other_numbers(names: tuple[str, ...], index: int, word: str, avoid: AbstractSet[str]) -> Site:
    return [{index: n} for n in names[1:] if n != word and not _is_known_number(n, avoid)]


def _counts(tokens: Tokens, index: int) -> bool:
    following = tokens[index + 1] if index + 1 < len(tokens) else ""
    return following.isalpha() and following not in ("year", "years")


def _counts_a_noun(tokens: Tokens, index: int) -> bool:
    """Digits may be times, ages or shirt numbers, so they need a plural noun after them."""
    noun = noun_after(tokens, index + 1)
    return noun is not None and is_plural(tokens, noun)


def _is_known_number(number: str, avoid: AbstractSet[str]) -> bool:
    names = DIGITS if number in DIGITS else NUMERALS
    index = names.index(number)
    return NUMERALS[index] in avoid or DIGITS[index] in avoid


def _several(tokens: Tokens, index: int, avoid: AbstractSet[str], last_agreeing: int) -> Site:
    """``a red ball`` to ``three red balls``."""
    noun = noun_after(tokens, index + 1)
    if noun is None or is_plural(tokens, noun) or tokens[index - 1 : index] in (["is"], ["was"]):
        return []
    name = tokens[noun]
    plural = next(many for one, many in THINGS[NOUN_FORMS[name].thing].names if one == name)
    if not plural or plural in avoid or noun < last_agreeing or _may_continue(tokens, noun):
        return []
    if NOUN_FORMS[name].category in _SETTINGS:
        return []
    numbers = [n for n in NUMERALS[1:_MAX_FROM_ONE] if not _is_known_number(n, avoid)]
    changed = {noun: plural} if plural != name else {}
    return [{index: number, **changed} for number in numbers]


def _may_continue(tokens: Tokens, noun: int) -> bool:
    """Whether the noun may be the first half of an unlisted compound: ``dog sled``."""
    after = tokens[noun + 1] if noun + 1 < len(tokens) else ""
    known = after in STOP_WORDS or after in RELATIONS or after in ("left", "right")
    return after.isalpha() and not known and not after.endswith("ing")


def _depends_on_number(word: str) -> bool:
    """``is``, ``it``, and words in -s that are neither known plurals nor function words."""
    if word in _AGREEING:
        return True
    verbal = word.endswith("s") and not word.endswith("ss") and word.isalpha()
    return verbal and not (word in NOUN_FORMS or word in STOP_WORDS or word in _PLURAL_CLOTHES)


def relation_sites(tokens: Tokens, avoid: AbstractSet[str]) -> list[Site]:
    """Another relation, or another region of the picture (``on the left``)."""
    sites = [_exchanged(tokens, relating, avoid) for relating in relations_of(tokens)]
    for index in range(2, len(tokens)):
        lead, word = tokens[index - 2 : index], tokens[index]
        within = word in PLACES and lead[1] == "the" and lead[0] in ("on", "in", "at", "to")
        if within and tokens[index + 1 : index + 2] != ["of"]:
            sites.append([{index: other} for other in PLACES[word] if other not in avoid])
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
    """``in a park``, ``in a red dress``: describes the scene, not a spatial relation."""
    if relating.object is None or tokens[relating.start] in _ANY_OBJECT:
        return False
    return NOUN_FORMS[tokens[relating.object]].category in _SETTINGS


def _is_known(word: str, groups: dict[str, set[str]], avoid: AbstractSet[str]) -> bool:
    return not avoid.isdisjoint({word, *groups.get(word, ())})


def attribute_sites(tokens: Tokens, avoid: AbstractSet[str]) -> list[Site]:
    """Another color, size or pattern."""
    return [
        [{index: o} for o in ATTRIBUTES[word] if not _is_known(o, ATTRIBUTES_ALIKE, avoid)]
        for index, word in enumerate(tokens)
        if word in ATTRIBUTES
    ]


def swap_sites(tokens: Tokens, avoid: AbstractSet[str]) -> list[Site]:
    """Subject and object swapped: ``a dog on a horse`` to ``a horse on a dog``.

    No word is new, unless one of them has to change its number.
    """
    sites = []
    for relating in relations_of(tokens):
        subject, other = subject_of(tokens, relating), relating.object
        if subject is None or other is None or tokens[relating.start] in SYMMETRIC:
            continue
        if _is_mere_setting(tokens, relating):
            continue
        one, two = tokens[subject], tokens[other]
        if may_be_the_same(one, two):
            continue
        edit = {
            subject: _in_number(two, is_plural(tokens, subject)),
            other: _in_number(one, is_plural(tokens, other)),
        }
        new = set(edit.values()) - set(tokens)
        if all(edit.values()) and new.isdisjoint(avoid):
            sites.append([edit])
    return sites


def _in_number(word: str, plural: bool) -> str:
    names = THINGS[NOUN_FORMS[word].thing].names
    return next(pair[plural] for pair in names if word in pair)


SITES: dict[str, Callable[[Tokens, AbstractSet[str]], Iterable[Site]]] = {
    "noun": noun_sites,
    "numeral": numeral_sites,
    "relation": relation_sites,
    "attribute": attribute_sites,
    "swap": swap_sites,
    "word-swap": word_swap_sites,
}
KINDS = tuple(SITES)


@dataclass(frozen=True)
class Foil:
    """A false caption with as many words as the true one.

    ``positions`` are the indices, among the `words` of both, of the words that differ, adapted
    articles included. There the caption has ``original`` and the foil has ``replacement``.
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
    """Up to ``count`` different foils of a caption; none if no rule applies.

    ``kinds`` are ``noun``, ``numeral``, ``relation``, ``attribute`` (color, size, pattern),
    ``swap`` (subject and object of a relation swapped) and ``word-swap`` (any two nouns,
    adjectives, verbs, adverbs or noun phrases exchanged, as NegCLIP does). Each foil has one of
    them, drawn uniformly from those that apply to the caption. No foil adds a word of ``avoid``
    (lower case) or a synonym of one, apart from articles. No foil is one of the ``true`` sentences,
    given as `spoken`: a swap may repeat another caption of the image.

    >>> rule_foils("A dog on a table.", random.Random(2), kinds=["swap"])[0].text
    'A table on a dog.'
    """
    return CaptionSites.of(caption, kinds, avoid).foils(rng, count, true)


@dataclass(frozen=True)
class CaptionSites:
    """Where the rules can change a caption, and how; `rule_foils` in two steps.

    To find the sites takes longer than to draw from them, so training keeps them. For each kind,
    a site has runs of edits that change the same positions: these positions, and the new words of
    one edit after the other. That takes a third of the memory of the edits.
    """

    caption: str
    tokens: tuple[str, ...]
    sites: dict[str, tuple[PackedSite, ...]]

    @classmethod
    def of(
        cls,
        caption: str,
        kinds: Sequence[str] = DEFAULT_KINDS,
        avoid: Collection[str] = frozenset(),
    ) -> CaptionSites:
        _check(kinds, 1)
        tokens, avoided = words(caption), frozenset(avoid)
        sites = {kind: SITES[kind](tokens, avoided) for kind in kinds}
        packed = {kind: tuple(map(_pack, filter(None, given))) for kind, given in sites.items()}
        return cls(caption, tuple(tokens), packed)

    def foils(
        self, rng: random.Random, count: int = 1, true: Collection[str] = frozenset()
    ) -> list[Foil]:
        """Up to ``count`` different foils that are none of the ``true`` sentences."""
        _check((), count)
        tokens, spans = list(self.tokens), caption_words(self.caption)
        left = {kind: [(s, [*range(_edits(s))]) for s in of] for kind, of in self.sites.items()}
        foils: dict[str, Foil] = {}
        while len(foils) < count and any(left.values()):
            kind = rng.choice([kind for kind in left if left[kind]])
            foil = _foil(self.caption, tokens, spans, _draw(left[kind], rng), kind)
            if foil is not None and not (true and spoken(foil.text) in true):
                foils.setdefault(foil.text, foil)
        return list(foils.values())


def _pack(site: Site) -> PackedSite:
    return tuple(
        (positions, tuple(sys.intern(word) for edit in edits for word in edit.values()))
        for positions, edits in groupby(site, tuple)
    )


def _edits(site: PackedSite) -> int:
    """The number of edits of a site."""
    return sum(len(new) // len(positions) for positions, new in site)


def _edit(site: PackedSite, number: int) -> Edit:
    """One edit of a site."""
    for positions, new in site:
        size = len(positions)
        if number * size < len(new):
            return dict(zip(positions, new[number * size : (number + 1) * size], strict=True))
        number -= len(new) // size
    raise IndexError(number)


def _check(kinds: Sequence[str], count: int) -> None:
    for kind in kinds:
        if kind not in SITES:
            raise ConfigError(
                f"foils: unknown kind '{kind}'{nearest(kind, KINDS)} (known: {', '.join(KINDS)})"
            )
    if count < 1:
        raise ConfigError(f"foils: expected a count of at least 1, got {count}")


def _draw(left: list[tuple[PackedSite, list[int]]], rng: random.Random) -> Edit:
    """Remove and return an edit; every site is equally likely."""
    chosen = rng.randrange(len(left))
    site, numbers = left[chosen]
    edit = _edit(site, numbers.pop(rng.randrange(len(numbers))))
    if not numbers:
        left[chosen] = left[-1]
        left.pop()
    return edit


def _foil(
    caption: str, tokens: list[str], spans: list[CaptionWord], edit: Edit, kind: str
) -> Foil | None:
    """The edited caption; None if its text would be tokenized into other words."""
    edit = _with_articles(tokens, edit)
    new = list(tokens)
    for index, word in edit.items():
        new[index] = word
    text = _written(caption, tokens, spans, new)
    if words(text) != new:
        return None
    positions = tuple(sorted(edit))
    return Foil(
        text,
        kind,
        positions,
        tuple(tokens[index] for index in positions),
        tuple(edit[index] for index in positions),
    )


def _written(caption: str, tokens: list[str], spans: list[CaptionWord], new: list[str]) -> str:
    """The caption with other words in its places; a sign that moves keeps the spaces around it."""
    ends = [0, *(span.end for span in spans)]
    starts = [*(span.start for span in spans), len(caption)]
    gaps = [caption[end:start] for end, start in zip(ends, starts, strict=True)]
    signs = defaultdict[str, list[int]](list)
    for index, word in enumerate(tokens):
        signs[word] += [index] if _is_attached(word) else []
    origin = [signs[word].pop(0) if signs.get(word) else None for word in new]
    parts = list[str]()
    for index, word in enumerate(new):
        own, before = origin[index], origin[index - 1] if index else None
        gap = gaps[index]
        if index and own is not None:
            gap = gaps[own]
        elif before is not None:
            gap = gaps[before + 1]
        elif index and (_is_attached(tokens[index]) or _is_attached(tokens[index - 1])):
            gap = " "
        old = spans[index if own is None else own].text
        if own is None and word != tokens[index]:
            old = word.upper() if caption.isupper() else in_case_of(old, word)
        parts += [gap, old]
    return "".join([*parts, gaps[-1]])


def _is_attached(word: str) -> bool:
    """Whether a word may have no space before it: signs, and the second half of a contraction."""
    return not word[:1].isalnum() or word == "n't"


def _with_articles(tokens: list[str], edit: Edit) -> Edit:
    """The edit, and the articles (*a* or *an*) that its new words need."""
    articles = {}
    for index, word in edit.items():
        article = article_before(tokens[index - 1], word) if index else None
        if article and index - 1 not in edit:
            articles[index - 1] = article
    return {**edit, **articles}


def article_before(article: str, word: str) -> str | None:
    """The other indefinite article if a word needs it, in the same case; otherwise None.

    >>> article_before("An", "dog")
    'A'
    """
    fitting = "an" if word[:1].lower() in tuple("aeiou") else "a"
    if article.lower() not in ("a", "an") or article.lower() == fitting:
        return None
    return in_case_of(article, fitting) if len(article) > 1 or article.islower() else "An"


def in_case_of(old: str, new: str) -> str:
    """``new`` in upper case, with a capital, or unchanged, as ``old`` is written."""
    if len(old) > 1 and old.isupper():
        return new.upper()
    return new[:1].upper() + new[1:] if old[:1].isupper() else new
