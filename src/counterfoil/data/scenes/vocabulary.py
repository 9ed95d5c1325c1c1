"""Kinds of objects in drawn scenes, and the words for them, their attributes and relations."""

from __future__ import annotations

from dataclasses import dataclass, field

PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (214, 58, 54),
    "orange": (240, 140, 44),
    "yellow": (247, 207, 66),
    "green": (66, 150, 78),
    "blue": (56, 112, 196),
    "purple": (132, 78, 172),
    "pink": (240, 138, 176),
    "brown": (136, 88, 52),
    "black": (48, 48, 54),
    "white": (250, 249, 244),
}
PATTERNS = ("plain", "striped", "dotted", "checked")
COUNT_WORDS = {2: "two", 3: "three", 4: "four"}

_BRIGHT = ("red", "orange", "yellow", "green", "blue", "purple", "pink")
_ANY = (*_BRIGHT, "white", "black")
_BRIGHT_OR_WHITE = (*_BRIGHT, "white")
_WOOD = (*_BRIGHT, "white", "brown")


@dataclass(frozen=True)
class Kind:
    """A kind of object: its size in pixels when large, and its possible attributes."""

    category: str
    width: float
    height: float
    colors: tuple[str, ...] = _BRIGHT
    patterned: bool = False
    sized: bool = True
    most: int = 4
    sky: bool = False
    ground: bool = True
    # Colors and patterns of details, which the generous reading accepts.
    also: frozenset[str] = field(default_factory=frozenset)


def _person(width: float, height: float) -> Kind:
    return Kind("person", width, height, _ANY, patterned=True, sized=False)


KINDS: dict[str, Kind] = {
    "man": _person(36, 82),
    "woman": _person(36, 80),
    "boy": _person(31, 60),
    "girl": _person(31, 60),
    "dog": Kind("animal", 50, 42, ("brown", "black", "white", "orange")),
    "cat": Kind("animal", 42, 42, ("orange", "black", "white", "brown")),
    "horse": Kind("animal", 76, 66, ("brown", "black", "white"), most=2),
    "cow": Kind(
        "animal",
        70,
        50,
        ("brown", "black", "white"),
        most=3,
        also=frozenset({"white", "black", "dotted"}),
    ),
    "sheep": Kind("animal", 52, 40, ("white", "black", "brown"), also=frozenset({"black"})),
    "rabbit": Kind("animal", 34, 42, ("white", "brown", "black", "pink")),
    "bird": Kind("animal", 38, 30, ("red", "blue", "yellow", "green", "black"), sky=True),
    "duck": Kind(
        "animal", 42, 36, ("yellow", "white", "brown", "green"), also=frozenset({"orange"})
    ),
    "car": Kind("vehicle", 74, 38, _ANY, most=3, also=frozenset({"black"})),
    "bus": Kind("vehicle", 90, 52, _BRIGHT, most=2, also=frozenset({"black", "striped"})),
    "bicycle": Kind("vehicle", 64, 44, _ANY, most=3, also=frozenset({"black"})),
    "boat": Kind("vehicle", 66, 66, _ANY, patterned=True, most=3, also=frozenset({"brown"})),
    "plane": Kind("vehicle", 72, 34, _BRIGHT_OR_WHITE, most=3, sky=True, ground=False),
    "house": Kind("building", 76, 76, _WOOD, most=2),
    "tower": Kind("building", 34, 98, _WOOD, most=3),
    "tent": Kind("building", 70, 50, _BRIGHT, patterned=True, most=3),
    "tree": Kind(
        "plant",
        62,
        88,
        ("green", "orange", "red", "yellow", "pink"),
        most=3,
        also=frozenset({"brown"}),
    ),
    "bush": Kind("plant", 56, 36, ("green", "orange", "red", "yellow")),
    "flower": Kind(
        "plant",
        28,
        48,
        ("red", "pink", "yellow", "purple", "white", "blue", "orange"),
        also=frozenset({"green", "yellow", "orange"}),
    ),
    "ball": Kind("thing", 30, 30, _ANY, patterned=True),
    "umbrella": Kind("thing", 54, 52, _ANY, patterned=True, also=frozenset({"brown"})),
    "kite": Kind("thing", 38, 58, _BRIGHT, patterned=True, sky=True, ground=False),
    "balloon": Kind("thing", 28, 54, _BRIGHT_OR_WHITE, patterned=True, sky=True, ground=False),
    "box": Kind("thing", 44, 38, _WOOD, patterned=True),
    "chair": Kind("thing", 36, 54, _WOOD, most=3),
    "table": Kind("thing", 68, 44, _WOOD, most=2),
    "lamp": Kind("thing", 30, 56, _BRIGHT_OR_WHITE, patterned=True, also=frozenset({"black"})),
    "guitar": Kind("thing", 26, 64, ("brown", "red", "black", "blue", "yellow"), most=3),
}
PEOPLE = ("man", "woman", "boy", "girl")
_OUTDOORS = {"horse", "cow", "sheep", "duck", "car", "bus", "boat", "plane", "tree", "bush"}
INDOORS = frozenset(KINDS) - _OUTDOORS - {"house", "tower", "tent"}


@dataclass(frozen=True)
class Noun:
    """A word for one kind, or a ``generic`` one for several."""

    singular: str
    plural: str
    kinds: frozenset[str]
    generic: bool = False


def _noun(singular: str, plural: str, *kinds: str, generic: bool = False) -> Noun:
    return Noun(singular, plural, frozenset(kinds), generic)


def _of(category: str) -> tuple[str, ...]:
    return tuple(name for name, kind in KINDS.items() if kind.category == category)


_IRREGULAR = {
    "man": "men",
    "woman": "women",
    "sheep": "sheep",
    "bus": "buses",
    "bush": "bushes",
    "box": "boxes",
}
NOUNS: tuple[Noun, ...] = (
    *(_noun(kind, _IRREGULAR.get(kind, kind + "s"), kind) for kind in KINDS),
    _noun("guy", "guys", "man"),
    _noun("lady", "ladies", "woman"),
    _noun("bunny", "bunnies", "rabbit"),
    _noun("bike", "bikes", "bicycle"),
    _noun("sailboat", "sailboats", "boat"),
    _noun("airplane", "airplanes", "plane"),
    _noun("shrub", "shrubs", "bush"),
    _noun("parasol", "parasols", "umbrella"),
    _noun("crate", "crates", "box"),
    _noun("person", "people", *PEOPLE, generic=True),
    _noun("child", "children", "boy", "girl", generic=True),
    _noun("kid", "kids", "boy", "girl", generic=True),
    _noun("animal", "animals", *_of("animal"), generic=True),
    _noun("vehicle", "vehicles", *_of("vehicle"), generic=True),
    _noun("building", "buildings", "house", "tower", generic=True),
)

# Kinds that a noun covers in the generous reading: a duck is a bird, a tent a building.
_GENEROUS = {
    "bird": {"bird", "duck"},
    "building": {"house", "tower", "tent"},
    "tree": {"tree", "bush"},
}

COLOR_WORDS = {**{name: name for name in PALETTE}, "violet": "purple"}
SIZE_WORDS = {
    "large": "large",
    "big": "large",
    "huge": "large",
    "small": "small",
    "little": "small",
    "tiny": "small",
}
PATTERN_WORDS = {
    "plain": "plain",
    "striped": "striped",
    "stripy": "striped",
    "dotted": "dotted",
    "spotted": "dotted",
    "checked": "checked",
    "chequered": "checked",
}
NUMBERS = {"a": 1, "an": 1, "one": 1, **{word: count for count, word in COUNT_WORDS.items()}}
POSITION_WORDS = ("left", "right", "middle", "foreground", "background", "sky", "top", "bottom")
RELATION_WORDS = {
    "riding": "riding",
    "rides": "riding",
    "ridden": "riding",
    "holding": "holding",
    "holds": "holding",
    "held": "holding",
    "on": "on",
    "under": "under",
    "beneath": "under",
    "below": "below",
    "above": "above",
    "over": "above",
    "behind": "behind",
    "front": "in front of",
    "next": "next to",
    "beside": "next to",
    "left": "left of",
    "right": "right of",
}
INVERSE = {
    "above": "below",
    "below": "above",
    "behind": "in front of",
    "in front of": "behind",
    "left of": "right of",
    "right of": "left of",
    "next to": "next to",
}

SINGULAR = {noun.singular: noun for noun in NOUNS}
PLURAL = {noun.plural: noun for noun in NOUNS}


def generous_kinds(word: str) -> frozenset[str]:
    """Every kind that a noun, singular or plural, could mean."""
    noun = SINGULAR.get(word) or PLURAL[word]
    return noun.kinds | frozenset(_GENEROUS.get(noun.singular, ()))
