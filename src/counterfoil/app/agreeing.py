"""Of what a corrector suggests, what the matcher that is served agrees with.

Two models look at one sentence: the corrector says which words are doubtful and what could stand
there, and the matcher, whose score is shown, chooses. A change that would lower its score is not
proposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from counterfoil.models.correct import Change, Correction, exchanged

MOST_CHANGES = 4
LEAST_GAIN = 0.05
"""Of the score; a little more is found for nearly any word."""

Scores = Callable[[Sequence[str]], Sequence[float]]
"""Scores of sentences with the image, all at once."""


@dataclass(frozen=True)
class Agreed:
    """Changes, each with the matcher's score after it, and the sentence they lead to."""

    text: str
    score: float
    changes: tuple[Change, ...]

    def as_dict(self) -> dict[str, object]:
        return {
            "text": self.text,
            "score": self.score,
            "changes": [change.as_dict() for change in self.changes],
        }


def agree(found: Correction, effects: Sequence[float], scores: Scores) -> Agreed:
    """Make the change that raises the score most, then the next, while there is one.

    Only the corrector's suggestions are tried. ``effects`` are the matcher's, word by word: what
    counts for the match is left alone.
    """
    doubtful = {
        place: word
        for place, (word, effect) in enumerate(zip(found.words, effects, strict=True))
        if effect < 0 and word.suggestions
    }
    made: dict[int, str] = {}
    changes: list[Change] = []
    score = scores([found.text])[0]
    while doubtful and len(changes) < MOST_CHANGES:
        tries = [(place, new) for place, word in doubtful.items() for new in word.suggestions]
        sentences = [_written(found.text, {**made, at: new}) for at, new in tries]
        reached = scores(sentences)
        best = max(range(len(tries)), key=reached.__getitem__)
        if not reached[best] >= score + LEAST_GAIN * abs(score):  # nan is no gain, either
            break
        place, new = tries[best]
        score, made[place] = reached[best], new
        changes.append(Change(place, doubtful.pop(place).word, new, score))
    return Agreed(_written(found.text, made), score, tuple(changes))


def _written(text: str, made: dict[int, str]) -> str:
    """The sentence with some words exchanged, by their places."""
    for place, new in made.items():
        text = exchanged(text, place, new)
    return text
