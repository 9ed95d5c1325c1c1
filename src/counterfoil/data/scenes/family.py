"""Families of scenes: a base and minimal edits of it, each other's hardest negatives."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import count

from counterfoil.data.scenes.layout import lay_out
from counterfoil.data.scenes.plan import COUPLES, Plan, is_sound, sample_plan, swap_thing
from counterfoil.data.scenes.scene import Edit, Scene
from counterfoil.data.scenes.vocabulary import KINDS, PATTERNS, PEOPLE

MAX_FAMILY_SIZE = 4
_TRIES = 12

Editor = Callable[[Plan, int, random.Random], "tuple[Edit, Plan] | None"]

_KIN: tuple[tuple[str, ...], ...] = (
    PEOPLE,
    ("dog", "cat", "rabbit", "duck", "sheep"),
    ("horse", "cow", "dog", "sheep"),
    ("bird", "duck", "cat"),
    ("kite", "balloon", "plane", "bird"),
    ("car", "bus", "bicycle", "boat", "horse"),
    ("house", "tower", "tent", "tree"),
    ("tree", "bush", "flower"),
    ("ball", "box", "balloon", "lamp", "flower"),
    ("umbrella", "kite", "balloon", "guitar"),
    ("table", "chair", "box", "lamp"),
)


def make_scene(seed: tuple[int, ...]) -> Scene:
    """The scene of ``seed`` = (…, family, member); member 0 is the base, the others edit it.

    >>> scene = make_scene((0, 0, 7, 1))
    >>> scene == make_scene((0, 0, 7, 1))
    True
    >>> scene.family, scene.member
    (7, 1)
    """
    *_, family, member = seed
    if not 0 <= member < MAX_FAMILY_SIZE:
        raise ValueError(f"member {member} of a scene family: expected 0 to {MAX_FAMILY_SIZE - 1}")
    scenes = _make_family(seed[:-1])
    return replace(scenes[member], seed=tuple(seed), family=family, member=member)


@lru_cache(maxsize=8)
def _make_family(seed: tuple[int, ...]) -> tuple[Scene, ...]:
    name = "/".join(str(part) for part in seed)
    rng = random.Random(f"scenes {name}")
    for attempt in count():
        noise = f"{name}/{attempt}"
        family = _try_family(rng, noise)
        if family is not None:
            return family
    raise AssertionError("unreachable")


def _try_family(rng: random.Random, noise: str) -> tuple[Scene, ...] | None:
    """A base and `MAX_FAMILY_SIZE` - 1 edits of it, or None if the base leaves no room."""
    plan = sample_plan(rng)
    base = _realize(plan, noise)
    if base is None:
        return None
    found: list[tuple[Edit, Plan, Scene]] = []
    for _ in range(_TRIES):
        editor = rng.choices(tuple(_EDITORS.values()), tuple(_WEIGHTS.values()))[0]
        made = _edited(plan, editor, noise, rng)
        if made is not None and made[1] not in [other for _, other, _ in found]:
            found.append(made)
        if len(found) == MAX_FAMILY_SIZE - 1:
            break
    else:
        return None
    first = found[0][0]
    return (
        replace(base, focus=(first.object, first.what)),
        *(replace(scene, edit=edit, focus=(edit.object, edit.what)) for edit, _, scene in found),
    )


def _realize(plan: Plan, noise: str) -> Scene | None:
    return lay_out(plan, noise) if is_sound(plan) else None


def _edited(
    plan: Plan, editor: Editor, noise: str, rng: random.Random
) -> tuple[Edit, Plan, Scene] | None:
    """An edit of one sort that can be drawn; a sort that seldom can is tried several times."""
    for _ in range(_TRIES):
        edit = editor(plan, rng.randrange(len(plan.things)), rng)
        if edit is not None:
            scene = _realize(edit[1], noise)
            if scene is not None:
                return (*edit, scene)
    return None


def _edit_attribute(
    plan: Plan, index: int, what: str, options: list[object], rng: random.Random
) -> tuple[Edit, Plan] | None:
    before = getattr(plan.things[index], what)
    options = [option for option in options if option != before]
    if not options:
        return None
    after = rng.choice(options)
    return Edit(what, index, str(before), str(after)), swap_thing(plan, index, **{what: after})


def _edit_colour(plan: Plan, index: int, rng: random.Random) -> tuple[Edit, Plan] | None:
    return _edit_attribute(plan, index, "colour", list(KINDS[plan.things[index].kind].colours), rng)


def _edit_size(plan: Plan, index: int, rng: random.Random) -> tuple[Edit, Plan] | None:
    return _edit_attribute(plan, index, "size", ["small", "large"], rng)


def _edit_pattern(plan: Plan, index: int, rng: random.Random) -> tuple[Edit, Plan] | None:
    if not KINDS[plan.things[index].kind].patterned:
        return None
    return _edit_attribute(plan, index, "pattern", list(PATTERNS), rng)


def _edit_count(plan: Plan, index: int, rng: random.Random) -> tuple[Edit, Plan] | None:
    return _edit_attribute(plan, index, "count", [1, 2, 3, 4], rng)


def _edit_kind(plan: Plan, index: int, rng: random.Random) -> tuple[Edit, Plan] | None:
    kind = plan.things[index].kind
    return _edit_attribute(
        plan, index, "kind", [other for kin in _KIN if kind in kin for other in kin], rng
    )


def _edit_relation(plan: Plan, index: int, rng: random.Random) -> tuple[Edit, Plan] | None:
    for place, cluster in enumerate(plan.clusters):
        if cluster.tail is not None and index in (cluster.head, cluster.tail):
            after = rng.choice([name for name in (*COUPLES, "next to") if name != cluster.relation])
            clusters = list(plan.clusters)
            clusters[place] = replace(cluster, relation=after)
            edit = Edit("relation", cluster.head, cluster.relation, after)
            return edit, replace(plan, clusters=tuple(clusters))
    return None


def _edit_depth(plan: Plan, index: int, rng: random.Random) -> tuple[Edit, Plan] | None:
    for place, cluster in enumerate(plan.clusters):
        if index in (cluster.head, cluster.tail) and cluster.depth != "sky":
            after = "front" if cluster.depth == "back" else "back"
            clusters = list(plan.clusters)
            clusters[place] = replace(cluster, depth=after)
            edit = Edit("depth", cluster.head, cluster.depth, after)
            return edit, replace(plan, clusters=tuple(clusters))
    return None


def _edit_order(plan: Plan, index: int, rng: random.Random) -> tuple[Edit, Plan] | None:
    ground = [cluster for cluster in plan.clusters if cluster.depth != "sky"]
    if len(ground) < 2:
        return None
    place = rng.randrange(len(ground) - 1)
    first = ground[place]
    ground[place : place + 2] = [ground[place + 1], first]
    sky = plan.clusters[len(ground) :]
    edit = Edit("order", first.head, "left of", "right of")
    return edit, replace(plan, clusters=(*ground, *sky))


_EDITORS: dict[str, Editor] = {
    "colour": _edit_colour,
    "size": _edit_size,
    "pattern": _edit_pattern,
    "count": _edit_count,
    "kind": _edit_kind,
    "relation": _edit_relation,
    "depth": _edit_depth,
    "order": _edit_order,
}
_WEIGHTS = {
    "colour": 20,
    "size": 10,
    "pattern": 14,
    "count": 18,
    "kind": 20,
    "relation": 22,
    "depth": 6,
    "order": 10,
}
