"""Whether a rule foil of a drawn scene's caption is false, by the scene's own truth."""

from __future__ import annotations

from counterfoil.data.scenes import Scene, SceneCaption, could_be_true, statement_of
from counterfoil.data.scenes.vocabulary import (
    COLOR_WORDS,
    PATTERN_WORDS,
    PLURAL,
    POSITION_WORDS,
    RELATION_WORDS,
    SINGULAR,
    SIZE_WORDS,
    generous_kinds,
)
from counterfoil.data.text.words import words
from counterfoil.foils import Foil
from counterfoil.foils.lexicon import NUMERALS

VALUES = {"colour": COLOR_WORDS, "size": SIZE_WORDS, "pattern": PATTERN_WORDS}


def is_false(scene: Scene, caption: SceneCaption, foil: Foil) -> bool | None:
    """None where the truth says nothing about a word that was exchanged."""
    spoken = [place for place, word in enumerate(words(caption.text)) if word[0].isalnum()]
    place_of = {place: number for number, place in enumerate(spoken)}
    statement = statement_of(caption)
    relations = [i for i, word in enumerate(caption.words) if word.role.startswith("relation")]
    for position, new in zip(foil.positions, foil.replacement, strict=True):
        place = place_of[position]
        role, *names = caption.words[place].role.split(":")
        if not role and foil.kind == "numeral":
            # The article before a noun tells no count of its own, so its noun's mention takes it.
            noun = next(word for word in caption.words[place:] if word.role.startswith("noun"))
            mention = statement.mentions[int(noun.role.split(":")[1])]
            mention.count = NUMERALS.index(new) + 1
        elif not role and new in ("a", "an"):
            continue
        elif role == "relation":
            if new not in RELATION_WORDS:
                return None
            number = relations.index(place)
            subject, _, other = statement.relations[number]
            statement.relations[number] = (subject, RELATION_WORDS[new], other)
        elif role:
            mention = statement.mentions[int(names[0])]
            if role == "noun":
                drawn = new in SINGULAR or new in PLURAL
                mention.kinds = generous_kinds(new) if drawn else frozenset()
            elif role == "count":
                mention.count = NUMERALS.index(new) + 1
            elif role == "position":
                assert new in POSITION_WORDS
                mention.position = new
            else:
                setattr(
                    mention, role.replace("colour", "color"), VALUES[role].get(new, "never drawn")
                )
        else:
            return None
    return not could_be_true(scene, statement)
