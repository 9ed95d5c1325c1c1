"""Scores that never look at an image: how likely, how frequent and how long a caption is.

A benchmark on which these score well can be solved without looking.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np

from counterfoil.data.text.words import caption_words, words
from counterfoil.evaluation.caption_model import CaptionModel, Floats
from counterfoil.evaluation.compositional.accuracy import Scored
from counterfoil.evaluation.compositional.readers import Item, Subset


def shuffled(text: str, seed: int = 0) -> str:
    """The words of a text in an order that depends on the words alone, not on their positions.

    Two texts with the same words become the same text, and equal words stay in the same order
    beside a changed one.
    """
    order: list[tuple[float, int, str]] = []
    seen: Counter[str] = Counter()
    for word in words(text):
        order.append((random.Random(f"{seed}/{word}/{seen[word]}").random(), seen[word], word))
        seen[word] += 1
    return " ".join(word for _, _, word in sorted(order))


class BlindScorer:
    """Scores of captions alone, the same for every image."""

    def __init__(self, model: CaptionModel | None = None) -> None:
        self.model = model

    def score(self, subset: Subset) -> dict[str, list[Scored | None]]:
        """By name, the scores of all items."""
        texts = [text for item in subset.items for text in item.texts]
        scores: dict[str, Floats] = {}
        if self.model is not None:
            logs = self.model.log_probabilities(texts)
            scores["caption likelihood"] = np.array([float(one.sum()) for one in logs])
            scores["likelihood per word"] = np.array([float(one.mean()) for one in logs])
            scores["word frequencies"] = np.array(list(map(self.model.bag_of_words, texts)))
        lengths = np.array([len(text.strip()) for text in texts], dtype=np.float64)
        scores["shorter caption"], scores["longer caption"] = -lengths, lengths
        return {name: self._by_item(name, subset.items, each) for name, each in scores.items()}

    def _by_item(self, name: str, items: Sequence[Item], scores: Floats) -> list[Scored | None]:
        results: list[Scored | None] = []
        start = 0
        for item in items:
            each = scores[start : start + len(item.texts)]
            start += len(item.texts)
            effects = None
            if item.wrong is not None and self.model is not None and name.startswith("caption"):
                effects = self._word_effects(item.captions[0])
            results.append(Scored(np.tile(each, (len(item.images), 1)), effects=effects))
        return results

    def _word_effects(self, text: str) -> list[tuple[int, int, float]]:
        """How expected each word is, without punctuation."""
        assert self.model is not None  # noqa: S101 - checked by the caller
        logs = self.model.log_probabilities([text])[0]
        spans = zip(caption_words(text), logs, strict=False)
        return [(w.start, w.end, float(log)) for w, log in spans if not w.is_punctuation]
