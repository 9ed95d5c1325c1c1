"""Families of scenes: a base and minimal edits of it, which are hard negatives of each other."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import count

from counterfoil.data.scenes.layout import lay_out
from counterfoil.data.scenes.plan import COUPLES, Cluster, Plan, is_sound, sample_plan, swap_thing
from counterfoil.data.scenes.scene import Edit, Scene
from counterfoil.data.scenes.vocabulary import KINDS, PATTERNS, PEOPLE

MAX_FAMILY_SIZE = 4
_TRIES = 12

Editor = Callable[[Plan, int, random.Random], "tuple[Edit, Plan] | None"]

_SIMILAR_KINDS: tuple[tuple[str, ...], ...] = (
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
    """A base and `MAX_FAMILY_SIZE` - 1 edits of it; None if they cannot be drawn."""
    plan = sample_plan(rng)
    base = _try_layout(plan, noise)
    if base is None:
        return None
    edits: list[tuple[Edit, Plan, Scene]] = []
    for _ in range(_TRIES):
        editor = rng.choices(tuple(_EDITORS), tuple(_EDITORS.values()))[0]
        edited = _try_edit(plan, editor, noise, rng)
        if edited is not None and edited[1] not in [other for _, other, _ in edits]:
            edits.append(edited)
        if len(edits) == MAX_FAMILY_SIZE - 1:
            break
    else:
        return None
    first = edits[0][0]
    return (
        replace(base, focus=(first.object, first.what)),
        *(replace(scene, edit=edit, focus=(edit.object, edit.what)) for edit, _, scene in edits),
    )


def _try_layout(plan: Plan, noise: str) -> Scene | None:
    return lay_out(plan, noise) if is_sound(plan) else None


def _try_edit(
    plan: Plan, editor: Editor, noise: str, rng: random.Random
) -> tuple[Edit, Plan, Scene] | None:
    """An edit by this editor that can be drawn; None after `_TRIES` attempts."""
    for _ in range(_TRIES):
        edit = editor(plan, rng.randrange(len(plan.things)), rng)
        if edit is not None:
            scene = _try_layout(edit[1], noise)
            if scene is not None:
                return (*edit, scene)
    return None


def _edit_attribute(
    plan: Plan, index: int, name: str, options: list[object], rng: random.Random
) -> tuple[Edit, Plan] | None:
    before = getattr(plan.things[index], name)
    options = [option for option in options if option != before]
    if not options:
        return None
    after = rng.choice(options)
    what = "colour" if name == "color" else name  # as edits are stored
    return Edit(what, index, str(before), str(after)), swap_thing(plan, index, **{name: after})


def _edit_color(plan: Plan, index: int, rng: random.Random) -> tuple[Edit, Plan] | None:
    return _edit_attribute(plan, index, "color", list(KINDS[plan.things[index].kind].colors), rng)


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
    others = [other for group in _SIMILAR_KINDS if kind in group for other in group]
    return _edit_attribute(plan, index, "kind", list(others), rng)


def _edit_relation(plan: Plan, index: int, rng: random.Random) -> tuple[Edit, Plan] | None:
    for cluster in plan.clusters:
        if cluster.tail is not None and index in (cluster.head, cluster.tail):
            after = rng.choice([name for name in (*COUPLES, "next to") if name != cluster.relation])
            return _edit_cluster(plan, cluster, "relation", after)
    return None


def _edit_depth(plan: Plan, index: int, rng: random.Random) -> tuple[Edit, Plan] | None:
    for cluster in plan.clusters:
        if index in (cluster.head, cluster.tail) and cluster.depth != "sky":
            after = "front" if cluster.depth == "back" else "back"
            return _edit_cluster(plan, cluster, "depth", after)
    return None


def _edit_cluster(plan: Plan, cluster: Cluster, what: str, after: str) -> tuple[Edit, Plan]:
    before = getattr(cluster, what)
    changed = replace(cluster, **{what: after})  # type: ignore[arg-type]
    clusters = tuple(changed if other is cluster else other for other in plan.clusters)
    return Edit(what, cluster.head, before, after), replace(plan, clusters=clusters)


def _edit_order(plan: Plan, index: int, rng: random.Random) -> tuple[Edit, Plan] | None:
    ground = [cluster for cluster in plan.clusters if cluster.depth != "sky"]
    if len(ground) < 2:
        return None
    left = rng.randrange(len(ground) - 1)
    first = ground[left]
    ground[left : left + 2] = [ground[left + 1], first]
    sky = plan.clusters[len(ground) :]
    edit = Edit("order", first.head, "left of", "right of")
    return edit, replace(plan, clusters=(*ground, *sky))


_EDITORS: dict[Editor, int] = {
    _edit_color: 20,
    _edit_size: 10,
    _edit_pattern: 14,
    _edit_count: 18,
    _edit_kind: 20,
    _edit_relation: 22,
    _edit_depth: 6,
    _edit_order: 10,
}
"""Editors with their weights in the random choice."""
