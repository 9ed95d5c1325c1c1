"""Which column of a table is the image, the caption, the id, the split."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from counterfoil.errors import nearest

ALIASES = {
    "captions": (
        "captions", "caption", "text", "sentence", "sentences", "description", "descriptions",
        "comment", "raw",
    ),
    "image": (
        "image", "file", "filename", "file_name", "image_path", "image_name", "image_file", "path",
        "file_path", "filepath", "img", "img_path", "photo",
    ),
    "id": ("id", "image_id"),
    "split": ("split", "partition", "subset"),
}  # fmt: skip
_NUMBERED = re.compile(r"(caption|text|sentence|description|comment)s?[ _-]?\d+")
LABEL = "original_name"
RESERVED = frozenset(name for names in ALIASES.values() for name in names) | {LABEL}


@dataclass(frozen=True)
class Columns:
    """Names of the columns a table has for each role; the others are extras.

    There are several of captions if they are numbered: ``caption_1``, ``caption_2`` …
    """

    captions: tuple[str, ...]
    image: str | None
    id: str | None
    split: str | None
    label: str | None
    extras: tuple[str, ...]


def find_columns(names: Iterable[str], chosen: dict[str, str | None]) -> Columns | str:
    """The roles of a table's columns, or what is missing.

    >>> find_columns(["Image", "caption", "width"], {}).extras
    ('width',)
    """
    names = tuple(names)
    folded = {name.strip().lower(): name for name in reversed(names)}
    roles: dict[str, str | None] = {}
    for role, aliases in ALIASES.items():
        choice = chosen.get(role)
        if choice is not None:
            if choice not in names:
                return f"no column '{choice}'{nearest(choice, names)} {_found(names)}"
            roles[role] = choice
        else:
            roles[role] = next((folded[alias] for alias in aliases if alias in folded), None)
    one = roles.pop("captions")
    numbered = tuple(name for name in names if _NUMBERED.fullmatch(name.strip().lower()))
    captions = (one,) if one is not None else numbered
    if not captions:
        return f"no column of captions {_expected('captions', 'caption')} {_found(names)}"
    if roles["image"] is None and roles["id"] is None:
        return f"no column of images {_expected('image', 'image')} {_found(names)}"
    label = LABEL if LABEL in names else None
    used = {*captions, *roles.values(), label}
    return Columns(
        captions=captions,
        image=roles["image"],
        id=roles["id"],
        split=roles["split"],
        label=label,
        extras=tuple(name for name in names if name not in used),
    )


def _expected(role: str, option: str) -> str:
    return (
        f"({', '.join(ALIASES[role])}): the first line names the columns; call one of them so, or "
        f"name it with the option {option}_column=NAME"
    )


def _found(names: tuple[str, ...]) -> str:
    return f"(found: {', '.join(names) or 'none'})"
