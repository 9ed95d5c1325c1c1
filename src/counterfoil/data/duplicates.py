"""Duplicate and near-duplicate captions of different images, and images that look alike.

A caption is no negative of an image that has a duplicate of it. Identical captions are equal apart
from case, white space and punctuation; two of them at different images are twins.
"""

from __future__ import annotations

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from counterfoil.data.text.words import STOP_WORDS, stem, words

MIN_SIMILARITY = 0.8
MIN_WORDS = 2

MANY_TWINS_SHARE = 0.01
"""Share of captions with a twin above which commands warn that recalls say little."""

MIN_WORDS_FOR_ONE_MORE = 5
"""Fewest content words of a caption whose near duplicate may have one less (`MIN_SIMILARITY`)."""

Key = frozenset[str]
Indices = NDArray[np.int64]

MAX_HASH_BITS = 3
"""Bits of 64 in which the hashes of look-alikes may differ."""

MEAN_LEVELS, MOST_LEVELS = 6.0, 32
"""Gray levels (of 255) by which their thumbnails may differ: on average, and at most."""

MAX_COMPARISONS = 100_000_000
"""Limit of compared pairs of hashes, so that the time is bounded for any images."""

_SIDE = 8
_BANDS = MAX_HASH_BITS + 1  # hashes that differ in n bits are equal in at least one of n + 1 bands
_THUMBNAILS = 1000  # limit per image; only flat images have that many with the same hash
_THUMBNAIL_COST = 32  # time of a thumbnail comparison, in comparisons of hashes


def spoken(text: str) -> str:
    """The words of a caption without case and punctuation; its signs if it has no words.

    >>> spoken(" A man's  dog, running! "), spoken("?!")
    ("a man 's dog running", '?!')
    """
    text = unicodedata.normalize("NFC", text)
    spoken_words = " ".join(word for word in words(text) if any(map(_is_spoken, word)))
    return spoken_words or "".join(text.split())


def _is_spoken(sign: str) -> bool:
    """Letters, digits, and combining marks (Unicode M), such as vowel signs."""
    return sign.isalnum() or unicodedata.category(sign)[0] == "M"


def identical_groups(texts: Sequence[str]) -> Indices:
    """Group number of each caption; identical captions share one.

    >>> identical_groups(["A dog.", "a cat", "a dog"]).tolist()
    [0, 1, 0]
    """
    numbers: dict[str, int] = {}
    cache: dict[str, int] = {}  # by exact text, since `spoken` is slow
    for text in texts:
        if text not in cache:
            cache[text] = numbers.setdefault(spoken(text), len(numbers))
    return np.fromiter((cache[text] for text in texts), np.int64, len(texts))


def images_of_groups(groups: Indices, image_of: Indices) -> tuple[Indices, Indices]:
    """Distinct (group, image) pairs as groups [n] and images [n]."""
    width = int(image_of.max(initial=0)) + 1
    pairs = np.unique(groups * width + image_of)
    return pairs // width, pairs % width


def with_twin(groups: Indices, image_of: Indices) -> NDArray[np.bool_]:
    """Mask [captions]: True if the same group has a caption of another image.

    >>> with_twin(np.array([0, 1, 0, 2, 2]), np.array([0, 0, 1, 2, 2])).tolist()
    [True, False, True, False, False]
    """
    counts = np.bincount(images_of_groups(groups, image_of)[0], minlength=1)
    return np.asarray(counts[groups] > 1)


@dataclass(frozen=True)
class DuplicateCounts:
    """Captions of a split with an identical (``exact``) or only a ``near`` duplicate elsewhere."""

    exact: int
    near: int


def count_duplicates(texts: Sequence[str], image_of: Indices) -> DuplicateCounts:
    """Exact and near duplicates among the captions of a split, in time linear in their number.

    Two captions are near duplicates if they have the same set of content words (at least two), or
    if one of them has exactly one content word more, and at least five.
    """
    groups = identical_groups(texts)
    exact = with_twin(groups, image_of)
    key_of, keys = _numbered_keys(texts, groups)
    counted = np.flatnonzero(key_of >= 0)
    shared = np.zeros(len(keys), dtype=np.bool_)  # keys of captions of two or more images
    shared[key_of[counted[with_twin(key_of[counted], image_of[counted])]]] = True
    image = np.zeros(len(keys), dtype=np.int64)  # the image of each key that is not shared
    image[key_of[counted]] = image_of[counted]
    near = shared.copy()
    for one, other in _one_word_more(keys):
        if shared[one] or shared[other] or image[one] != image[other]:
            near[one] = near[other] = True
    is_near = np.zeros(len(texts), dtype=np.bool_)
    is_near[counted] = near[key_of[counted]]
    return DuplicateCounts(int(exact.sum()), int((is_near & ~exact).sum()))


def _numbered_keys(texts: Sequence[str], groups: Indices) -> tuple[Indices, dict[Key, int]]:
    """Number of each caption's set of content words (-1: too small), and the sets."""
    numbers: dict[Key, int] = {}
    first = np.unique(groups, return_index=True)[1]
    of_group = np.full(len(first), -1, dtype=np.int64)
    for group, index in enumerate(first.tolist()):
        key = content(texts[index])
        if len(key) >= MIN_WORDS:
            of_group[group] = numbers.setdefault(key, len(numbers))
    return of_group[groups], numbers


def _one_word_more(keys: Mapping[Key, int]) -> Iterator[tuple[int, int]]:
    """Pairs of sets; the first has exactly one word more than the second."""
    for key, number in keys.items():
        if len(key) >= MIN_WORDS_FOR_ONE_MORE:
            for word in key:
                other = keys.get(key - {word})
                if other is not None:
                    yield number, other


@dataclass(frozen=True)
class Duplicate:
    """Images with nearly the same caption; ``caption`` is the most similar one of another image.

    ``images`` includes the caption's own image, so that similar captions can share one set.
    """

    images: frozenset[int]
    own: int
    caption: int
    similarity: float

    @property
    def others(self) -> int:
        return len(self.images - {self.own})


def content(text: str) -> Key:
    """Stems of the content words.

    >>> sorted(content("There is a man riding on two horses."))
    ['hors', 'man', 'ride', 'two']
    """
    tokens = (word for word in words(text) if any(letter.isalnum() for letter in word))
    return frozenset(stem(word) for word in tokens if word not in STOP_WORDS)


def near_duplicates(
    texts: Mapping[int, str], image_of: Sequence[int], similar: float = MIN_SIMILARITY
) -> dict[int, Duplicate]:
    """Captions (by number) that share at least ``similar`` of their words with another image's.

    The similarity is the Jaccard index of the sets of stems, without function words. Captions with
    fewer than two stems are skipped, as such sets are often equal by chance.
    """
    groups: dict[Key, list[int]] = defaultdict(list)
    for number, text in texts.items():
        key = content(text)
        if len(key) >= MIN_WORDS:
            groups[key].append(number)
    keys = list(groups)
    similar_keys: dict[Key, list[tuple[float, Key]]] = {key: [(1.0, key)] for key in keys}
    for one, other, similarity in similar_sets(keys, similar):
        similar_keys[keys[one]].append((similarity, keys[other]))
        similar_keys[keys[other]].append((similarity, keys[one]))
    result: dict[int, Duplicate] = {}
    for key, numbers in groups.items():
        ranked = sorted(similar_keys[key], key=lambda match: -match[0])
        near = [(s, number) for s, other in ranked for number in groups[other]]
        images = frozenset(int(image_of[number]) for _, number in near)
        for number in numbers:
            own = int(image_of[number])
            best = next(((s, other) for s, other in near if int(image_of[other]) != own), None)
            if best is not None:
                result[number] = Duplicate(images, own, best[1], best[0])
    return result


def similar_sets(sets: Sequence[Key], similar: float) -> Iterator[tuple[int, int, float]]:
    """Pairs of sets with a Jaccard index of at least ``similar``, each pair once.

    Two such sets share one of their rarest few words, so only sets that do are compared. This is
    the prefix filter of Chaudhuri et al. (2006) and Bayardo et al. (2007).
    """
    frequency = Counter(word for each in sets for word in each)
    having: dict[str, list[int]] = defaultdict(list)
    # short sets first, so that the table has only sets of at most the same size
    for one in sorted(range(len(sets)), key=lambda number: len(sets[number])):
        size = len(sets[one])
        ordered = sorted(sets[one], key=lambda word: (frequency[word], word))
        prefix = ordered[: size - ceil(similar * size - 1e-9) + 1]
        for other in {number for word in prefix for number in having[word]}:
            if len(sets[other]) < similar * size - 1e-9:
                continue
            shared = len(sets[one] & sets[other])
            index = shared / (size + len(sets[other]) - shared)
            if index >= similar - 1e-9:
                yield other, one, index
        for word in prefix:
            having[word].append(one)


# Copies of an image (scaled, or encoded again) are found by difference hash: 64 bits, each set if a
# cell is brighter than its left neighbor. Thumbnails then decide, since a hash has no colors and
# says little about large flat areas.
@dataclass(frozen=True)
class Look:
    """Difference hash and thumbnail [8, 8, 3] of an image."""

    hash: int
    thumbnail: NDArray[np.uint8]


@dataclass(frozen=True)
class Looks:
    """Hashes and thumbnails of the readable images of a split; ``indices`` are theirs there."""

    indices: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    thumbnails: NDArray[np.int16]

    @cached_property
    def brightness(self) -> NDArray[np.float32]:
        """Mean of each thumbnail, a cheap filter for images with few edges."""
        means: NDArray[np.float32] = self.thumbnails.mean(1, dtype=np.float32)
        return means

    @classmethod
    def of(cls, looks: Sequence[Look | None]) -> Looks:
        known = [(index, look) for index, look in enumerate(looks) if look is not None]
        thumbnails = np.zeros((len(known), _SIDE * _SIDE * 3), dtype=np.int16)
        for row, (_, look) in enumerate(known):
            thumbnails[row] = look.thumbnail.reshape(-1)
        return cls(
            np.array([index for index, _ in known], dtype=np.int64),
            np.array([look.hash for _, look in known], dtype=np.uint64),
            thumbnails,
        )


@dataclass(frozen=True)
class LookAlikes:
    """Pairs of images, one of each split; ``complete`` is False if the search was cut short."""

    pairs: list[tuple[int, int]]
    complete: bool


def look_at(image: Image.Image) -> Look:
    """Hash and thumbnail of an RGB image."""
    gray = image.convert("L").resize((_SIDE + 1, _SIDE), Image.Resampling.BOX)
    cells = np.asarray(gray, dtype=np.int16)
    signs = (cells[:, 1:] > cells[:, :-1]).reshape(-1)
    number = int.from_bytes(np.packbits(signs).tobytes(), "big")
    small = image.resize((_SIDE, _SIDE), Image.Resampling.BOX)
    return Look(number, np.asarray(small, dtype=np.uint8))


def find_look_alikes(one: Looks, other: Looks) -> LookAlikes:
    """For each image of ``other``, a look-alike in ``one``, if any.

    Only hashes that are equal in one of four bands are compared.
    """
    matches: dict[int, int] = {}
    left, complete = MAX_COMPARISONS, True
    for band in range(_BANDS):
        mine, theirs = _buckets(one.hashes, band), _buckets(other.hashes, band)
        for part in mine.keys() & theirs.keys() if left > 0 else ():
            new = [row for row in theirs[part] if row not in matches]
            compared, all_compared = _match(one, other, np.array(mine[part]), new, matches, left)
            left -= compared
            complete &= all_compared
    pairs = [(int(one.indices[a]), int(other.indices[b])) for b, a in sorted(matches.items())]
    return LookAlikes(pairs, complete=complete and left > 0)


def _buckets(hashes: NDArray[np.uint64], band: int) -> dict[int, list[int]]:
    """Rows by the value of one band of their hash."""
    width = np.uint64(64 // _BANDS)
    parts = (hashes >> (np.uint64(band) * width)) & np.uint64((1 << int(width)) - 1)
    rows: dict[int, list[int]] = defaultdict(list)
    for row, part in enumerate(parts.tolist()):
        rows[part].append(row)
    return rows


def _match(
    one: Looks,
    other: Looks,
    mine: NDArray[np.int64],
    theirs: Sequence[int],
    matches: dict[int, int],
    limit: int,
) -> tuple[int, bool]:
    """Add look-alikes of rows ``theirs`` among rows ``mine`` to ``matches``.

    Returns the cost in comparisons, and whether every row without a match was compared with all
    candidates.
    """
    compared, complete = 0, True
    for row in theirs:
        if compared > limit:
            complete = False
            break
        compared += len(mine)
        near = mine[_count_bits(one.hashes[mine] ^ other.hashes[row]) <= MAX_HASH_BITS]
        near = near[np.abs(one.brightness[near] - other.brightness[row]) <= MEAN_LEVELS]
        candidates = len(near)
        near = near[:_THUMBNAILS]
        compared += len(near) * _THUMBNAIL_COST
        levels = np.abs(one.thumbnails[near] - other.thumbnails[row])
        equal = near[(levels.mean(1) <= MEAN_LEVELS) & (levels.max(1, initial=0) <= MOST_LEVELS)]
        if len(equal):
            matches[row] = int(equal[0])
        elif candidates > len(near):
            complete = False
    return compared, complete


def _count_bits(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Number of set bits of each value (NumPy before 2 has no `bitwise_count`)."""
    masks = (0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F)
    one, two, four = (np.uint64(mask) for mask in masks)
    values = values - ((values >> np.uint64(1)) & one)
    values = (values & two) + ((values >> np.uint64(2)) & two)
    values = (values + (values >> np.uint64(4))) & four
    return (values * np.uint64(0x0101010101010101)) >> np.uint64(56)
