"""Foils: captions with exchanged words that are false for their scene by construction."""

from __future__ import annotations

import random
from dataclasses import dataclass

from counterfoil.data.scenes.scene import Scene
from counterfoil.data.scenes.truth import SceneCaption, could_be_true, statement_of
from counterfoil.data.scenes.vocabulary import COUNT_WORDS, KINDS, NOUNS, PALETTE, PLURAL, SINGULAR

_ANY_PREPOSITION = ("on", "under", "beneath", "above", "over", "behind")
_EXCHANGES: dict[str, tuple[str, ...]] = {
    "riding": ("holding", "under", "behind", "above"),
    "holding": ("riding", "under", "behind", "above", "on"),
    "rides": ("holds",),
    "holds": ("rides",),
    "ridden": ("held",),
    "held": ("ridden",),
    "beside": (*_ANY_PREPOSITION, "riding", "holding"),
    "left": ("right",),
    "right": ("left",),
    **dict.fromkeys((*_ANY_PREPOSITION, "below"), _ANY_PREPOSITION),
}
_POSITIONS = (
    ("left", "right"),
    ("middle", "foreground", "background", "sky"),
    ("top", "bottom"),
)
_SIZES = ("large", "big", "small", "little")
_PATTERNS = ("striped", "dotted", "checked", "plain")


@dataclass(frozen=True)
class Foil:
    """A false caption; word ``positions[k]`` is the exchanged ``words[k]`` of ``kinds[k]``."""

    text: str
    words: tuple[str, ...]
    positions: tuple[int, ...]
    kinds: tuple[str, ...]


def alternatives(scene: Scene, caption: SceneCaption, position: int) -> list[str]:
    """Replacements for one word that make the caption false for the scene.

    Empty for function words, and if no replacement is certainly false.
    """
    return [
        word
        for word in _candidates(caption, position)
        if not could_be_true(scene, statement_of(caption.with_word(position, word)))
    ]


def falsify(
    scene: Scene,
    caption: SceneCaption,
    rng: random.Random,
    n_words: int = 1,
    kinds: tuple[str, ...] = ("object", "attribute", "count", "relation", "position"),
) -> Foil | None:
    """The caption with up to ``n_words`` words of ``kinds`` exchanged; each makes it false alone.

    None if no word can be exchanged.
    """
    candidates = [i for i, word in enumerate(caption.words) if word.kind in kinds]
    rng.shuffle(candidates)
    foil, changed = caption, list[int]()
    for position in candidates:
        if len(changed) == n_words:
            break
        options = alternatives(scene, caption, position)
        rng.shuffle(options)
        options.sort(key=lambda word: not _same_category(caption.words[position].text, word))
        if options and rng.random() < 0.3:
            rng.shuffle(options)
        for word in options:
            candidate = foil.with_word(position, word)
            # Two wrong words can make a true sentence.
            if not could_be_true(scene, statement_of(candidate)):
                foil = candidate
                changed.append(position)
                break
    if not changed:
        return None
    changed.sort()
    return Foil(
        foil.text,
        tuple(foil.words[i].text for i in changed),
        tuple(changed),
        tuple(foil.words[i].kind for i in changed),
    )


def _candidates(caption: SceneCaption, position: int) -> list[str]:
    """Words that are grammatical at this position."""
    word = caption.words[position]
    role = word.role.split(":")[0]
    options: tuple[str, ...] = ()
    if role == "noun":
        options = _nouns(caption, position)
    elif role == "colour":
        options = tuple(PALETTE)
    elif role == "size":
        options = _SIZES
    elif role == "pattern":
        options = _PATTERNS
    elif role == "count":
        options = tuple(COUNT_WORDS.values())
    elif role == "position":
        options = next(group for group in _POSITIONS if word.text in group)
    elif role == "relation":
        options = _EXCHANGES.get(word.text, ())
    article = caption.words[position - 1].text if position else ""
    if article in ("a", "an"):
        # The article stays, so the new word must fit it.
        options = tuple(o for o in options if (o[0] in "aeiou") == (article == "an"))
    return [option for option in options if option != word.text]


def _nouns(caption: SceneCaption, position: int) -> tuple[str, ...]:
    word = caption.words[position]
    plural = word.text in PLURAL and word.text not in SINGULAR
    # People wear, hold and ride things, so only other people can replace them.
    person = _category(word.text) == "person"
    return tuple(
        noun.plural if plural else noun.singular
        for noun in NOUNS
        if (_category(noun.singular) == "person") == person
    )


def _category(word: str) -> str:
    noun = SINGULAR.get(word) or PLURAL[word]
    return KINDS[min(noun.kinds)].category


def _same_category(word: str, other: str) -> bool:
    known = SINGULAR.keys() | PLURAL.keys()
    if word not in known or other not in known:
        return True
    return _category(word) == _category(other)
