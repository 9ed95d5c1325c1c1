"""Numerals, relations and attributes of photo captions, and what may take their place."""

from __future__ import annotations

from counterfoil.foils.nouns import alike

NUMERALS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
DIGITS = tuple(str(number) for number in range(1, 11))

# What a relation may become: relations that seldom hold together with it.
RELATIONS: dict[str, tuple[str, ...]] = {
    "on": ("under", "beneath", "below", "behind"),
    "under": ("on", "above", "behind", "over"),
    "underneath": ("on", "above", "behind", "over"),
    "beneath": ("on", "above", "behind", "over"),
    "below": ("above", "on", "behind", "over"),
    "above": ("below", "under", "beneath", "inside"),
    "over": ("under", "beneath", "below", "inside"),
    "behind": ("under", "beneath", "inside"),
    "beside": ("on", "under", "above", "inside", "beneath"),
    "near": ("on", "under", "above", "inside"),
    "in": ("under", "outside", "behind", "above"),
    "inside": ("outside", "under", "behind", "above"),
    "outside": ("inside", "under", "above"),
    "into": ("under", "behind", "around", "over"),
    "onto": ("under", "behind", "around", "past"),
    "through": ("around", "above", "under", "past"),
    "across": ("under", "behind", "around"),
    "around": ("through", "under", "above"),
    "along": ("across", "under", "above"),
    "past": ("into", "under", "onto"),
    "between": ("under", "above", "on"),
    "against": ("under", "above", "behind"),
    "toward": ("under", "from", "above"),
    "towards": ("under", "from", "above"),
    "with": ("without",),
    "without": ("with",),
    "riding": ("pushing", "washing", "feeding", "under", "holding"),
    "rides": ("pushes", "washes", "chases", "drops"),
    "ridden": ("pushed", "washed", "chased", "held"),
    "holding": ("dropping", "riding", "kicking", "chasing"),
    "holds": ("drops", "rides", "kicks", "chases"),
    "held": ("dropped", "ridden", "kicked", "chased"),
    "carrying": ("dropping", "kicking", "riding", "chasing"),
    "pushing": ("pulling", "riding", "throwing"),
    "pulling": ("pushing", "riding", "throwing"),
    "throwing": ("kicking", "catching", "dropping"),
    "kicking": ("throwing", "catching", "holding"),
    "catching": ("kicking", "throwing", "dropping"),
}
# Relations of several words keep their number, so that every word of a foil has its counterpart.
LONG_RELATIONS: dict[tuple[str, ...], tuple[tuple[str, ...], ...]] = {
    ("in", "front", "of"): (("on", "top", "of"), ("in", "back", "of")),
    ("on", "top", "of"): (("in", "front", "of"), ("in", "back", "of")),
    ("next", "to"): (("far", "from"),),
    ("close", "to"): (("far", "from"),),
    ("far", "from"): (("next", "to"), ("close", "to")),
    ("left", "of"): (("right", "of"),),
    ("right", "of"): (("left", "of"),),
}
# Places within the picture, said after "on the", "in the" or "at the".
PLACES = {
    "left": ("right",),
    "right": ("left",),
    "foreground": ("background",),
    "background": ("foreground",),
    "top": ("bottom",),
    "bottom": ("top",),
}
# Words for much the same relation: a foil must not bring in one while another is known to hold.
RELATIONS_ALIKE = alike(
    (
        "under underneath beneath below",
        "above over",
        "beside near next close",
        "in inside into",
        "on onto",
        "toward towards",
        "behind back",
    )
)
# If one holds, the other does as well when subject and object change sides.
SYMMETRIC = frozenset(
    {"beside", "near", "with", "without", "against", "next", "close", "far", "across", "around"}
)

_COLOURS = (
    "red orange yellow green blue purple/violet pink brown black white gray/grey gold silver tan"
)
_COLOURS_ALIKE = ("gray silver white", "gold yellow tan", "tan brown", "red pink", "purple pink")
_SIZES = ("large/big/huge small/little/tiny", "tall short", "long short")
_PATTERNS = "plain striped/stripy dotted/spotted checked/chequered/checkered"


def _exchanges(line: str, groups: tuple[str, ...] = ()) -> dict[str, tuple[str, ...]]:
    """For every word of a line, the words with another meaning; names of one meaning share /."""
    meanings = [entry.split("/") for entry in line.split()]
    same = alike(groups)
    return {
        word: tuple(
            other[0] for other in meanings if other != entry and other[0] not in same[entry[0]]
        )
        for entry in meanings
        for word in entry
    }


def _attributes() -> dict[str, tuple[str, ...]]:
    found = _exchanges(_COLOURS, _COLOURS_ALIKE) | _exchanges(_PATTERNS)
    for line in _SIZES:
        for word, others in _exchanges(line).items():
            found[word] = found.get(word, ()) + others
    return found


ATTRIBUTES = _attributes()
ATTRIBUTES_ALIKE = alike(
    tuple(" ".join(e.split("/")) for line in (_COLOURS, *_SIZES, _PATTERNS) for e in line.split())
)
