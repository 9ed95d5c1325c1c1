"""Plans of scenes before layout: random things, alone or in related couples."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from counterfoil.data.scenes.vocabulary import INDOORS, KINDS, PATTERNS, PEOPLE

OUTDOORS = ("meadow", "beach", "street", "park", "snow")


@dataclass(frozen=True)
class Thing:
    """A group of equal things."""

    kind: str
    color: str
    size: str
    pattern: str
    count: int


@dataclass(frozen=True)
class Cluster:
    """One thing, or a couple ``head`` ``relation`` ``tail``."""

    head: int
    tail: int | None
    relation: str
    depth: str


@dataclass(frozen=True)
class Plan:
    """Content of a scene; ``clusters`` from left to right, one in the sky last."""

    backdrop: str
    things: tuple[Thing, ...]
    clusters: tuple[Cluster, ...]


COUPLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "riding": (PEOPLE, ("bicycle", "horse")),
    "holding": (PEOPLE, ("umbrella", "balloon", "kite", "ball", "flower", "guitar")),
    "on": (
        ("cat", "bird", "rabbit", "duck", "lamp", "ball", "box"),
        ("table", "box", "chair", "car"),
    ),
    "under": (
        ("dog", "cat", "rabbit", "duck", "ball", "box"),
        ("tree", "umbrella", "table"),
    ),
    "in front of": (
        (*PEOPLE, "dog", "cat", "sheep", "bicycle", "ball", "chair", "flower", "box"),
        ("house", "tower", "tent", "bus", "tree"),
    ),
    "behind": ((*PEOPLE, "horse", "tree", "tower"), ("bush", "box", "car", "table")),
}
_COUPLED = [name for sides in COUPLES.values() for side in sides for name in side]
# Sizes that a couple needs to be drawn: (head, tail); None: any.
FIXED_SIZES: dict[str, tuple[str | None, str | None]] = {
    "riding": (None, "large"),
    "on": ("small", "large"),
    "under": ("small", "large"),
    "in front of": ("small", "large"),
    "behind": ("large", None),
}


def fits_couple(relation: str, head: str, tail: str) -> bool:
    """Whether such a couple can be drawn."""
    if head == tail:
        return False
    if relation == "next to":
        return any(fits_couple(name, head, tail) for name in COUPLES)
    heads, tails = COUPLES[relation]
    return head in heads and tail in tails


def couple_count(relation: str, head: str, tail: str) -> int:
    """Largest count of the head of a couple."""
    if relation == "on" and tail in ("table", "car") and KINDS[head].width < 45:
        return 2
    if relation == "under" and tail != "umbrella":
        return 2
    if relation == "in front of" and head not in ("bicycle", "sheep", "dog"):
        return 2 if head in PEOPLE else 3
    return 1


def sample_plan(rng: random.Random) -> Plan:
    """A plan of two to four things; the caller checks that it can be laid out."""
    wanted = rng.choice((2, 3, 3, 4))
    things: list[Thing] = []
    clusters: list[Cluster] = []
    sky: Cluster | None = None
    while len(things) < wanted:
        left = wanted - len(things)
        first = len(things)
        if left >= 2 and rng.random() < 0.6:
            things.extend(_sample_couple(rng))
            clusters.append(Cluster(first, first + 1, _relation(things, rng), _depth(rng)))
        elif sky is None and clusters and rng.random() < 0.4:
            things.append(_sample_single(rng, things, sky=True))
            sky = Cluster(first, None, "", "sky")
        else:
            things.append(_sample_single(rng, things, sky=False))
            clusters.append(Cluster(first, None, "", _depth(rng)))
    rng.shuffle(clusters)
    if sky is not None:
        clusters.append(sky)
    indoors = sky is None and all(thing.kind in INDOORS for thing in things)
    backdrop = "room" if indoors and rng.random() < 0.6 else rng.choice(OUTDOORS)
    return Plan(backdrop, tuple(things), tuple(clusters))


def is_sound(plan: Plan) -> bool:
    """No two things of the same kind and color, all couples drawable, all attributes possible."""
    names = {(thing.kind, thing.color) for thing in plan.things}
    if len(names) < len(plan.things):
        return False
    if plan.backdrop == "room" and any(thing.kind not in INDOORS for thing in plan.things):
        return False
    for thing in plan.things:
        kind = KINDS[thing.kind]
        if thing.color not in kind.colors or thing.count > kind.most:
            return False
        if thing.pattern != "plain" and not kind.patterned:
            return False
        if (thing.size == "medium") == kind.sized:
            return False
    return all(_cluster_is_sound(plan, cluster) for cluster in plan.clusters)


def _cluster_is_sound(plan: Plan, cluster: Cluster) -> bool:
    head = plan.things[cluster.head]
    if cluster.tail is None:
        return KINDS[head.kind].sky if cluster.depth == "sky" else KINDS[head.kind].ground
    tail = plan.things[cluster.tail]
    most = (
        1 if cluster.relation == "next to" else couple_count(cluster.relation, head.kind, tail.kind)
    )
    return (
        fits_couple(cluster.relation, head.kind, tail.kind)
        and tail.count == 1
        and head.count <= most
        and _sizes_fit(cluster.relation, head, tail)
    )


def _depth(rng: random.Random) -> str:
    return "back" if rng.random() < 0.35 else "front"


def _sample_thing(rng: random.Random, name: str, count: int = 1, size: str | None = None) -> Thing:
    kind = KINDS[name]
    if not kind.sized:
        size = "medium"
    pattern = rng.choice(PATTERNS) if kind.patterned and rng.random() < 0.6 else "plain"
    return Thing(
        kind=name,
        color=rng.choice(kind.colors),
        size=size or rng.choice(("small", "large")),
        pattern=pattern,
        count=min(count, kind.most),
    )


def _sample_single(rng: random.Random, things: list[Thing], *, sky: bool) -> Thing:
    count = rng.choices((1, 2, 3, 4), (50, 22, 17, 11))[0]
    names = [name for name, kind in KINDS.items() if (kind.sky if sky else kind.ground)]
    seen = [thing.kind for thing in things if thing.kind in names]
    if seen and rng.random() < 0.2:
        # The same kind in another color, so that attributes must be bound to their object.
        return _sample_thing(rng, rng.choice(seen))
    # Kinds that are rare in couples are more frequent alone.
    weights = [1.0 if sky else 3 / (1 + _COUPLED.count(name)) for name in names]
    return _sample_thing(rng, rng.choices(names, weights)[0], count)


def _sample_couple(rng: random.Random) -> tuple[Thing, Thing]:
    relation = rng.choice(tuple(COUPLES))
    heads, tails = COUPLES[relation]
    head, tail = rng.choice(heads), rng.choice(tails)
    while head == tail:
        tail = rng.choice(tails)
    head_size, tail_size = FIXED_SIZES.get(relation, (None, None))
    most = couple_count(relation, head, tail)
    count = rng.choice((1, 1, 1, most))
    return (
        _sample_thing(rng, head, count, head_size),
        _sample_thing(rng, tail, 1, tail_size),
    )


def _relation(things: list[Thing], rng: random.Random) -> str:
    head, tail = things[-2:]
    possible = [name for name in COUPLES if fits_couple(name, head.kind, tail.kind)]
    sized = [name for name in possible if _sizes_fit(name, head, tail)]
    if head.count == 1 and rng.random() < 0.15:
        return "next to"
    return rng.choice(sized or possible)


def _sizes_fit(relation: str, head: Thing, tail: Thing) -> bool:
    wanted = FIXED_SIZES.get(relation, (None, None))
    return all(
        w is None or t.size in (w, "medium") for w, t in zip(wanted, (head, tail), strict=True)
    )


def swap_thing(plan: Plan, index: int, **changes: object) -> Plan:
    """The plan with changed attributes of one thing."""
    things = list(plan.things)
    things[index] = replace(things[index], **changes)  # type: ignore[arg-type]
    return replace(plan, things=tuple(things))
