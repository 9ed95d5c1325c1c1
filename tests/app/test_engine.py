"""Of a corrector's suggestions, those that the matcher's score agrees with."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from counterfoil.app.engine import MAX_CHANGES, MIN_GAIN, agree
from counterfoil.models.correct import Correction, SuspectWord

VOCABULARY = ["red", "blue", "dog", "cat", "on", "under", "beach", "sea"]


@st.composite
def corrections(draw) -> tuple[Correction, list[float], dict[str, float]]:
    """A sentence with opinions on its words, effects, and what each word is worth to a matcher."""
    chosen = draw(st.lists(st.sampled_from(VOCABULARY), min_size=1, max_size=6))
    words, place = [], 0
    for word in chosen:
        suggestions = draw(st.lists(st.sampled_from(VOCABULARY), max_size=3, unique=True))
        wrong = draw(st.floats(0, 1))
        span = (place, place + len(word))
        words.append(SuspectWord(word, span, wrong, tuple(s for s in suggestions if s != word)))
        place += len(word) + 1
    text = " ".join(chosen)
    effects = [draw(st.sampled_from([-0.1, 0.1])) for _ in chosen]
    worth = {word: draw(st.floats(-1, 1)) for word in VOCABULARY}
    return Correction(text, 0.0, text, 0.0, tuple(words), (), ()), effects, worth


@given(corrections())
def test_words_that_both_doubt_are_exchanged_while_the_score_rises(drawn) -> None:
    result, effects, worth = drawn

    def score(text: str) -> float:
        return sum(worth[word] for word in text.split())

    agreed = agree(result, effects, lambda texts: [score(text) for text in texts])
    before, words = score(result.text), result.text.split()
    doubtful = {place for place, effect in enumerate(effects) if effect < 0}
    for change in agreed.changes:
        assert change.position in doubtful
        assert change.instead in result.words[change.position].suggestions
        best = max(
            before + worth[new] - worth[words[place]]
            for place in doubtful
            for new in result.words[place].suggestions
        )
        doubtful.remove(change.position)
        words[change.position] = change.instead
        assert abs(change.score - score(" ".join(words))) < 1e-9
        assert abs(change.score - best) < 1e-9
        assert change.score >= before + MIN_GAIN * abs(before) - 1e-9
        before = change.score
    assert agreed.text == " ".join(words)
    assert len(agreed.changes) <= MAX_CHANGES
    if len(agreed.changes) < MAX_CHANGES:
        assert not any(
            before + worth[new] - worth[words[place]] > before + MIN_GAIN * abs(before) + 1e-9
            for place in doubtful
            for new in result.words[place].suggestions
        )
