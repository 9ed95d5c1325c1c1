"""Minimal pairs about drawn scenes: a true caption and a false one that differs in one respect.

The kinds are those of SugarCrepe. A foil is false in the generous reading, and some other scene
could be described by it: so it is as fluent and as plausible as a true caption.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product

from counterfoil.data.scenes.falsify import alternatives
from counterfoil.data.scenes.plan import FIXED_SIZES, fits_couple
from counterfoil.data.scenes.scene import Scene
from counterfoil.data.scenes.truth import (
    Mention,
    SceneCaption,
    Word,
    could_be_true,
    is_true,
    statement_of,
)
from counterfoil.data.scenes.vocabulary import (
    INDOORS,
    KINDS,
    PALETTE,
    PEOPLE,
    PLURAL,
    SINGULAR,
    generous_kinds,
)

_GARMENTS = {
    "shirt": {"man", "boy"},
    "shirts": {"man", "boy"},
    "dress": {"woman", "girl"},
    "dresses": {"woman", "girl"},
}
VOWELS = set("aeiou")
_POSTURES = {"sitting", "sits", "standing"}
_LOOKS = ("colour", "size", "pattern")
_NEW_LOOKS = {
    "colour": tuple(PALETTE),
    "size": ("large", "big", "small", "little"),
    "pattern": ("striped", "dotted", "checked"),
}


def minimal_foil(
    scene: Scene, caption: SceneCaption, kind: str, rng: random.Random
) -> SceneCaption | None:
    """A foil of a true caption, of one of the `CHANGES`; None if the caption allows none."""
    candidates = list(CHANGES[kind](scene, caption))
    rng.shuffle(candidates)
    for candidate in candidates:
        if is_plausible(scene, candidate) and not could_be_true(scene, statement_of(candidate)):
            return candidate
    return None


def crossed_captions(
    scene: Scene, other: Scene, caption: SceneCaption, rng: random.Random
) -> SceneCaption | None:
    """A caption of the ``other`` scene, with one word exchanged; each is true of its scene only.

    Both scenes belong to one family, so that their objects correspond. None if no word will do.
    """
    if could_be_true(other, statement_of(caption)):
        return None
    positions = [position for position, word in enumerate(caption.words) if word.role]
    rng.shuffle(positions)
    for position in positions:
        words = alternatives(scene, caption, position)
        rng.shuffle(words)
        for word in words:
            changed = caption.with_word(position, word)
            if is_true(other, statement_of(changed)):
                return changed
    return None


def is_plausible(scene: Scene, caption: SceneCaption) -> bool:
    """Whether some scene with the same surroundings could be described in these words."""
    statement = statement_of(caption)
    kinds = {
        number: {kind for kind in _noun_kinds(mention.noun) if _can_be(kind, mention)}
        for number, mention in statement.mentions.items()
    }
    if scene.backdrop == "room":
        kinds = {number: able & INDOORS for number, able in kinds.items()}
    for subject, name, other in statement.relations:
        sizes = statement.mentions[subject].size, statement.mentions[other].size
        pairs = [
            (one, two)
            for one, two in product(kinds[subject], kinds[other])
            if _can_relate(one, name, two, sizes)
        ]
        kinds[subject], kinds[other] = {one for one, _ in pairs}, {two for _, two in pairs}
    return all(kinds.values()) and _words_fit(caption, kinds)


def _noun_kinds(noun: str) -> frozenset[str]:
    return (SINGULAR.get(noun) or PLURAL[noun]).kinds


def _can_be(name: str, mention: Mention) -> bool:
    kind = KINDS[name]
    return (
        (mention.color is None or mention.color in kind.colors)
        and (mention.size is None or kind.sized)
        and (mention.pattern is None or kind.patterned)
        and (mention.count is None or mention.count <= kind.most)
        and (mention.position != "sky" or kind.sky)
    )


def _can_relate(one: str, name: str, two: str, sizes: tuple[str | None, str | None]) -> bool:
    """Whether things of these kinds, and sizes if stated, can be drawn in this relation."""
    if name in ("left of", "right of", "next to"):
        return True
    if name == "below":
        return _can_relate(two, "above", one, sizes[::-1])
    if name == "above":
        return KINDS[one].sky or _is_couple("under", two, one, sizes[::-1])
    inverse = {"in front of": "behind", "behind": "in front of"}.get(name)
    return _is_couple(name, one, two, sizes) or (
        inverse is not None and _is_couple(inverse, two, one, sizes[::-1])
    )


def _is_couple(name: str, head: str, tail: str, sizes: tuple[str | None, str | None]) -> bool:
    needed = FIXED_SIZES.get(name, (None, None))
    return fits_couple(name, head, tail) and all(
        None in (size, stated) or size == stated for size, stated in zip(needed, sizes, strict=True)
    )


def _words_fit(caption: SceneCaption, kinds: dict[int, set[str]]) -> bool:
    """Whether clothes, postures and articles fit the things and words they belong to."""
    owners = {word.objects: word.mention for word in caption.words if word.kind == "object"}
    subjects = {word.phrase: word.mention for word in caption.words if word.kind == "relation"}
    following = [*(word.text for word in caption.words[1:]), ""]
    for word, after in zip(caption.words, following, strict=True):
        owner, subject = owners.get(word.objects), subjects.get(word.phrase)
        if word.text in _GARMENTS and owner is not None:
            fits = kinds[owner] <= _GARMENTS[word.text]
        elif word.text in _POSTURES and subject is not None:
            fits = {KINDS[kind].category for kind in kinds[subject]} <= {"person", "animal"}
        elif word.text == "flying" and subject is not None:
            fits = all(KINDS[kind].sky for kind in kinds[subject])
        else:
            fits = word.text not in ("a", "an") or (after[:1] in VOWELS) == (word.text == "an")
        if not fits:
            return False
    return True


def _replaced(*roles: str) -> Callable[[Scene, SceneCaption], Iterator[SceneCaption]]:
    def change(scene: Scene, caption: SceneCaption) -> Iterator[SceneCaption]:
        for position, word in enumerate(caption.words):
            if word.role.split(":")[0] in roles:
                for other in alternatives(scene, caption, position):
                    yield caption.with_word(position, other)

    return change


def _swapped(*roles: str) -> Callable[[Scene, SceneCaption], Iterator[SceneCaption]]:
    def change(scene: Scene, caption: SceneCaption) -> Iterator[SceneCaption]:
        marked = [
            (position, word)
            for position, word in enumerate(caption.words)
            if word.role.split(":")[0] in roles
        ]
        for (first, one), (second, two) in combinations(marked, 2):
            role, mention = one.role.split(":")
            if two.role.split(":")[0] != role or two.role == f"{role}:{mention}":
                continue
            if one.text != two.text and _are_exchangeable(one.text, two.text):
                yield caption.with_word(first, two.text).with_word(second, one.text)

    return change


def _are_exchangeable(one: str, two: str) -> bool:
    """Whether grammar allows two words in each other's place: nouns of one number, both people."""
    if one not in SINGULAR and one not in PLURAL:
        return True
    number = (one in SINGULAR) == (two in SINGULAR)
    return number and bool(_noun_kinds(one) & set(PEOPLE)) == bool(_noun_kinds(two) & set(PEOPLE))


def _added_object(scene: Scene, caption: SceneCaption) -> Iterator[SceneCaption]:
    """``… and a red ball``, if the caption ends with a noun and lists nothing yet."""
    last = caption.words[-1]
    has_article = caption.words[last.phrase[0]].text in ("a", "an")
    if last.kind != "object" or not has_article or "and" in (w.text for w in caption.words):
        return
    drawn = {obj.kind for obj in scene.objects}
    number = max(statement_of(caption).mentions) + 1
    for name, kind in KINDS.items():
        if drawn & generous_kinds(name):
            continue
        for color in (None, *kind.colors):
            if color is not None and kind.category == "person":  # people wear their colors
                continue
            adjectives = [] if color is None else [(color, f"colour:{number}")]
            pieces = [*adjectives, (name, f"noun:{number}")]
            article = "an" if pieces[0][0][0] in VOWELS else "a"
            yield _appended(caption, [("and", ""), (article, ""), *pieces])


def _appended(caption: SceneCaption, pieces: list[tuple[str, str]]) -> SceneCaption:
    text = caption.text.removesuffix(".")
    end = caption.text[len(text) :]
    start = len(caption.words)
    span = start, start + len(pieces)
    words = tuple(Word(word, (), span, role) for word, role in pieces)
    added = " ".join(word for word, _ in pieces)
    return SceneCaption(f"{text} {added}{end}", caption.words + words)


def _added_attribute(scene: Scene, caption: SceneCaption) -> Iterator[SceneCaption]:
    """A color, size or pattern before a noun that is described without one; not of people."""
    for word in caption.words:
        role, _, mention = word.role.partition(":")
        if role != "noun" or _noun_kinds(word.text) & set(PEOPLE):
            continue
        present = {
            other.role.split(":")[0]: number
            for number, other in enumerate(caption.words)
            if other.role in {f"{look}:{mention}" for look in (*_LOOKS, "noun")}
        }
        for look in _LOOKS:
            # English has size before pattern before color
            after = {"colour": (), "pattern": ("colour",), "size": ("pattern", "colour")}[look]
            position = next((present[one] for one in after if one in present), present["noun"])
            if look not in present:
                for new in _NEW_LOOKS[look]:
                    added = replace(word, text=new, role=f"{look}:{mention}")
                    yield _inserted(caption, position, added)


def _inserted(caption: SceneCaption, position: int, word: Word) -> SceneCaption:
    """The caption with a word put before another; a capital moves to the new first word."""
    old = caption.words[position].text
    marked = caption.with_word(position, f"{word.text} {old}")
    words = (*caption.words[:position], word, *caption.words[position:])
    return SceneCaption(marked.text, words)


CHANGES: dict[str, Callable[[Scene, SceneCaption], Iterator[SceneCaption]]] = {
    "replace_obj": _replaced("noun"),
    "replace_att": _replaced("colour", "size", "pattern", "count"),
    "replace_rel": _replaced("relation"),
    "swap_obj": _swapped("noun"),
    "swap_att": _swapped("colour", "size", "pattern", "count"),
    "add_obj": _added_object,
    "add_att": _added_attribute,
}
"""Candidates for foils, by the kinds of SugarCrepe."""
