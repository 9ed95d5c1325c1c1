"""Scene graph of a drawn scene: objects with attributes and boxes, and their relations."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

SIZE = 224

Box = tuple[float, float, float, float]
_STORED = {"color": "colour"}  # attributes with another name in files


@dataclass(frozen=True)
class SceneObject:
    """A group of one to four equal things; ``boxes`` in pixels, one for each."""

    kind: str
    color: str
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
        """The box around the whole group."""
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
    """The single difference of a scene from the base of its family."""

    what: str
    object: int
    before: str
    after: str


@dataclass(frozen=True)
class Scene:
    """A scene graph with everything needed to draw it.

    The scenes of a ``family`` are hard negatives of each other: each differs from member 0 by its
    ``edit``. ``focus`` is the (object, attribute) that varies.
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
        data = asdict(self)
        objects = [{_STORED.get(k, k): v for k, v in item.items()} for item in data["objects"]]
        return {**data, "objects": objects}

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
    stored = {key: data[_STORED.get(key, key)] for key in SceneObject.__dataclass_fields__}
    return SceneObject(**{**stored, "boxes": boxes})
