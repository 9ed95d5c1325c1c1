"""Foils: captions with exchanged words, false for their scene; and scenes that show them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from counterfoil.data.scenes.layout import SCALE
from counterfoil.data.scenes.scene import SIZE, Box, Scene, SceneObject
from counterfoil.data.scenes.truth import (
    SceneCaption,
    could_be_true,
    is_true,
    statement_of,
    tokens,
)
from counterfoil.data.scenes.vocabulary import (
    COLOR_WORDS,
    COUNT_WORDS,
    KINDS,
    NOUNS,
    NUMBERS,
    PALETTE,
    PATTERN_WORDS,
    PLURAL,
    SINGULAR,
    SIZE_WORDS,
)

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


def false_scene(scene: Scene, caption: SceneCaption, foil: str) -> Scene | None:
    """The scene changed so that a foil of one of its captions is true and the caption is false.

    The foil has as many words as the caption, with other nouns, colors, patterns, sizes or counts,
    or with left and right exchanged. None if it says anything else, or if it cannot be drawn.
    """
    words = tokens(foil)
    if len(words) != len(caption.words):
        return None
    new = tuple(replace(old, text=text) for old, text in zip(caption.words, words, strict=True))
    changed: Scene | None = scene
    mirrored = False
    for old, word in zip(caption.words, new, strict=True):
        if old.text == word.text or not word.role:
            continue
        if {old.text, word.text} == {"left", "right"}:
            mirrored = True
            continue
        for index in word.objects:
            changed = changed and _with_claim(changed, index, word.role.split(":")[0], word.text)
    if changed is None or (changed == scene and not mirrored):
        return None
    changed = _mirrored(changed) if mirrored else changed
    try:
        claims, true = statement_of(SceneCaption(foil, new)), statement_of(caption)
    except KeyError:  # a word that is not of the scenes
        return None
    return changed if is_true(changed, claims) and not could_be_true(changed, true) else None


def _with_claim(scene: Scene, index: int, role: str, word: str) -> Scene | None:
    """The scene with one attribute of an object as a word says; None if it cannot be drawn."""
    old = scene.objects[index]
    new: SceneObject | None = None
    if role == "noun" and (noun := SINGULAR.get(word) or PLURAL.get(word)):
        new = old if old.kind in noun.kinds else _of_kind(old, min(noun.kinds))
    elif role == "colour" and word in COLOR_WORDS:
        new = replace(old, color=COLOR_WORDS[word])
    elif role == "pattern" and word in PATTERN_WORDS and KINDS[old.kind].patterned:
        new = replace(old, pattern=PATTERN_WORDS[word])
    elif role == "size" and word in SIZE_WORDS and KINDS[old.kind].sized:
        size = SIZE_WORDS[word]
        new = _scaled(replace(old, size=size), *(2 * (SCALE[size] / SCALE[old.size],)))
    elif role == "count" and word in NUMBERS:
        new = _counted(old, NUMBERS[word])
    if new is None or not all(map(_fits, new.boxes)):
        return None
    objects = (*scene.objects[:index], new, *scene.objects[index + 1 :])
    return replace(scene, objects=objects)


def _of_kind(old: SceneObject, name: str) -> SceneObject:
    """Another kind of thing at the same place, with its own proportions."""
    before, kind = KINDS[old.kind], KINDS[name]
    size = "medium" if not kind.sized else "large" if old.size == "medium" else old.size
    scale = SCALE[size] / SCALE[old.size]
    pattern = old.pattern if kind.patterned else "plain"
    new = replace(old, kind=name, size=size, pattern=pattern)
    return _scaled(new, scale * kind.width / before.width, scale * kind.height / before.height)


def _scaled(obj: SceneObject, width: float, height: float) -> SceneObject:
    """Boxes scaled about the middle of their lower edges, moved into the picture."""
    boxes = []
    for x1, y1, x2, y2 in obj.boxes:
        half = (x2 - x1) * width / 2
        x = min(max((x1 + x2) / 2, half), SIZE - half)
        boxes.append((x - half, y2 - (y2 - y1) * height, x + half, y2))
    return replace(obj, boxes=tuple(boxes))


def _counted(old: SceneObject, count: int) -> SceneObject | None:
    """Fewer of a group, or more in a row beside it; None if the kind has no such number."""
    if count > KINDS[old.kind].most:
        return None
    boxes = list(old.boxes[:count])
    while len(boxes) < count:
        x1, y1, x2, y2 = boxes[-1]
        step = 1.1 * (x2 - x1)
        leftmost = min(box[0] for box in boxes)
        shift = step if x2 + step <= SIZE else leftmost - step - x1
        boxes.append((x1 + shift, y1, x2 + shift, y2))
    return replace(old, boxes=tuple(boxes), count=count)


def _fits(box: Box) -> bool:
    return box[0] >= 0 and box[1] >= 0 and box[2] <= SIZE and box[3] <= SIZE


def _mirrored(scene: Scene) -> Scene:
    """The scene with left and right exchanged."""
    sides = {"left of": "right of", "right of": "left of"}
    objects = tuple(
        replace(
            obj,
            flip=not obj.flip,
            boxes=tuple((SIZE - x2, y1, SIZE - x1, y2) for x1, y1, x2, y2 in obj.boxes),
        )
        for obj in scene.objects
    )
    relations = tuple(replace(r, name=sides.get(r.name, r.name)) for r in scene.relations)
    return replace(scene, objects=objects, relations=relations)
