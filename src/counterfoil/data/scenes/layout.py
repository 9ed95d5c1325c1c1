"""Layout: from a plan to a scene with boxes in pixels."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from counterfoil.data.scenes.plan import Cluster, Plan, Thing
from counterfoil.data.scenes.scene import SIZE, Box, Relation, Scene, SceneObject
from counterfoil.data.scenes.vocabulary import KINDS

SCALE = {"small": 0.64, "medium": 0.96, "large": 1.08}
_BASELINE = {"front": 212.0, "back": 160.0}
_MARGIN = 6.0
_GAP = 9.0
# A crowded scene is scaled down to this at most, so that sizes stay readable.
_MIN_ZOOM = 0.84
_WIDE = 38.0
# Where people sit, as a share of their height from the top.
_HIP = {"man": 0.6, "woman": 0.68, "boy": 0.7, "girl": 0.74}


@dataclass
class _Placed:
    """Boxes of one thing, x from the cluster's left, y up from its baseline (negative)."""

    index: int
    boxes: list[Box]
    layer: int = 0
    pose: str = "stand"


@dataclass
class _Block:
    """A laid-out cluster."""

    cluster: Cluster
    parts: list[_Placed] = field(default_factory=list)

    @property
    def bounds(self) -> Box:
        x1, y1, x2, y2 = zip(*(box for part in self.parts for box in part.boxes), strict=True)
        return min(x1), min(y1), max(x2), max(y2)

    @property
    def width(self) -> float:
        return self.bounds[2] - self.bounds[0]


def lay_out(plan: Plan, noise: str) -> Scene | None:
    """The scene of a plan; None if it would be too crowded.

    ``noise`` seeds what captions never mention: exact positions and flips.
    """
    blocks = [_block(plan, cluster) for cluster in plan.clusters]
    ground = [block for block in blocks if block.cluster.depth != "sky"]
    room = SIZE - 2 * _MARGIN - _GAP * (len(ground) - 1)
    zoom = min(1.0, room / sum(block.width for block in ground))
    if zoom < _MIN_ZOOM:
        return None
    placed = _place_ground(ground, zoom, room, noise)
    for block in blocks:
        if block.cluster.depth == "sky":
            above = _place_sky(block, placed, noise)
            if above is None:
                return None
            placed.append(above)
    objects = _objects(plan, placed, noise)
    if any(obj.box[1] < 2 for obj in objects):
        return None
    relations = _relations(plan, objects)
    return Scene((), 0, 0, plan.backdrop, tuple(objects), tuple(relations))


def _place_ground(
    ground: list[_Block], zoom: float, room: float, noise: str
) -> list[tuple[_Block, list[_Placed]]]:
    free = room - zoom * sum(block.width for block in ground)
    shares = [random.Random(f"{noise}/x{block.cluster.head}").random() for block in ground]
    total = sum(shares) + 0.5
    left = _MARGIN
    placed = []
    for block, share in zip(ground, shares, strict=True):
        x1, _, x2, _ = block.bounds
        left += free * share / total
        rng = random.Random(f"{noise}/y{block.cluster.head}")
        base = _BASELINE[block.cluster.depth] + rng.uniform(-5, 5)
        placed.append((block, _move(block, left - x1 * zoom, base, zoom)))
        left += zoom * (x2 - x1) + _GAP
    return placed


def _place_sky(
    block: _Block, placed: list[tuple[_Block, list[_Placed]]], noise: str
) -> tuple[_Block, list[_Placed]] | None:
    """A free position near the top; None after 14 attempts."""
    taken = [box for _, parts in placed for part in parts for box in part.boxes]
    rng = random.Random(f"{noise}/sky")
    x1, y1, x2, y2 = block.bounds
    for _ in range(14):
        left = rng.uniform(_MARGIN, SIZE - _MARGIN - (x2 - x1))
        top = rng.uniform(6, 26)
        spot = (left - 4, top - 4, left + (x2 - x1) + 4, top + (y2 - y1) + 6)
        if spot[3] < 112 and not any(_overlap(spot, box) for box in taken):
            return block, _move(block, left - x1, top - y1, 1.0)
    return None


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _move(block: _Block, dx: float, dy: float, zoom: float) -> list[_Placed]:
    return [
        _Placed(
            part.index,
            [
                (
                    round(dx + x1 * zoom, 1),
                    round(dy + y1 * zoom, 1),
                    round(dx + x2 * zoom, 1),
                    round(dy + y2 * zoom, 1),
                )
                for x1, y1, x2, y2 in part.boxes
            ],
            part.layer,
            part.pose,
        )
        for part in block.parts
    ]


def _objects(
    plan: Plan, placed: list[tuple[_Block, list[_Placed]]], noise: str
) -> list[SceneObject]:
    objects: dict[int, SceneObject] = {}
    for block, parts in placed:
        depth = block.cluster.depth
        flip = random.Random(f"{noise}/flip{block.cluster.head}").random() < 0.5
        # People hold things in the right hand; riders face the same way as their mount.
        flip = flip and block.cluster.relation != "holding"
        for part in parts:
            thing = plan.things[part.index]
            layer = part.layer + {"sky": 0, "back": 10, "front": 20}[depth]
            objects[part.index] = SceneObject(
                thing.kind,
                thing.color,
                thing.size,
                thing.pattern,
                thing.count,
                depth,
                tuple(_inside(part.boxes)),
                layer,
                flip,
                part.pose,
            )
    return [objects[index] for index in range(len(plan.things))]


def _relations(plan: Plan, objects: list[SceneObject]) -> list[Relation]:
    """The relations of the drawn couples, and those that follow from positions."""
    relations = [
        Relation(cluster.head, cluster.relation, cluster.tail)
        for cluster in plan.clusters
        if cluster.tail is not None
    ]
    coupled = {(r.subject, r.object) for r in relations if r.name != "next to"}
    for i, one in enumerate(objects):
        for j, other in enumerate(objects):
            if i == j or (i, j) in coupled or (j, i) in coupled:
                continue
            if one.box[2] <= other.box[0] + 1:
                relations.append(Relation(i, "left of", j))
                relations.append(Relation(j, "right of", i))
            overlap = min(one.box[2], other.box[2]) - max(one.box[0], other.box[0])
            if one.depth == "sky" and other.depth != "sky" and overlap > 4:
                relations.append(Relation(i, "above", j))
    return relations


def _size_of(thing: Thing, factor: float = 1.0) -> tuple[float, float]:
    kind = KINDS[thing.kind]
    scale = SCALE[thing.size] * factor
    return kind.width * scale, kind.height * scale


def _row(thing: Thing, factor: float = 1.0, tight: bool = False) -> list[Box]:
    """Boxes of a group on its baseline: in one row, or in two if it is wide."""
    w, h = _size_of(thing, factor)
    n = thing.count
    if n <= 2 or w <= _WIDE or tight:
        step = 1.0 if tight else 1.1
        return [(i * step * w, -h, (i * step + 1) * w, 0.0) for i in range(n)]
    lift = max(0.72 * h, 22.0)
    back = [((0.5 + 1.1 * i) * w, -lift - h, (1.5 + 1.1 * i) * w, -lift) for i in range(n - 2)]
    return [*back, *((1.1 * i * w, -h, (1.1 * i + 1) * w, 0.0) for i in range(2))]


def _inside(boxes: list[Box]) -> list[Box]:
    """Boxes moved up if they reach below the picture, as large things in a hand can."""
    below = max(0.0, max(y2 for _, _, _, y2 in boxes) - SIZE)
    moved = _shift(boxes, 0.0, -below) if below else boxes
    return [(x1, round(y1, 1), x2, round(y2, 1)) for x1, y1, x2, y2 in moved]


def _shift(boxes: list[Box], dx: float, dy: float) -> list[Box]:
    return [(x1 + dx, y1 + dy, x2 + dx, y2 + dy) for x1, y1, x2, y2 in boxes]


def _centered(boxes: list[Box], x: float, y: float) -> list[Box]:
    """A row moved so that the middle of its baseline is at (x, y)."""
    middle = (min(b[0] for b in boxes) + max(b[2] for b in boxes)) / 2
    return _shift(boxes, x - middle, y)


def _block(plan: Plan, cluster: Cluster) -> _Block:
    head = plan.things[cluster.head]
    pose = "fly" if cluster.depth == "sky" else "stand"
    if cluster.tail is None:
        return _Block(cluster, [_Placed(cluster.head, _row(head), pose=pose)])
    couple = _COUPLES[cluster.relation]
    parts = couple(head, plan.things[cluster.tail])
    parts[0].index, parts[1].index = cluster.head, cluster.tail
    return _Block(cluster, parts)


def _riding(head: Thing, tail: Thing) -> list[_Placed]:
    tw, th = _size_of(tail, 1.08)
    hw, hh = _size_of(head, 0.9)
    x, saddle = (0.45, 0.66) if tail.kind == "horse" else (0.37, 0.84)
    foot = min(-2.0, -saddle * th + (1 - _HIP[head.kind]) * hh)
    rider = (x * tw - hw / 2, foot - hh, x * tw + hw / 2, foot)
    return [_Placed(0, [rider], 1, "ride"), _Placed(1, [(0, -th, tw, 0)])]


def _holding(head: Thing, tail: Thing) -> list[_Placed]:
    hw, hh = _size_of(head)
    hand_x, hand_y = 0.96 * hw, -0.56 * hh
    row = _row(tail)
    _, th = _size_of(tail)
    if tail.kind == "ball":
        item = _centered(row, hand_x + 4, hand_y + 0.5 * th)
    elif tail.kind == "guitar":
        item = _centered(row, hand_x, hand_y + 0.62 * th)
    else:
        item = _centered(row, hand_x + (6 if tail.kind == "flower" else 0), hand_y + 4)
    layer = 1 if tail.kind in ("ball", "guitar", "flower") else -1
    return [_Placed(0, [(0, -hh, hw, 0)], pose="hold"), _Placed(1, item, layer, "held")]


def _on(head: Thing, tail: Thing) -> list[_Placed]:
    tw, th = _size_of(tail)
    x, surface = {"chair": (0.54, 0.47), "car": (0.47, 0.97)}.get(tail.kind, (0.5, 0.985))
    item = _centered(_row(head, tight=True), x * tw, -surface * th)
    return [_Placed(0, item, 1, "held"), _Placed(1, [(0, -th, tw, 0)])]


def _under(head: Thing, tail: Thing) -> list[_Placed]:
    factor = {"umbrella": 1.5, "table": 1.12}.get(tail.kind, 1.1)
    tw, th = _size_of(tail, factor)
    heads = _row(head, 0.92 if tail.kind == "table" else 1.0, tight=True)
    x = 0.5 * tw if head.count > 1 or tail.kind == "table" else 0.68 * tw
    return [_Placed(0, _centered(heads, x, -1), 1), _Placed(1, [(0, -th, tw, 0)])]


def _in_front(head: Thing, tail: Thing) -> list[_Placed]:
    tw, th = _size_of(tail)
    heads = _centered(_row(head, tight=True), (0.5 if head.count > 1 else 0.62) * tw, 6)
    return [_Placed(0, heads, 1), _Placed(1, [(0, -th - 10, tw, -10)])]


def _behind(head: Thing, tail: Thing) -> list[_Placed]:
    hw, hh = _size_of(head)
    tw, th = _size_of(tail)
    x = 0.5 * tw
    # Lifted so that well over half of it stays visible.
    lift = -min(0.3 * th, 12) - max(0.0, 1.75 * th - hh - min(0.3 * th, 12))
    hidden = (x - hw / 2, lift - hh, x + hw / 2, lift)
    return [_Placed(0, [hidden], -1), _Placed(1, [(0, -th, tw, 0)])]


def _next_to(head: Thing, tail: Thing) -> list[_Placed]:
    heads = _row(head)
    right = max(box[2] for box in heads)
    tw, th = _size_of(tail)
    lift = 24.0 if not KINDS[tail.kind].ground else 0.0
    beside = (right + 7, -th - lift, right + 7 + tw, -lift)
    return [_Placed(0, heads), _Placed(1, [beside])]


_COUPLES = {
    "riding": _riding,
    "holding": _holding,
    "on": _on,
    "under": _under,
    "in front of": _in_front,
    "behind": _behind,
    "next to": _next_to,
}
