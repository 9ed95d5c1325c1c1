"""A word that takes another's place must be of the same part of speech, in the same form."""

from __future__ import annotations

import pytest

from counterfoil.foils.grammar import keeps_word_class


@pytest.mark.parametrize(
    ("caption", "old", "new", "fits"),
    [
        ("a man in red holding a black guitar", "man", "black", False),
        ("a man in red holding a black guitar", "man", "woman", True),
        ("a man in red holding a black guitar", "black", "white", True),
        ("a man in red holding a black guitar", "black", "guitar", False),
        ("a man in red holding a black guitar", "holding", "playing", True),
        ("a man in red holding a black guitar", "holding", "holds", False),
        ("a man in red holding a black guitar", "in", "on", True),
        ("a man in red holding a black guitar", "in", "and", False),
        ("two dogs run", "dogs", "dog", False),
        ("two dogs run", "dogs", "sheep", True),
        ("a dog runs", "dog", "sheep", True),
        ("two dogs run", "two", "three", True),
        ("two dogs run", "two", "the", False),
        ("a tree in a field", "tree", "cactus", True),
    ],
)
def test_a_replacement_keeps_the_part_of_speech_and_its_form(caption, old, new, fits) -> None:
    tokens = caption.split()
    assert keeps_word_class(tokens, tokens.index(old), new) is fits
