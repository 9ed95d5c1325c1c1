"""Part-of-speech tags, noun phrases and relations of captions, by word lists and rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterfoil.data.text.words import STOP_WORDS
from counterfoil.foils.lexicon import (
    ADJECTIVE,
    ADJECTIVE_ENDINGS,
    ADJECTIVES,
    ADVERB,
    AUXILIARY,
    CLOSED,
    COLORS,
    CONJUNCTION,
    DETERMINER,
    ED_NOUNS,
    ING_NOUNS,
    IRREGULAR_PLURALS,
    LONG_RELATIONS,
    LY_NOUNS,
    NOUN,
    NOUN_FORMS,
    NUMBER,
    NUMERALS,
    PASTS,
    PLACES,
    POSSESSIVE,
    PREPOSITION,
    PRONOUN,
    PURPOSES,
    RELATIONS,
    SIGN,
    TO,
    USUALLY_PLURALS,
    VERB,
    VERBS,
)

Tokens = Sequence[str]

_DETERMINERS = frozenset(
    {"a", "an", "the", "this", "that", "these", "those", "some", "another", "other", *NUMERALS}
    | {"his", "her", "its", "their", "my", "our", "your"}
)
_PRONOUNS = frozenset({"it", "him", "them"})
_LONGEST_PHRASE = 5
_LONGEST_LINK = 3

_WITHIN_PHRASE = (DETERMINER, ADJECTIVE, NUMBER, POSSESSIVE)
_CLAUSE_STARTS = ("while", "as", "who", "that", "which", "and", "but", "where", "when", ",", ".")

_ALSO_NOUNS = frozenset(
    {"male", "female", "adult", "blond", "blonde", "brunette", "left", "right", "top", "bottom"}
    | {"orange", "native", "light", "square", "middle", "background", "foreground", "plastic"}
)


@dataclass(frozen=True)
class Relating:
    """Words [start, end) that relate a subject to the object at ``object`` (its noun).

    ``object`` is None if it is a pronoun.
    """

    start: int
    end: int
    object: int | None


def is_noun(tokens: Tokens, index: int) -> bool:
    """Whether the word is a listed noun that does not qualify the next noun."""
    if not 0 <= index < len(tokens) or tokens[index] not in NOUN_FORMS:
        return False
    if tokens[index - 1 : index + 1] == ["hot", "dog"]:
        return False
    return index + 1 == len(tokens) or tokens[index + 1] not in NOUN_FORMS


def noun_after(tokens: Tokens, start: int) -> int | None:
    """Index of the noun of the phrase that begins at ``start``; None if it is not a listed noun.

    >>> noun_after("on a big red ball".split(), 1)
    4
    """
    for index in range(start, min(start + _LONGEST_PHRASE, len(tokens))):
        if is_noun(tokens, index):
            return index
        word = tokens[index]
        if word in _DETERMINERS or word in NOUN_FORMS:
            continue
        if word in STOP_WORDS or word in RELATIONS or not word.replace("-", "").isalnum():
            return None
    return None


def relations_of(tokens: Tokens) -> list[Relating]:
    """The relations of a caption that have an object; the longest match wins."""
    relations = []
    index = 0
    while index < len(tokens):
        end = _end_of_relation(tokens, index)
        related = _relating(tokens, index, end) if end is not None else None
        if related is not None:
            relations.append(related)
            index = related.end
        else:
            index += 1
    return relations


def _end_of_relation(tokens: Tokens, index: int) -> int | None:
    for length in (3, 2):
        if tuple(tokens[index : index + length]) in LONG_RELATIONS:
            return index + length
    if tokens[index] not in RELATIONS:
        return None
    return index + 2 if tokens[index + 1 : index + 2] == ["by"] else index + 1


def _relating(tokens: Tokens, start: int, end: int) -> Relating | None:
    if end < len(tokens) and tokens[end] in _PRONOUNS:
        return Relating(start, end, None)
    noun = noun_after(tokens, end)
    return None if noun is None else Relating(start, end, noun)


def subject_of(tokens: Tokens, relating: Relating) -> int | None:
    """Index of the noun before a relation, skipping ``is``, ``sitting`` or ``to the``."""
    for index in range(relating.start - 1, max(-1, relating.start - 2 - _LONGEST_LINK), -1):
        if is_noun(tokens, index):
            return index
        word = tokens[index]
        linking = word in ("is", "are", "was", "were", "to", "the") or word.endswith("ing")
        if not linking or word in RELATIONS:
            return None
    return None


def is_plural(tokens: Tokens, index: int) -> bool:
    """Whether the noun at ``index`` is plural, such as the sheep of "two sheep"."""
    form = NOUN_FORMS[tokens[index]]
    if form.is_singular != form.is_plural:
        return form.is_plural
    for before in reversed(tokens[max(0, index - _LONGEST_PHRASE) : index]):
        if before in ("a", "an", "one", "the", "this", "that"):
            return False
        if before in STOP_WORDS:
            break
    return True


# Word classes by lists, endings and neighbors.


def tag(tokens: Sequence[str]) -> list[str]:
    """A tag for each word, decided from left to right.

    >>> tag("a smiling man rides a red bike".split())
    ['determiner', 'adjective', 'noun', 'verb', 'determiner', 'adjective', 'noun']
    """
    tags: list[str] = []
    for index in range(len(tokens)):
        tags.append(_tag(tokens, tags, index))
    return tags


def _tag(tokens: Sequence[str], tags: list[str], index: int) -> str:
    word, before = tokens[index], tags[-1] if tags else ""
    if word in CLOSED:
        return _closed(tokens, tags, index)
    if tuple(tokens[index : index + 2]) in LONG_RELATIONS and word not in PLACES:
        return PREPOSITION  # next to
    if word == "next" and _may_be_noun(tokens, index + 1):
        return ADJECTIVE
    if not word[0].isalnum():
        return SIGN
    if word.isdigit():
        return NUMBER
    if before == TO and _is_infinitive(tokens, index):
        return VERB
    if _is_ing(word):
        return _ing(tokens, before, index)
    if _is_past(word) and word not in ADJECTIVES:
        return _past(tokens, before, index)
    if word in ADJECTIVES or _ends_as_adjective(word):
        return _adjective(tokens, before, index)
    if word.endswith("ly") and word not in LY_NOUNS:
        return ADVERB
    return VERB if _is_finite(tokens, tags, index) else NOUN


def _closed(tokens: Sequence[str], tags: list[str], index: int) -> str:
    word = tokens[index]
    after = CLOSED.get(tokens[index + 1]) if index + 1 < len(tokens) else None
    if word in ("has", "have", "had", "having") and after not in (AUXILIARY, ADVERB, TO):
        return AUXILIARY if index + 1 == len(tokens) or _is_past(tokens[index + 1]) else VERB
    if word == "one" and not _may_be_noun(tokens, index + 1):
        return PRONOUN
    if word == "her" and after is not None:
        return PRONOUN
    if word == "that" and (not tags or tags[-1] in (PREPOSITION, VERB)):
        return DETERMINER
    if word == "back" and tags and tags[-1] in _WITHIN_PHRASE:
        return NOUN
    return CLOSED[word]


def _is_infinitive(tokens: Sequence[str], index: int) -> bool:
    """Whether the word after ``to`` is a verb: a listed one, or one with an object."""
    known = tokens[index] in VERBS or _may_begin_object(tokens, index + 1, (DETERMINER,))
    return known and tokens[index] not in NOUN_FORMS


def _is_ing(word: str) -> bool:
    return word.endswith("ing") and len(word) > 4 and word not in ING_NOUNS


def _is_past(word: str) -> bool:
    return word in PASTS or (word.endswith("ed") and len(word) > 4 and word not in ED_NOUNS)


def _ends_as_adjective(word: str) -> bool:
    return word.endswith(ADJECTIVE_ENDINGS) and word not in NOUN_FORMS and len(word) > 5


def _may_be_noun(tokens: Sequence[str], index: int) -> bool:
    """Whether the word can continue the noun phrase before it."""
    if index >= len(tokens):
        return False
    word = tokens[index]
    if word in CLOSED or not word[0].isalnum() or (word.endswith("ly") and word not in LY_NOUNS):
        return False
    if _is_ing(word):
        return word in PURPOSES and _may_be_noun(tokens, index + 1)
    if _is_past(word):
        return word not in PASTS and _may_be_noun(tokens, index + 1)
    return not (_is_third_person(word) and word not in NOUN_FORMS and word not in USUALLY_PLURALS)


def _ing(tokens: Sequence[str], before: str, index: int) -> str:
    goes_on = _may_be_noun(tokens, index + 1)
    if before in _WITHIN_PHRASE and not _phrase_is_over(tokens, index):
        if not goes_on:
            return NOUN if before in (DETERMINER, POSSESSIVE) else VERB
        return NOUN if tokens[index] in PURPOSES else ADJECTIVE
    names_purpose = goes_on and before == PREPOSITION and tokens[index] in PURPOSES
    return NOUN if names_purpose else VERB


def _phrase_is_over(tokens: Sequence[str], index: int) -> bool:
    """Whether no noun can follow: ``some`` wearing hats, a girl ``in red`` holding."""
    last = tokens[index - 1] if index else ""
    dressed = last in COLORS and index > 1 and tokens[index - 2] in ("in", "wearing")
    return dressed or last in ("some", "one", "another", "each", "all", "both")


def _past(tokens: Sequence[str], before: str, index: int) -> str:
    goes_on = _may_be_noun(tokens, index + 1)
    listed = tokens[index + 1 : index + 2] in (["and"], [","], ["or"])
    if before in (*_WITHIN_PHRASE, "", PREPOSITION, ADVERB) and (goes_on or listed):
        return ADJECTIVE
    return ADJECTIVE if before in (CONJUNCTION, NOUN) and goes_on else VERB


def _adjective(tokens: Sequence[str], before: str, index: int) -> str:
    """An adjective, unless it ends its phrase: ``an orange``, ``a young male``, ``the right``."""
    if _may_be_noun(tokens, index + 1):
        return ADJECTIVE
    if before in _WITHIN_PHRASE and tokens[index] in _ALSO_NOUNS:
        return NOUN
    listed = tokens[index + 1 : index + 2] in (["and"], [","], ["or"], ["&"])
    return NOUN if before in (DETERMINER, POSSESSIVE) and not listed else ADJECTIVE


def _is_third_person(word: str) -> bool:
    if not word.endswith("s") or word.endswith("ss"):
        return False
    stems = {word[:-1], word[:-2], word[:-3] + "y"} if word.endswith("es") else {word[:-1]}
    return not stems.isdisjoint(VERBS)


def _is_finite(tokens: Sequence[str], tags: list[str], index: int) -> bool:
    """Whether the word is a finite verb (``a man rides``), not a noun of the same form."""
    word, before = tokens[index], tags[-1] if tags else ""
    third, plain = _is_third_person(word), word in VERBS
    if not (third or plain):
        return False
    if third and word not in NOUN_FORMS and _phrase_is_over(tokens, index):
        return True
    if before in (*_WITHIN_PHRASE, PREPOSITION, ""):
        return False
    if before == AUXILIARY:
        return plain
    if before in (CONJUNCTION, SIGN):
        has_verb = VERB in tags or AUXILIARY in tags
        return has_verb and word not in USUALLY_PLURALS and not (plain and word in NOUN_FORMS)
    if _clause_has_verb(tokens, tags):
        return False
    if third:
        return word not in USUALLY_PLURALS or _may_begin_object(
            tokens, index + 1, (DETERMINER, PREPOSITION, TO)
        )
    return before in (PRONOUN, ADVERB) or _is_plural_subject(tokens, tags, index)


def _is_plural_subject(tokens: Sequence[str], tags: list[str], index: int) -> bool:
    """``people`` walk; ``a boy and a girl`` play, if no verb came before."""
    if _is_plural(tokens[index - 1]):
        return True
    first = VERB not in tags and AUXILIARY not in tags
    return first and "and" in tokens[:index] and tokens[index] not in NOUN_FORMS


def _is_plural(word: str) -> bool:
    return word in IRREGULAR_PLURALS or (word.endswith("s") and not word.endswith("ss"))


def _may_begin_object(tokens: Sequence[str], index: int, tags: Sequence[str]) -> bool:
    return index < len(tokens) and CLOSED.get(tokens[index]) in tags


def _clause_has_verb(tokens: Sequence[str], tags: list[str]) -> bool:
    """A finite verb since the clause began; participles after a noun do not count."""
    for index in range(len(tags) - 1, -1, -1):
        if tokens[index] in _CLAUSE_STARTS:
            return False
        if tags[index] == AUXILIARY or (tags[index] == VERB and not _is_participle(tokens[index])):
            return True
    return False


def _is_participle(word: str) -> bool:
    return _is_ing(word) or _is_past(word)


def noun_phrases(tags: Sequence[str]) -> list[tuple[int, int]]:
    """Spans [start, end) of noun phrases: determiners, numbers and adjectives before nouns.

    >>> noun_phrases(tag("a smiling man rides a red bike".split()))
    [(0, 3), (4, 7)]
    """
    spans, start = [], 0
    for index, word_class in enumerate(tags):
        ends = word_class == NOUN and tags[index + 1 : index + 2] != [NOUN]
        if ends:
            spans.append((start, index + 1))
        if ends or word_class not in (*_WITHIN_PHRASE, NOUN):
            start = index + 1
    return spans


def have_same_form(word_class: str, one: str, two: str) -> bool:
    """Whether two words of a class agree: nouns in number, verbs in form."""
    if word_class == NOUN:
        return not _numbers(one).isdisjoint(_numbers(two))
    return word_class != VERB or _verb_form(one) == _verb_form(two)


def keeps_word_class(tokens: Sequence[str], index: int, new: str) -> bool:
    """Whether a new word would have the same part of speech and form as the word it replaces.

    The tags of the whole sentence must not change. Context alone is not enough: after *a*, every
    adjective looks like a noun (*a black in red*), so the new word must be a known noun.

    >>> keeps_word_class("a man in red".split(), 1, "woman")
    True
    >>> keeps_word_class("a man in red".split(), 1, "black")
    False
    """
    tags = tag(tokens)
    exchanged = [*tokens[:index], new, *tokens[index + 1 :]]
    if tag(exchanged) != tags:
        return False
    old, kind = tokens[index], tags[index]
    if kind == NOUN:
        return _is_a_noun(new) and not _numbers(old).isdisjoint(_numbers(new))
    if kind == VERB:
        return _verb_form(old) == _verb_form(new)
    if kind == ADJECTIVE:
        known = new in ADJECTIVES or _ends_as_adjective(new)
        return known or (_is_participle(new) and _verb_form(old) == _verb_form(new))
    if kind == ADVERB and old not in CLOSED:
        return new not in CLOSED
    return CLOSED.get(old) == CLOSED.get(new)


def _is_a_noun(word: str) -> bool:
    """Whether a word is a noun: listed, or without the listing or ending of another class."""
    if word in NOUN_FORMS or word in _ALSO_NOUNS or word in USUALLY_PLURALS:
        return True
    others = word in CLOSED or word in ADJECTIVES or word in VERBS or _ends_as_adjective(word)
    return not (others or _is_participle(word) or _is_third_person(word))


def _numbers(noun: str) -> set[str]:
    """The grammatical numbers that a noun can have: *sheep* has both."""
    form = NOUN_FORMS.get(noun)
    if form is None:
        return {"plural" if _is_plural(noun) else "singular"}
    listed = (("singular", form.is_singular), ("plural", form.is_plural))
    return {number for number, has in listed if has}


def _verb_form(word: str) -> str:
    if _is_ing(word):
        return "ing"
    if _is_past(word):
        return "past"
    return "third" if _is_third_person(word) else "plain"
