"""Foils by exchanging two words or phrases of a caption, after NegCLIP.

An exchange that keeps the meaning is no foil: the order of a list says nothing, nor do the sides of
a symmetric relation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from types import MappingProxyType
from typing import TypeVar

from counterfoil.foils.grammar import Tokens, have_same_form, noun_phrases, tag
from counterfoil.foils.lexicon import (
    ADJECTIVE,
    ADVERB,
    AUXILIARY,
    CLOSED,
    CONJUNCTION,
    DETERMINER,
    LONG_RELATIONS,
    NOUN,
    NOUN_FORMS,
    SIGN,
    SYMMETRIC,
    THINGS,
    VERB,
)

# An edit maps word indices to new words; a site is a list of alternative edits of the same words.
Edit = dict[int, str]
Site = list[Edit]
Span = tuple[int, int]

Item = TypeVar("Item")

_SWAPPED_CLASSES = (NOUN, ADJECTIVE, VERB, ADVERB)
_SWAP_REACH = 12
_JOINING = (CONJUNCTION, DETERMINER, SIGN)


def word_swap_sites(tokens: Tokens, avoid: AbstractSet[str]) -> list[Site]:
    """Two nouns, adjectives, verbs, adverbs or noun phrases of the sentence exchanged (NegCLIP).

    Exchanges that keep the meaning are left out: within a list, or around a symmetric relation. No
    word is new, so ``avoid`` excludes nothing.
    """
    tags, fixed = tag(tokens), _fixed_words(tokens)
    phrases = noun_phrases(tags)
    groups = interchangeable(tokens, tags, phrases)
    groups_of: dict[int, list[Sequence[Span]]] = {}  # a search of all for each edit is quadratic
    for group in groups:
        for index in {index for span in group for index in range(*span)}:
            groups_of.setdefault(index, []).append(group)
    sites = []
    for word_class in _SWAPPED_CLASSES:
        words_of = [
            i
            for i, t in enumerate(tags)
            if t == word_class and tokens[i] not in CLOSED and i not in fixed
        ]
        pairs = [
            {i: tokens[j], j: tokens[i]}
            for i, j in _near_pairs(words_of)
            if have_same_form(word_class, tokens[i], tokens[j])
            and not _may_name_the_same(tokens[i], tokens[j])
            and not (j == i + 1 if word_class == NOUN else _are_listed(tags, i, j, word_class))
        ]
        sites.append([edit for edit in pairs if not _keeps_meaning(tokens, tags, groups_of, edit)])
    owners: dict[Span, set[int]] = {}
    for number, group in enumerate(groups):
        for span in group:
            owners.setdefault(span, set()).add(number)
    # 's belongs to the word before it
    whole = [s for s in phrases if fixed.isdisjoint(range(*s)) and tokens[s[0]][0].isalnum()]
    sites.append(
        [
            edit
            for one, two in _near_pairs(whole)
            if owners.get(one, set()).isdisjoint(owners.get(two, set()))
            and _content(tokens, tags, one) != _content(tokens, tags, two)
            and (edit := _exchanged_spans(tokens, one, two))
        ]
    )
    return sites


def _fixed_words(tokens: Tokens) -> set[int]:
    """Indices of words within relations of several words: the *front* of ``in front of``."""
    return {
        start + offset
        for start in range(len(tokens))
        for length in (2, 3)
        if tuple(tokens[start : start + length]) in LONG_RELATIONS
        for offset in range(length)
    }


def _may_name_the_same(one: str, two: str) -> bool:
    known = one in NOUN_FORMS and two in NOUN_FORMS
    return one == two or (known and may_be_the_same(one, two))


def _keeps_meaning(
    tokens: Tokens,
    tags: Sequence[str],
    groups_of: Mapping[int, Sequence[Sequence[Span]]],
    edit: Edit,
) -> bool:
    """Whether a group has the same phrases, apart from articles, before and after the edit.

    ``a dog and a cat`` means the same when exchanged, ``a red dog and a cat`` does not.
    """
    for group in groups_of.get(min(edit), ()):
        if all(any(start <= index < end for start, end in group) for index in edit):
            before = sorted(_content(tokens, tags, span) for span in group)
            after = sorted(_content(tokens, tags, span, edit) for span in group)
            if before == after:
                return True
    return False


def _content(
    tokens: Tokens, tags: Sequence[str], span: Span, edit: Mapping[int, str] = MappingProxyType({})
) -> list[str]:
    """The words of a phrase without its determiners, after an edit."""
    kept = [index for index in range(*span) if tags[index] != DETERMINER]
    return [edit.get(index, tokens[index]) for index in kept]


def _near_pairs(items: Sequence[Item]) -> Iterator[tuple[Item, Item]]:
    """Each item with each of the next few: texts may be long, and pairs are quadratic."""
    for index, item in enumerate(items):
        for other in items[index + 1 : index + 1 + _SWAP_REACH]:
            yield item, other


def _exchanged_spans(tokens: Tokens, one: Span, two: Span) -> Edit:
    """The edit that exchanges two spans; the words between them move if the lengths differ."""
    first, between = tokens[slice(*one)], tokens[one[1] : two[0]]
    new = [*tokens[slice(*two)], *between, *first]
    return {i: word for i, word in enumerate(new, one[0]) if word != tokens[i]}


def may_be_the_same(one: str, two: str) -> bool:
    """Whether two listed nouns may name the same thing."""
    things = THINGS[NOUN_FORMS[one].thing], THINGS[NOUN_FORMS[two].thing]
    return two in things[0].related or one in things[1].related


def _are_listed(tags: Sequence[str], one: int, two: int, word_class: str) -> bool:
    """Whether only words of the same class, conjunctions and commas stand between two words.

    >>> _are_listed(tag("a red , white and blue ball".split()), 1, 5, ADJECTIVE)
    True
    """
    return all(between in (*_JOINING, word_class) for between in tags[one + 1 : two])


def interchangeable(
    tokens: Tokens, tags: Sequence[str], phrases: Sequence[Span]
) -> list[list[Span]]:
    """Groups of noun phrases whose order says nothing: of lists, and of symmetric relations.

    >>> tokens = "a boy , a girl and a dog sit near a car".split()
    >>> interchangeable(tokens, tag(tokens), noun_phrases(tag(tokens)))
    [[(0, 2), (3, 5), (6, 8)], [(6, 8), (10, 12)]]
    """
    lists, pairs = [list(phrases[:1])], []
    for one, two in pairwise(phrases):
        if all(between in _JOINING for between in tags[one[1] : two[0]]):
            lists[-1].append(two)
            continue
        lists.append([two])
        if _are_symmetric(tokens, tags, one[1], two[0]):
            pairs.append([one, two])
    return [group for group in lists if len(group) > 1] + pairs


def _are_symmetric(tokens: Tokens, tags: Sequence[str], start: int, end: int) -> bool:
    """Whether the words [start, end) are a symmetric relation: ``is standing next to``."""
    if end - start > 1 and tokens[end - 1] in ("to", "from", "by"):
        end -= 1
    verbs = (AUXILIARY, VERB, ADVERB, SIGN)
    return tokens[end - 1] in SYMMETRIC and all(tag in verbs for tag in tags[start : end - 1])
