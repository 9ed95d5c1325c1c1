"""A drawn scene as data: what is where, in which colour, and how things relate."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

SIZE = 224

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class SceneObject:
    """One to four alike things that stand together; ``boxes`` in pixels, one a thing."""

    kind: str
    colour: str
    size: str
    pattern: str
    count: int
    depth: str
    boxes: tuple[Box, ...]
    layer: int = 0
    flip: bool = False
    pose: str = "stand"

    @property
    def box(self) -> Box:
        """The box around all of them."""
        x1, y1, x2, y2 = zip(*self.boxes, strict=True)
        return min(x1), min(y1), max(x2), max(y2)

    @property
    def center(self) -> tuple[float, float]:
        x1, y1, x2, y2 = self.box
        return (x1 + x2) / 2, (y1 + y2) / 2


@dataclass(frozen=True)
class Relation:
    """``subject`` (an object's index) is ``name`` ``object``: 0 *riding* 1."""

    subject: int
    name: str
    object: int


@dataclass(frozen=True)
class Edit:
    """The one thing in which a scene differs from the base of its family."""

    what: str
    object: int
    before: str
    after: str


@dataclass(frozen=True)
class Scene:
    """A scene graph with everything needed to draw it.

    ``family`` and ``member`` name its hard neighbours: the scenes of a family differ from member 0
    by their ``edit``. ``focus`` is (object, attribute) of what varies in the family.
    """

    seed: tuple[int, ...]
    family: int
    member: int
    backdrop: str
    objects: tuple[SceneObject, ...]
    relations: tuple[Relation, ...]
    edit: Edit | None = None
    focus: tuple[int, str] | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Scene:
        return cls(
            seed=tuple(data["seed"]),
            family=data["family"],
            member=data["member"],
            backdrop=data["backdrop"],
            objects=tuple(_object(item) for item in data["objects"]),
            relations=tuple(Relation(**item) for item in data["relations"]),
            edit=Edit(**data["edit"]) if data["edit"] else None,
            focus=(data["focus"][0], data["focus"][1]) if data["focus"] else None,
        )


def _object(data: dict[str, Any]) -> SceneObject:
    boxes = tuple((b[0], b[1], b[2], b[3]) for b in data["boxes"])
    return SceneObject(**{**data, "boxes": boxes})
