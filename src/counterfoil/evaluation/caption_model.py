"""An n-gram language model of captions: how likely a caption is, and which words fit its places."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from counterfoil.core.errors import DataError
from counterfoil.core.storage.reading import JSON_BYTES, read_unpacked
from counterfoil.data.text.words import MOST_LETTERS, words

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ORDER = 4
HELD_OUT = 50
"""One part in this many, the last, is left out of training, to measure the perplexity. Captions of
one image follow each other, so single captions would be too easy."""

_BITS = 15  # of a word id: four of them fit into 64 bits
_BEGIN, _END, _UNKNOWN = 0, 1, 2
_MAX_WORDS = 2**_BITS - 3
MIN_CAPTIONS = 100
"""Captions below which no model is trained."""

CANDIDATES = 200
"""Words that compete for a place in a caption: the likeliest after the words before it."""

CACHED_CONTEXTS = 10_000
"""Contexts whose likeliest words are cached: 3 KB each."""


@dataclass(frozen=True)
class _Level:
    """The n-grams of one order: sorted keys with counts, and sums per context."""

    keys: Ints
    counts: Floats
    contexts: Ints
    totals: Floats
    kinds: Floats
    discount: float

    @classmethod
    def of(cls, keys: Ints, counts: Ints) -> _Level:
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        contexts, starts = np.unique(keys >> _BITS, return_index=True)
        return cls(
            keys,
            counts.astype(np.float64),
            contexts,
            np.add.reduceat(counts.astype(np.float64), starts),
            np.diff(np.append(starts, len(keys))).astype(np.float64),
            once / (once + 2 * twice) if once else 0.5,
        )

    def probabilities(self, keys: Ints, shorter: Floats) -> Floats:
        """P(word | context), given the probabilities under the context without its first word."""
        at, is_known = _find(self.keys, keys)
        counts = np.where(is_known, self.counts[at], 0.0)
        at, is_known = _find(self.contexts, keys >> _BITS)
        totals = np.where(is_known, self.totals[at], 0.0)
        kinds = np.where(is_known, self.kinds[at], 0.0)
        seen = np.maximum(totals, 1.0)
        mixed = (
            np.maximum(counts - self.discount, 0) / seen + self.discount * kinds / seen * shorter
        )
        return np.where(totals > 0, mixed, shorter)


def _find(keys: Ints, wanted: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Where each of ``wanted`` is in the sorted keys, and whether it is there."""
    index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return index, keys[index] == wanted


class CaptionModel:
    """An n-gram model with interpolated Kneser–Ney smoothing; the same captions give the same.

    Words that occur once are unknown words. ``perplexity`` is measured on the captions held out.

    >>> model = CaptionModel(["a dog runs on the grass", "a cat sits on the mat"] * 100)
    >>> likely, unlikely = model.log_likelihood(["a dog sits on the grass", "grass the on a dog"])
    >>> bool(likely > unlikely)
    True
    """

    def __init__(self, captions: Sequence[str], order: int = ORDER) -> None:
        if len(captions) < MIN_CAPTIONS:
            raise DataError(
                f"{len(captions)} captions are too few for a language model; give at least "
                f"{MIN_CAPTIONS}"
            )
        self.order = order
        self._cache: dict[tuple[int, tuple[int, ...]], tuple[Ints, Floats]] = {}
        split = len(captions) - len(captions) // HELD_OUT
        train = [words(text) for text in captions[:split]]
        frequency = Counter(word for sentence in train for word in sentence)
        known = [word for word, count in frequency.most_common(_MAX_WORDS) if count > 1]
        self.ids = {word: number for number, word in enumerate(known, start=_UNKNOWN + 1)}
        self.names = ["", "", "", *known]
        self.captions, self.tokens = len(train), sum(map(len, train))
        self.levels = self._count(self._keys(train))
        rare = sum(frequency.values()) - sum(frequency[word] for word in known)
        counts = np.array([1, len(train), rare, *(frequency[word] for word in known)], np.float64)
        self.log_frequencies = np.log((counts + 1) / (counts + 1).sum())
        held_out = [words(text) for text in captions[split:]]
        losses = -np.log(self._probabilities(self._keys(held_out)))
        self.perplexity = math.exp(float(losses.mean()))

    @classmethod
    def read(cls, path: Path, order: int = ORDER) -> CaptionModel:
        """Train on a UTF-8 file with one caption per line, plain or compressed with gzip."""
        return cls(read_captions(path), order)

    def describe(self) -> str:
        return (
            f"{self.order}-gram caption model, {self.captions:,} captions, {self.tokens:,} words "
            f"({len(self.ids):,} different), perplexity {self.perplexity:.1f} on held-out captions"
        )

    def log_likelihood(self, texts: Sequence[str]) -> Floats:
        """Natural log of the probability of each text, with its end."""
        return np.array([float(one.sum()) for one in self.log_probabilities(texts)])

    def log_probabilities(self, texts: Sequence[str]) -> list[Floats]:
        """Of each word, given those before it, and of the end of the text."""
        sentences = [words(text) for text in texts]
        logs = np.log(self._probabilities(self._keys(sentences)))
        ends = np.cumsum([len(sentence) + 1 for sentence in sentences])
        return np.split(logs, ends[:-1])

    def in_context(self, text: str, candidates: int = CANDIDATES) -> list[dict[str, float]]:
        """For each word, the log probabilities of words in its place, given those on both sides.

        The caption's own word is always among them; ``""`` stands for all unknown words. The most
        likely ``candidates`` after the words before it compete.
        """
        ids = [self.ids.get(word, _UNKNOWN) for word in words(text)]
        return [
            dict(zip([self.names[rival] for rival in rivals.tolist()], logs.tolist(), strict=True))
            for rivals, logs in self._places(ids, candidates)
        ]

    def surprise(self, text: str) -> Floats:
        """−log P of each word given those on both sides of it."""
        ids = [self.ids.get(word, _UNKNOWN) for word in words(text)]
        places = zip(ids, self._places(ids, CANDIDATES), strict=True)
        return np.array([-logs[np.searchsorted(rivals, own)] for own, (rivals, logs) in places])

    def _places(self, ids: Sequence[int], candidates: int) -> list[tuple[Ints, Floats]]:
        """For each word id, those that compete for its place, sorted, and their log probabilities.

        The keys of a caption are looked up together: a search for few keys is mostly overhead.
        """
        padded = np.array([_BEGIN] * (self.order - 1) + list(ids) + [_END], dtype=np.int64)
        at = np.arange(self.order - 1, len(padded) - 1)
        own = self._probabilities(self._keys_at(padded, at))
        places = []
        for end, probability in zip(at.tolist(), own, strict=True):
            likeliest = self._likeliest(padded[end - self.order + 1 : end].tolist(), candidates)
            places.append(_with_own(*likeliest, padded[end], probability))
        following = self._log_of_following(padded, at, [rivals for rivals, _ in places])
        result = []
        for (rivals, probabilities), after in zip(places, following, strict=True):
            logs = np.log(probabilities) + after
            result.append((rivals, logs - np.logaddexp.reduce(logs)))
        return result

    def _likeliest(self, before: Sequence[int], candidates: int) -> tuple[Ints, Floats]:
        """The likeliest word ids after some words, sorted, and their probabilities.

        They depend on the longest context that is known, and many captions share these.
        """
        known = self._known_contexts(before)
        key = candidates, tuple(known)
        result = self._cache.get(key)
        if result is None:
            if len(self._cache) >= CACHED_CONTEXTS:
                self._cache.clear()
            scores = self._next_word(known)
            scores[[_BEGIN, _END]] = -1.0
            best = np.argpartition(-scores, min(candidates, len(scores) - 1))[:candidates]
            best = np.sort(best[scores[best] >= 0])
            self._cache[key] = result = best, scores[best]
        return result

    def _known_contexts(self, before: Sequence[int]) -> list[int]:
        """Of each level up to the first that does not know it, the index of the context."""
        indices: list[int] = []
        context = 0
        for size, level in enumerate(self.levels):
            if size:
                context |= before[-size] << (_BITS * (size - 1))
            at = int(np.searchsorted(level.contexts, context))
            if at == len(level.contexts) or level.contexts[at] != context:
                break
            indices.append(at)
        return indices

    def _next_word(self, known: Sequence[int]) -> Floats:
        """P of every word id after some words, whose contexts are `_known_contexts`."""
        result = np.full(len(self.ids) + 3, 1.0 / (len(self.ids) + 2))
        for at, level in zip(known, self.levels, strict=False):
            context = int(level.contexts[at])
            span = slice(*np.searchsorted(level.keys, [context << _BITS, (context + 1) << _BITS]))
            total = level.totals[at]
            result *= level.discount * level.kinds[at] / total
            seen = np.maximum(level.counts[span] - level.discount, 0) / total
            result[level.keys[span] & _mask(1)] += seen
        return result

    def _log_of_following(self, ids: Ints, at: Ints, rivals: Sequence[Ints]) -> list[Floats]:
        """Log probability of the words after each place, with each of its ``rivals`` there."""
        if not rivals:
            return []
        ends = np.cumsum([len(each) for each in rivals])
        rival, slot = (
            np.concatenate(rivals),
            np.repeat(np.arange(len(at)), np.diff(ends, prepend=0)),
        )
        total = np.zeros(len(rival))
        for distance in range(1, self.order):
            reached = at + distance < len(ids)
            keys = np.zeros(len(at), dtype=np.int64)
            keys[reached] = self._keys_at(ids, at[reached] + distance, without=distance)
            # contexts that are too short for the word at the place are the same for all rivals
            shared = self._probabilities(keys, 0, distance)
            mine = reached[slot]
            owner = slot[mine]
            whole = keys[owner] | (rival[mine] << (_BITS * distance))
            total[mine] += np.log(self._probabilities(whole, distance, shorter=shared[owner]))
        return np.split(total, ends[:-1])

    def _keys_at(self, ids: Ints, at: Ints, without: int = -1) -> Ints:
        """The n-grams that end at some places, packed; one word, so far back, can be left out."""
        keys = np.zeros(len(at), dtype=np.int64)
        for back in range(self.order):
            if back != without:
                keys |= ids[at - back] << (_BITS * back)
        return keys

    def bag_of_words(self, text: str) -> float:
        """Sum of the words' log frequencies: what remains of the likelihood without their order."""
        ids = [self.ids.get(word, _UNKNOWN) for word in words(text)]
        return float(np.sort(self.log_frequencies[ids]).sum())  # sorted: no order, no rounding

    def _keys(self, sentences: Sequence[Sequence[str]]) -> Ints:
        """For each word and each end: it and the words before it, packed into one number."""
        flat: list[int] = []
        targets: list[int] = []
        for sentence in sentences:
            flat += [_BEGIN] * (self.order - 1)
            targets += range(len(flat), len(flat) + len(sentence) + 1)
            flat += [self.ids.get(word, _UNKNOWN) for word in sentence]
            flat.append(_END)
        return self._keys_at(np.array(flat, dtype=np.int64), np.array(targets, dtype=np.int64))

    def _count(self, keys: Ints) -> list[_Level]:
        """Levels of order 1, 2 …; the shorter ones count in how many contexts an n-gram occurs."""
        distinct, counts = np.unique(keys, return_counts=True)
        levels = [_Level.of(distinct, counts)]
        for size in range(self.order - 1, 0, -1):
            distinct, counts = np.unique(distinct & _mask(size), return_counts=True)
            levels.insert(0, _Level.of(distinct, counts))
        return levels

    def _probabilities(
        self, keys: Ints, first: int = 0, last: int | None = None, shorter: Floats | None = None
    ) -> Floats:
        """Of the last word of each key by the levels ``first`` to ``last``.

        ``shorter`` are those by the levels before ``first``.
        """
        if shorter is None:  # any known word, unknown, the end
            shorter = np.full(len(keys), 1.0 / (len(self.ids) + 2))
        for size, level in enumerate(self.levels[first:last], start=first + 1):
            shorter = level.probabilities(keys & _mask(size), shorter)
        return shorter


def _with_own(
    likeliest: Ints, probabilities: Floats, own: int, of_own: float
) -> tuple[Ints, Floats]:
    """Sorted word ids and their probabilities, with the caption's own word among them."""
    at = int(np.searchsorted(likeliest, own))
    if at < len(likeliest) and likeliest[at] == own:
        return likeliest, probabilities
    return np.insert(likeliest, at, own), np.insert(probabilities, at, of_own)


def _mask(size: int) -> int:
    return (1 << (_BITS * size)) - 1


def read_captions(path: Path) -> list[str]:
    """The lines of a UTF-8 file that are not empty; gzip is unpacked."""
    try:
        text = read_unpacked(path, JSON_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start})") from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if too_long := next((number for number, line in lines if len(line) > MOST_LETTERS), None):
        raise DataError(
            f"{path}: line {too_long} has more than {MOST_LETTERS:,} characters; expected one "
            "caption per line"
        )
    return [line for _, line in lines]
