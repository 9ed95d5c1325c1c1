"""Whether a statement is true of a scene, read strictly or generously.

Captions must be true in the strict reading of the objects they mean. A foil must be false in the
generous one: no choice of objects makes it true, whatever a well-meaning reader would let pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

from counterfoil.data.scenes.scene import SIZE, Scene, SceneObject
from counterfoil.data.scenes.vocabulary import INVERSE, KINDS, PLURAL, SINGULAR
from counterfoil.data.scenes.words import Mention, Statement

NEAR = 26.0


def is_true(scene: Scene, statement: Statement) -> bool:
    """The strict reading: every claim holds of the very objects that are meant."""
    for mention in statement.mentions.values():
        if not all(_is(scene.objects[i], mention) for i in mention.objects):
            return False
    return all(
        related(scene, i, name, j)
        for subject, name, other in statement.relations
        for i in statement.mentions[subject].objects
        for j in statement.mentions[other].objects
    )


def could_be_true(scene: Scene, statement: Statement) -> bool:
    """The generous reading: some choice of objects could pass for what is claimed."""
    names = list(statement.mentions)
    choices = [list(_readings(scene, statement.mentions[name])) for name in names]
    for chosen in product(*choices):
        sets = dict(zip(names, chosen, strict=True))
        if all(
            any(_could_relate(scene, i, name, j) for i in sets[subject] for j in sets[other])
            for subject, name, other in statement.relations
        ):
            return True
    return False


def _readings(scene: Scene, mention: Mention) -> Iterator[tuple[int, ...]]:
    """Sets of objects that a mention could mean; several together may make up its count."""
    able = [i for i, obj in enumerate(scene.objects) if _could_be(obj, mention)]
    if mention.count is None or mention.count == 1:
        yield from ((i,) for i in able)
        return
    for size in range(1, len(able) + 1):
        for some in combinations(able, size):
            if sum(scene.objects[i].count for i in some) == mention.count:
                yield some


def _is(obj: SceneObject, mention: Mention) -> bool:
    noun = SINGULAR.get(mention.noun) or PLURAL[mention.noun]
    singular = mention.noun == noun.singular and mention.noun != noun.plural
    return (
        obj.kind in noun.kinds
        and mention.colour in (None, obj.colour)
        and mention.size in (None, obj.size)
        and mention.pattern in (None, obj.pattern)
        and mention.count in (None, obj.count)
        and (not singular or obj.count == 1)
        and (mention.position is None or mention.position in positions(obj))
    )


def positions(obj: SceneObject) -> list[str]:
    """Position words that are plainly true of an object."""
    x, _ = obj.centre
    found = []
    if x < 0.36 * SIZE:
        found.append("left")
    if x > 0.64 * SIZE:
        found.append("right")
    if abs(x - 0.5 * SIZE) < 0.09 * SIZE:
        found.append("middle")
    found.extend(
        {"front": ["foreground"], "back": ["background"], "sky": ["sky", "top"]}[obj.depth]
    )
    if obj.depth == "front" and obj.centre[1] > 0.72 * SIZE:
        found.append("bottom")
    return found


def related(scene: Scene, i: int, name: str, j: int) -> bool:
    """Whether a relation plainly holds between two objects."""
    known = {(r.subject, r.name, r.object) for r in scene.relations}
    if (i, name, j) in known or (name in INVERSE and (j, INVERSE[name], i) in known):
        return True
    if name in ("above", "below"):
        over, below = (i, j) if name == "above" else (j, i)
        return (below, "under", over) in known
    return name == "next to" and _are_near(scene.objects[i], scene.objects[j])


def _are_near(one: SceneObject, other: SceneObject) -> bool:
    gap = max(one.box[0], other.box[0]) - min(one.box[2], other.box[2])
    return one.depth == other.depth and one.depth != "sky" and 0 <= gap <= NEAR


def _could_be(obj: SceneObject, mention: Mention) -> bool:
    also = KINDS[obj.kind].also
    return (
        obj.kind in mention.kinds
        and (mention.colour in (None, obj.colour) or mention.colour in also)
        and (mention.size in (None, obj.size) or obj.size == "medium")
        and (mention.pattern in (None, obj.pattern) or mention.pattern in also)
        and (mention.position is None or _could_be_at(obj, mention.position))
    )


def _could_be_at(obj: SceneObject, position: str) -> bool:
    x, y = obj.centre[0] / SIZE, obj.centre[1] / SIZE
    return {
        "left": x < 0.55,
        "right": x > 0.45,
        "middle": 0.3 < x < 0.7,
        "foreground": obj.depth == "front",
        "background": obj.depth != "front",
        "sky": obj.depth == "sky" or y < 0.5,
        "top": y < 0.55,
        "bottom": y > 0.45,
    }[position]


def _could_relate(scene: Scene, i: int, name: str, j: int) -> bool:
    if i == j:
        return False
    if related(scene, i, name, j):
        return True
    one, other = scene.objects[i], scene.objects[j]
    couple = {r.name for r in scene.relations if (r.subject, r.object) == (i, j)}
    if name == "on":
        return bool(couple & {"riding", "behind", "in front of"}) or _is_over(one, other, 12)
    if name == "above":
        return bool(couple & {"on", "riding"}) or _is_over(one, other, 4)
    if name in ("under", "below"):
        return _is_over(other, one, 4) or _could_relate(scene, j, "above", i)
    if name == "behind":
        return (one.depth != "front" and other.depth == "front") or _hides(other, one)
    if name == "in front of":
        return (other.depth != "front" and one.depth == "front") or _hides(one, other)
    if name == "left of":
        return one.centre[0] < other.centre[0] + 8
    if name == "right of":
        return one.centre[0] > other.centre[0] - 8
    return name == "next to"


def _is_over(one: SceneObject, other: SceneObject, margin: float) -> bool:
    """Higher up, and either in line with it or in the sky."""
    overlap = min(one.box[2], other.box[2]) - max(one.box[0], other.box[0])
    higher = one.centre[1] + margin < other.centre[1]
    return higher and (overlap > -4 or one.depth == "sky" != other.depth)


def _hides(one: SceneObject, other: SceneObject) -> bool:
    """Drawn over some of it."""
    a, b = one.box, other.box
    overlaps = a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
    return overlaps and one.layer >= other.layer
