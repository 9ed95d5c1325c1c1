"""Plant errors into the captions of a split, of a known kind and at a known rate.

The kinds *random* and *noun* are those of LEMoN (Zhang et al., ICML 2025): a caption is replaced by
one of another image, drawn at random or among those that share a noun with it. The kind *word*
keeps the caption and makes it false in one place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from counterfoil.core.errors import ConfigError, DataError, nearest
from counterfoil.data.duplicates import spoken
from counterfoil.data.pairs import Split
from counterfoil.data.text.words import STOP_WORDS, words
from counterfoil.evaluation.foils.sets import foils_by_rule
from counterfoil.evaluation.foils.truth import has_truth
from counterfoil.evaluation.words.cases import FoilCase, make_foils
from counterfoil.foils.grammar import tag
from counterfoil.foils.lexicon import NOUN

Marks = NDArray[np.bool_]
Noise = Literal["random", "noun", "word"]
NOISES: tuple[str, ...] = get_args(Noise)

WORD_KINDS = ("noun", "attribute", "numeral", "relation")
"""Rules that exchange a word of a caption, if nothing is known about its image."""

SHARE = 0.1
"""Default share of the images that is known to be clean, and of those with known labels."""


@dataclass(frozen=True)
class NoisySplit:
    """A split with planted errors.

    Masks over its captions: ``wrong``, those with an error; ``clean``, those of images that the
    owner has checked and that have none; ``labeled``, those of images whose errors the owner has
    marked. Detection is measured on the others.
    """

    split: Split
    noise: Noise
    rate: float
    seed: int
    wrong: Marks
    clean: Marks
    labeled: Marks

    @property
    def measured(self) -> Marks:
        return ~(self.clean | self.labeled)


def check_noise(noise: str, rate: float) -> None:
    """Refuse an unknown kind of noise, and an impossible rate."""
    if noise not in NOISES:
        known = ", ".join(NOISES)
        raise ConfigError(f"noise: unknown kind '{noise}'{nearest(noise, NOISES)} (known: {known})")
    if not 0.0 < rate < 1.0:
        raise ConfigError(f"noise: expected a rate above 0 and below 1, got {rate}")


def plant(
    split: Split,
    noise: str,
    rate: float,
    seed: int,
    *,
    clean: float = SHARE,
    labeled: float = SHARE,
    donors: Split | None = None,
) -> NoisySplit:
    """Make a share ``rate`` of the captions wrong, outside a ``clean`` share of the images.

    If too few captions can be made wrong in this way, as those without a noun, all of them are.
    Captions of other images come from the split itself, as in LEMoN, where they also stay at their
    own image; or from ``donors``, each at most once and none that the split has, so that there is
    no copy of them.
    """
    check_noise(noise, rate)
    if donors is not None and noise == "word":
        raise ConfigError("noise: 'word' changes captions in place and takes none from donors")
    if min(clean, labeled) < 0 or clean + labeled >= 1:
        raise ConfigError(
            f"noise: expected clean and labeled shares of less than 1 in all, got {clean} and "
            f"{labeled}"
        )
    if len(split) < 2:
        raise DataError(f"split '{split.name}': noise needs at least two images")
    rng = np.random.default_rng([seed, NOISES.index(noise)])
    order = rng.permutation(len(split))
    first, second = round(clean * len(split)), round((clean + labeled) * len(split))
    checked, marked = (
        np.isin(split.image_of, part) for part in (order[:first], order[first:second])
    )
    texts = list(split.texts)
    candidates = np.flatnonzero(~checked)
    wanted, wrong = round(rate * len(candidates)), np.zeros(len(texts), dtype=np.bool_)
    makers = {"random": _random, "noun": _noun, "word": _word}
    made, shuffled = 0, rng.permutation(candidates)
    if donors is None:
        replacements = makers[noise](split, shuffled, rng, seed)
    else:
        replacements = _donated(split, shuffled, rng, donors, shared=noise == "noun")
    for caption, text in replacements:
        if made == wanted:
            break
        if spoken(text) != spoken(texts[caption]):  # two images may have the same caption
            texts[caption], wrong[caption] = text, True
            made += 1
    if not made:
        raise DataError(f"split '{split.name}': no caption can be made wrong by noise '{noise}'")
    kind: Noise = noise  # type: ignore[assignment]
    return NoisySplit(with_texts(split, texts), kind, rate, seed, wrong, checked, marked)


def with_texts(split: Split, texts: list[str]) -> Split:
    """The split with other captions; ``extras``, which would describe the old ones, are dropped."""
    ends = list(accumulate(len(captions) for captions in split.captions))
    starts = [0, *ends[:-1]]
    captions = [texts[start:end] for start, end in zip(starts, ends, strict=True)]
    return replace(split, captions=captions, extras=None)


def one_caption_each(split: Split, seed: int) -> Split:
    """The split with one caption per image, drawn at random, as in LEMoN's protocol."""
    rng = np.random.default_rng(seed)
    captions = [
        [texts[int(rng.integers(len(texts)))]] if len(texts) else [] for texts in split.captions
    ]
    return replace(split, captions=captions, extras=None)


Made = Iterator[tuple[int, str]]
Numbers = NDArray[np.int64]


def _random(split: Split, order: Numbers, rng: np.random.Generator, seed: int) -> Made:
    owner = split.image_of
    if len(np.unique(owner)) < 2:
        raise DataError(
            f"split '{split.name}': random noise needs captions of at least two images, got those "
            f"of {len(np.unique(owner))}"
        )
    for caption in order.tolist():
        donor = int(rng.integers(len(owner)))
        while owner[donor] == owner[caption]:
            donor = int(rng.integers(len(owner)))
        yield caption, split.texts[donor]


def _noun(split: Split, order: Numbers, rng: np.random.Generator, seed: int) -> Made:
    nouns = [nouns_of(text) for text in split.texts]
    having: dict[str, list[int]] = defaultdict(list)
    for caption, own in enumerate(nouns):
        for noun in own:
            having[noun].append(caption)
    owner = split.image_of
    for caption in order.tolist():
        for noun in rng.permutation(nouns[caption]).tolist():
            donors = having[noun]
            if owner[donors[0]] == owner[donors[-1]]:  # they are sorted: no other image has it
                continue
            donor = donors[int(rng.integers(len(donors)))]
            while owner[donor] == owner[caption]:
                donor = donors[int(rng.integers(len(donors)))]
            yield caption, split.texts[donor]
            break


def _donated(
    split: Split, order: Numbers, rng: np.random.Generator, donors: Split, *, shared: bool
) -> Made:
    """Captions of another split that this one lacks, each once; ``shared``: with a noun of both."""
    own = set(map(spoken, split.texts))
    others = {spoken(text): text for text in donors.texts if spoken(text) not in own}
    pool = rng.permutation(np.array(list(others.values()), dtype=object)).tolist()
    having: dict[str, list[int]] = defaultdict(list)
    if shared:
        for number, text in enumerate(pool):
            for noun in nouns_of(text):
                having[noun].append(number)
    free = np.ones(len(pool), dtype=np.bool_)
    everything = list(range(len(pool)))
    for caption in order.tolist():
        nouns = rng.permutation(nouns_of(split.texts[caption])).tolist() if shared else [""]
        for noun in nouns:
            numbers = having[noun] if shared else everything
            while numbers and not free[numbers[-1]]:
                numbers.pop()
            if numbers:
                free[numbers[-1]] = False
                yield caption, pool[numbers.pop()]
                break


def nouns_of(text: str) -> list[str]:
    """The different nouns of a caption, in order.

    >>> nouns_of("A man rides a red bike past a man.")
    ['man', 'bike']
    """
    tokens = words(text)
    tags = tag(tokens)
    nouns = (w for w, t in zip(tokens, tags, strict=True) if t == NOUN and w not in STOP_WORDS)
    return list(dict.fromkeys(nouns))


def _word(split: Split, order: Numbers, rng: np.random.Generator, seed: int) -> Made:
    """False for sure if the images' contents are known; else by rule, which may fail to be."""
    if has_truth(split):
        foils = {caption: case.foil for caption, case in drawn_foils(split, seed).items()}
    else:
        made = foils_by_rule(split, WORD_KINDS, 1, None, seed)
        foils = {caption: each[0].text for caption, each in made.items() if each}
    for caption in order.tolist():
        if caption in foils:
            yield caption, foils[caption]


def drawn_foils(split: Split, seed: int) -> dict[int, FoilCase]:
    """The foil of each caption of drawn scenes that has one, by the caption's number."""
    cases = make_foils(split, seed=seed).cases
    by_text = {(case.image, case.caption): case for case in cases}
    keys = zip(split.image_of.tolist(), split.texts, strict=True)
    return {number: by_text[key] for number, key in enumerate(keys) if key in by_text}
