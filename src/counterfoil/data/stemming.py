"""Porter's algorithm for stripping the suffixes of English words, as published in 1980."""

from __future__ import annotations

from functools import lru_cache

_STEP_2 = (
    ("ational", "ate"), ("tional", "tion"), ("enci", "ence"), ("anci", "ance"), ("izer", "ize"),
    ("abli", "able"), ("alli", "al"), ("entli", "ent"), ("eli", "e"), ("ousli", "ous"),
    ("ization", "ize"), ("ation", "ate"), ("ator", "ate"), ("alism", "al"), ("iveness", "ive"),
    ("fulness", "ful"), ("ousness", "ous"), ("aliti", "al"), ("iviti", "ive"), ("biliti", "ble"),
)  # fmt: skip
_STEP_3 = (
    ("icate", "ic"), ("ative", ""), ("alize", "al"), ("iciti", "ic"), ("ical", "ic"),
    ("ful", ""), ("ness", ""),
)  # fmt: skip
_STEP_4 = (
    "al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou",
    "ism", "ate", "iti", "ous", "ive", "ize",
)  # fmt: skip


@lru_cache(maxsize=65536)
def stem(word: str) -> str:
    """The stem of a lower-case word; words of one or two letters are left alone.

    >>> [stem(word) for word in ("riding", "rides", "ponies", "happily")]
    ['ride', 'ride', 'poni', 'happili']
    """
    if len(word) <= 2:
        return word
    word = _plurals(word)
    word = _past_and_progressive(word)
    if word.endswith("y") and _has_vowel(word[:-1]):
        word = word[:-1] + "i"
    word = _replace_longest(word, _STEP_2)
    word = _replace_longest(word, _STEP_3)
    word = _strip_longest(word)
    return _tidy(word)


def _shape(word: str) -> str:
    """The word with each letter told as ``c`` or ``v``; y is a vowel after a consonant."""
    shape = ""
    for letter in word:
        vowel = letter in "aeiou" or (letter == "y" and shape.endswith("c"))
        shape += "v" if vowel else "c"
    return shape


def _measure(word: str) -> int:
    """How many times a vowel is followed by a consonant: Porter's m."""
    return _shape(word).count("vc")


def _has_vowel(word: str) -> bool:
    return "v" in _shape(word)


def _ends_in_double_consonant(word: str) -> bool:
    return len(word) >= 2 and word[-1] == word[-2] and _shape(word)[-1] == "c"


def _ends_like_hop(word: str) -> bool:
    """Consonant, vowel, consonant, and the last not w, x or y: Porter's *o."""
    return _shape(word).endswith("cvc") and word[-1] not in "wxy"


def _plurals(word: str) -> str:
    for suffix, left in (("sses", "ss"), ("ies", "i"), ("ss", "ss"), ("s", "")):
        if word.endswith(suffix):
            return word[: -len(suffix)] + left
    return word


def _past_and_progressive(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    for suffix in ("ed", "ing"):
        if word.endswith(suffix):
            base = word[: -len(suffix)]
            return _mended(base) if _has_vowel(base) else word
    return word


def _mended(base: str) -> str:
    if base.endswith(("at", "bl", "iz")):
        return base + "e"
    if _ends_in_double_consonant(base) and base[-1] not in "lsz":
        return base[:-1]
    if _measure(base) == 1 and _ends_like_hop(base):
        return base + "e"
    return base


def _replace_longest(word: str, rules: tuple[tuple[str, str], ...]) -> str:
    """Only the longest suffix that fits is tried, whether or not its condition then holds."""
    fitting = [(suffix, new) for suffix, new in rules if word.endswith(suffix)]
    if not fitting:
        return word
    suffix, new = max(fitting, key=lambda rule: len(rule[0]))
    base = word[: -len(suffix)]
    return base + new if _measure(base) > 0 else word


def _strip_longest(word: str) -> str:
    fitting = [suffix for suffix in _STEP_4 if word.endswith(suffix)]
    if not fitting:
        return word
    suffix = max(fitting, key=len)
    base = word[: -len(suffix)]
    if _measure(base) <= 1 or (suffix == "ion" and not base.endswith(("s", "t"))):
        return word
    return base


def _tidy(word: str) -> str:
    if word.endswith("e"):
        base = word[:-1]
        measure = _measure(base)
        if measure > 1 or (measure == 1 and not _ends_like_hop(base)):
            word = base
    if word.endswith("ll") and _measure(word[:-1]) > 1:
        word = word[:-1]
    return word
