"""Generate captions of a scene: varied in wording, partial, and true in every word."""

from __future__ import annotations

import random

from counterfoil.data.scenes.scene import Scene
from counterfoil.data.scenes.truth import SceneCaption, Word, positions, related
from counterfoil.data.scenes.vocabulary import (
    COLOR_WORDS,
    COUNT_WORDS,
    KINDS,
    NOUNS,
    PATTERN_WORDS,
    SIZE_WORDS,
)

# People rarely mention that something has no pattern.
_PLAIN_WORD_SHARE = 0.2

SHORTEST, LONGEST = 4, 20
_FOCUS_SHARE = 0.72

_PLACES = {
    "meadow": ("in a meadow", "on a meadow", "outdoors"),
    "beach": ("at the beach", "by the sea", "outdoors"),
    "street": ("in the street", "in a city"),
    "room": ("in a room", "indoors"),
    "park": ("in a park", "near a path"),
    "snow": ("in the snow", "on a winter day"),
}


class Draft:
    """A caption under construction; phrases are added from left to right."""

    def __init__(self, scene: Scene, rng: random.Random, detail: float) -> None:
        self.scene, self.rng, self.detail = scene, rng, detail
        self.words: list[Word] = []
        self.commas: set[int] = set()
        self.mentions = 0
        self.bare = False

    def say(self, text: str, objects: tuple[int, ...] = ()) -> None:
        """Add function words."""
        self._add([(word, "") for word in text.split()], objects)

    def comma(self) -> None:
        self.commas.add(len(self.words) - 1)

    def _add(self, pieces: list[tuple[str, str]], objects: tuple[int, ...]) -> None:
        start = len(self.words)
        span = (start, start + len(pieces))
        self.words.extend(Word(text, objects, span, role) for text, role in pieces)

    def relate(self, text: str, role: str, objects: tuple[int, ...]) -> None:
        """Add words of a relation; the one that ends in ``*`` has the role."""
        self._add(
            [(word.rstrip("*"), role if word.endswith("*") else "") for word in text.split()],
            objects,
        )

    def locate(self, index: int, mention: int, position: str) -> None:
        """Add "on the left", "in the sky"."""
        lead = "on" if position in ("left", "right") else "in"
        lead = "at" if position in ("top", "bottom") else lead
        self._add([(lead, ""), ("the", ""), (position, f"position:{mention}")], (index,))

    def thing(self, index: int, wanted: frozenset[str] = frozenset()) -> int:
        """Add a noun phrase about an object; returns the number of the mention.

        Each attribute is named with probability `detail`; those in ``wanted`` always.
        """
        obj, rng, mention = self.scene.objects[index], self.rng, self.mentions
        self.mentions += 1
        named = {name for name in ("colour", "size", "pattern") if rng.random() < self.detail}
        named |= wanted
        if obj.size == "medium":
            named.discard("size")
        plain = obj.pattern == "plain" and rng.random() > _PLAIN_WORD_SHARE
        if plain or not KINDS[obj.kind].patterned:
            named.discard("pattern")
        noun, generic = self._noun(index, exact="kind" in wanted)
        before = [("size", _word(SIZE_WORDS, obj.size, rng))] if "size" in named else []
        look = []
        if "pattern" in named:
            look.append(("pattern", _word(PATTERN_WORDS, obj.pattern, rng)))
        if "colour" in named:
            look.append(("colour", _word(COLOR_WORDS, obj.color, rng)))
        person = obj.size == "medium"
        adjectives = before if person else before + look
        pieces = [(word, f"{role}:{mention}") for role, word in adjectives]
        pieces.append((noun, f"noun:{mention}"))
        self._add(self._article(index, pieces, mention) + pieces, (index,))
        if person and look:
            self._clothes(index, mention, look, generic)
        return mention

    def _article(
        self, index: int, pieces: list[tuple[str, str]], mention: int
    ) -> list[tuple[str, str]]:
        count = self.scene.objects[index].count
        if count > 1:
            return [(COUNT_WORDS[count], f"count:{mention}")]
        return [] if self.bare else [(_a(pieces[0][0]), "")]

    def _noun(self, index: int, exact: bool) -> tuple[str, bool]:
        obj, rng = self.scene.objects[index], self.rng
        able = [noun for noun in NOUNS if obj.kind in noun.kinds]
        generic = [noun for noun in able if noun.generic]
        if exact or not generic or rng.random() > 0.12:
            named = [noun for noun in able if not noun.generic]
            noun = named[0] if rng.random() < 0.65 else rng.choice(named)
        else:
            noun = rng.choice(generic)
        return (noun.plural if obj.count > 1 else noun.singular), noun.generic

    def _clothes(
        self, index: int, mention: int, look: list[tuple[str, str]], generic: bool
    ) -> None:
        """Add "in red", "in a striped shirt", "wearing dotted dresses"."""
        obj, rng = self.scene.objects[index], self.rng
        pieces = [(word, f"{role}:{mention}") for role, word in look]
        if len(look) == 1 and look[0][0] == "colour" and rng.random() < 0.45:
            self._add([("in", ""), *pieces], (index,))
            return
        verb = rng.choice(("in", "wearing"))
        if generic:
            self._add([(verb, ""), *pieces, ("clothes", "")], (index,))
            return
        garment = "shirt" if obj.kind in ("man", "boy") else "dress"
        if obj.count > 1:
            plural = {"shirt": "shirts", "dress": "dresses"}[garment]
            self._add([(verb, ""), *pieces, (plural, "")], (index,))
        else:
            self._add([(verb, ""), (_a(pieces[0][0]), ""), *pieces, (garment, "")], (index,))

    def caption(self, style: str) -> SceneCaption:
        """The finished text: ``plain`` lower case, or a ``sentence`` with capital and full stop."""
        parts = [word.text + ("," if i in self.commas else "") for i, word in enumerate(self.words)]
        text = " ".join(parts)
        if style == "sentence":
            text = text[0].upper() + text[1:] + "."
        return SceneCaption(text, tuple(self.words))


def _a(following: str) -> str:
    return "an" if following[0] in "aeiou" else "a"


def _word(table: dict[str, str], meaning: str, rng: random.Random) -> str:
    words = [word for word, value in table.items() if value == meaning]
    return words[0] if rng.random() < 0.6 else rng.choice(words)


# A and B are the things; IS agrees with the first of them. The word with * relates A to B, the one
# with ^ relates B to A. Forms with ! need a living A, those with 1 a single A.
_FORMS: dict[str, tuple[str, ...]] = {
    "riding": ("A riding* B", "A IS riding* B", "1 A rides* B", "B ridden* by A"),
    "holding": ("A holding* B", "A IS holding* B", "1 A holds* B", "B held* by A"),
    "on": ("A on* B", "A IS on* B", "! A sitting on* B", "! 1 A sits on* B", "B with A on* it"),
    "under": ("A under* B", "A beneath* B", "A IS under* B", "B with A under* it", "B above^ A"),
    "in front of": (
        "A in front* of B",
        "A IS in front* of B",
        "! A standing in front* of B",
        "B behind^ A",
    ),
    "behind": ("A behind* B", "A IS behind* B", "! A standing behind* B", "B in front^ of A"),
    "next to": ("A next* to B", "A beside* B", "A IS next* to B", "B beside^ A"),
    "left of": ("A to the left* of B", "A left* of B", "A IS to the left* of B"),
    "right of": ("A to the right* of B", "A right* of B", "A IS to the right* of B"),
    "above": ("A above* B", "A over* B", "A flying above* B", "A IS above* B", "B below^ A"),
}


def describe(scene: Scene, rng: random.Random, n: int = 5) -> list[SceneCaption]:
    """Up to ``n`` different captions of a scene; most mention its `focus`.

    >>> from counterfoil.data.scenes.family import make_scene
    >>> captions = describe(make_scene((0, 0, 2, 0)), random.Random(0), n=2)
    >>> len(captions), captions[0] != captions[1]
    (2, True)
    """
    captions: dict[str, SceneCaption] = {}
    for _ in range(100 * n):
        if len(captions) == n:
            break
        caption = _draft(scene, rng)
        if SHORTEST <= len(caption.words) <= LONGEST:
            captions.setdefault(caption.text.lower().rstrip("."), caption)
    return list(captions.values())


def _draft(scene: Scene, rng: random.Random) -> SceneCaption:
    draft = Draft(scene, rng, detail=rng.choice((0.15, 0.45, 0.45, 0.75)))
    focus = scene.focus if rng.random() < _FOCUS_SHARE else None
    draft.bare = rng.random() < 0.12
    if not draft.bare and rng.random() < 0.07:
        draft.say(rng.choice(("a picture of", "a drawing of", "you can see")))
        existential = False
    else:
        existential = not draft.bare and rng.random() < 0.2
    form = rng.random()
    if focus is not None and focus[1] in ("relation", "order"):
        form = 0.3
    if form < 0.2:
        _one(draft, focus, existential)
    elif form < 0.75 and _couple(draft, focus, existential):
        pass
    else:
        _list(draft, focus, existential)
    if rng.random() < 0.22 and len(draft.words) < LONGEST - 3:
        draft.say(rng.choice(_PLACES[scene.backdrop]))
    return draft.caption(rng.choice(("plain", "plain", "sentence")))


def _wanted(index: int, focus: tuple[int, str] | None) -> frozenset[str]:
    return frozenset({focus[1]}) if focus is not None and focus[0] == index else frozenset()


def _there(draft: Draft, count: int, existential: bool) -> None:
    if existential:
        draft.say("there are" if count > 1 else "there is")


def _one(draft: Draft, focus: tuple[int, str] | None, existential: bool) -> None:
    index = focus[0] if focus else draft.rng.randrange(len(draft.scene.objects))
    _there(draft, draft.scene.objects[index].count, existential)
    mention = draft.thing(index, _wanted(index, focus))
    _maybe_locate(draft, index, mention, focus, 0.4)


def _maybe_locate(
    draft: Draft, index: int, mention: int, focus: tuple[int, str] | None, share: float
) -> None:
    able = positions(draft.scene.objects[index])
    if focus == (index, "depth"):
        draft.locate(index, mention, "foreground" if "foreground" in able else "background")
    elif able and draft.rng.random() < share:
        draft.locate(index, mention, draft.rng.choice(able))


def _couple(draft: Draft, focus: tuple[int, str] | None, existential: bool) -> bool:
    """Add two related things and sometimes a third; False if nothing is related."""
    scene, rng = draft.scene, draft.rng
    choice = _choose_relation(scene, rng, focus)
    if choice is None:
        return False
    a, name, b = choice
    one = scene.objects[a]
    alive = KINDS[one.kind].category in ("person", "animal")
    forms = [
        form
        for form in _FORMS[name]
        if (alive or "!" not in form)
        and (one.count == 1 or "1" not in form)
        and (not existential or not {"IS", "rides*", "holds*", "sits"} & set(form.split()))
    ]
    slots = [part for part in rng.choice(forms).split() if part not in ("!", "1")]
    first = a if "A" in slots[:1] else b
    _there(draft, scene.objects[first].count, existential)
    _fill(draft, slots, a, b, focus)
    rest = [i for i in range(len(scene.objects)) if i not in (a, b)]
    if rest and rng.random() < 0.25 and slots[-1] != "it":
        draft.say("and")
        third = rng.choice(rest)
        mention = draft.thing(third, _wanted(third, focus))
        _maybe_locate(draft, third, mention, focus, 0.5)
    return True


def _fill(draft: Draft, slots: list[str], a: int, b: int, focus: tuple[int, str] | None) -> None:
    """Add the words of a form; mention numbers of both things are known in advance."""
    order = [slot for slot in slots if slot in ("A", "B")]
    number = {slot: draft.mentions + i for i, slot in enumerate(order)}
    pending: list[str] = []

    def flush() -> None:
        if pending:
            text = " ".join(pending)
            ends = ("A", "B") if "*" in text else ("B", "A")
            role = f"relation:{number[ends[0]]}:{number[ends[1]]}"
            draft.relate(text.replace("^", "*"), role, (a, b))
            pending.clear()

    for slot in slots:
        if slot in ("A", "B"):
            flush()
            index = a if slot == "A" else b
            draft.thing(index, _wanted(index, focus))
        elif slot == "IS":
            subject = a if order[0] == "A" else b
            pending.append("are" if draft.scene.objects[subject].count > 1 else "is")
        else:
            pending.append(slot)
    flush()


def _choose_relation(
    scene: Scene, rng: random.Random, focus: tuple[int, str] | None
) -> tuple[int, str, int] | None:
    """A random relation, weighted by interest, and about the focus if there is one."""
    drawn = [(r.subject, r.name, r.object) for r in scene.relations]
    near = [
        (i, "next to", j)
        for i in range(len(scene.objects))
        for j in range(len(scene.objects))
        if i != j and related(scene, i, "next to", j)
    ]
    every = drawn + near
    if focus is not None:
        every = [r for r in every if focus[0] in (r[0], r[2])] or every
        if focus[1] == "order":
            every = [r for r in every if r[1] in ("left of", "right of")] or every
        elif focus[1] == "relation":
            every = [r for r in every if r[1] not in ("left of", "right of")] or every
    if not every:
        return None
    return rng.choices(every, [_interest(scene, *relation) for relation in every])[0]


def _interest(scene: Scene, a: int, name: str, b: int) -> float:
    """Weight of a relation in the random choice: couples before mere positions."""
    if name not in ("left of", "right of"):
        return 2.0 if name == "next to" else 8.0
    return 0.3 if "sky" in (scene.objects[a].depth, scene.objects[b].depth) else 1.0


def _list(draft: Draft, focus: tuple[int, str] | None, existential: bool) -> None:
    """Add two or three things: "a dog, two cars and a tree"."""
    rng, scene = draft.rng, draft.scene
    chosen = rng.sample(range(len(scene.objects)), min(len(scene.objects), rng.choice((2, 2, 3))))
    if focus is not None and focus[0] not in chosen:
        chosen[rng.randrange(len(chosen))] = focus[0]
    _there(draft, scene.objects[chosen[0]].count, existential)
    for number, index in enumerate(chosen):
        if number:
            if number == len(chosen) - 1:
                draft.say("and")
            else:
                draft.comma()
        mention = draft.thing(index, _wanted(index, focus))
        if len(chosen) == 2:
            _maybe_locate(draft, index, mention, focus, 0.3)
