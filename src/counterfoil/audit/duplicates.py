"""Captions that say nearly the same of different images: for either, the other is no negative."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from counterfoil.data.stemming import stem
from counterfoil.data.stop_words import STOP_WORDS
from counterfoil.data.words import words

SIMILAR = 0.8
LEAST_WORDS = 2

Key = frozenset[str]


@dataclass(frozen=True)
class Duplicate:
    """Other images with nearly the same caption; ``caption`` is the likest, one of theirs.

    ``images`` holds the own image too: captions that are alike share one set.
    """

    images: frozenset[int]
    own: int
    caption: int
    similarity: float

    @property
    def others(self) -> int:
        return len(self.images - {self.own})


def content(text: str) -> Key:
    """Stems of the words that say what is shown.

    >>> sorted(content("There is a man riding on two horses."))
    ['hors', 'man', 'ride', 'two']
    """
    spoken = (word for word in words(text) if any(letter.isalnum() for letter in word))
    return frozenset(stem(word) for word in spoken if word not in STOP_WORDS)


def near_duplicates(
    texts: Mapping[int, str], image_of: Sequence[int], similar: float = SIMILAR
) -> dict[int, Duplicate]:
    """Captions (by number) that share at least ``similar`` of their words with another image's.

    The share is |both| / |either| of the sets of stems, function words left out. Captions of fewer
    than two such words are not looked at: they are alike without saying the same.
    """
    groups: dict[Key, list[int]] = defaultdict(list)
    for number, text in texts.items():
        key = content(text)
        if len(key) >= LEAST_WORDS:
            groups[key].append(number)
    keys = list(groups)
    alike: dict[Key, list[tuple[float, Key]]] = {key: [(1.0, key)] for key in keys}
    for one, other, similarity in similar_sets(keys, similar):
        alike[keys[one]].append((similarity, keys[other]))
        alike[keys[other]].append((similarity, keys[one]))
    found: dict[int, Duplicate] = {}
    for key, numbers in groups.items():
        ranked = sorted(alike[key], key=lambda match: -match[0])
        near = [(s, number) for s, other in ranked for number in groups[other]]
        images = frozenset(int(image_of[number]) for _, number in near)
        for number in numbers:
            own = int(image_of[number])
            best = next(((s, other) for s, other in near if int(image_of[other]) != own), None)
            if best is not None:
                found[number] = Duplicate(images, own, best[1], best[0])
    return found


def similar_sets(sets: Sequence[Key], similar: float) -> Iterator[tuple[int, int, float]]:
    """Pairs of sets with a Jaccard index of at least ``similar``, each pair once.

    Two such sets share one of their rarest few words, so only sets that do are compared: the
    prefix filter of Chaudhuri et al. (2006) and Bayardo et al. (2007).
    """
    frequency = Counter(word for each in sets for word in each)
    having: dict[str, list[int]] = defaultdict(list)
    # short sets first: whatever is in the table already is no longer than the one at hand
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
