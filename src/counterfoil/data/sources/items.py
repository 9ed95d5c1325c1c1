"""What sources read, before it is checked: one item an image, in the order of the files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from counterfoil.data.fragments import FragmentTable
from counterfoil.data.images import ImageRef


@dataclass
class Item:
    """One image of a split as its source tells it.

    ``row`` is the image's row in the split's fragment table. ``caption_extras`` are lists that go
    with the captions one by one, and lose an entry when a caption is dropped.
    """

    id: str
    split: str
    captions: list[str]
    file: Path
    line: int | None = None
    caption_lines: Sequence[int] | None = None
    image: ImageRef | None = None
    row: int | None = None
    extras: dict[str, Any] = field(default_factory=dict)
    caption_extras: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def where(self) -> str:
        place = f"{self.file}:{self.line}" if self.line is not None else str(self.file)
        return f"{place}: image '{self.id}'"

    def where_caption(self, number: int) -> str:
        if self.caption_lines is not None:
            return f"{self.file}:{self.caption_lines[number]}"
        return f"{self.where}, caption {number + 1}"


@dataclass
class Draft:
    """A data set as read: its items and, by split, the fragments their rows refer to."""

    name: str
    items: list[Item] = field(default_factory=list)
    tables: dict[str, FragmentTable] = field(default_factory=dict)
