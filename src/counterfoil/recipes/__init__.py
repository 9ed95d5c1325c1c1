"""The recipes that come with the package, by name: ``scenes/naaf`` is ``scenes/naaf.yaml`` here.

What ends in ``.yaml`` is the path of a file; other words are names. A file that begins with ``_``
holds what others share: they extend it, and lists leave it out.
"""

from __future__ import annotations

import difflib
import re
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SUFFIXES = (".yaml", ".yml")


@cache
def recipe_names() -> tuple[str, ...]:
    """Names of all recipes of the package, sorted, those that are only extended as well."""
    files = FOLDER.rglob("*.yaml")
    return tuple(sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in files))


def matching_names(pattern: str) -> list[str]:
    """Names to list that a pattern with wildcards fits, whole or by folder or last part.

    >>> matching_names("coco/rvse*")
    ['coco/rvsepp', 'coco/rvsepp-bigru']
    >>> matching_names("naaf")
    ['coco/naaf', 'f30k/naaf', 'flickr8k/naaf', 'scenes/naaf']
    """
    return [
        name
        for name in recipe_names()
        if "/_" not in name and any(fnmatchcase(text, pattern) for text in (name, *name.split("/")))
    ]


def find_recipe(path: Path) -> Path:
    """The file of a recipe that is given by its name or its path; it may not exist."""
    is_name = path.suffix not in SUFFIXES and path.as_posix() in recipe_names()
    return FOLDER / f"{path.as_posix()}.yaml" if is_name else path


def recipe_name(path: Path) -> str | None:
    """The name of a recipe of the package that is given by its name or its path."""
    file = find_recipe(path)
    if not file.resolve().is_relative_to(FOLDER):
        return None
    return file.resolve().relative_to(FOLDER).with_suffix("").as_posix()


def suggest_recipes(path: Path) -> str:
    """A hint such as ``; did you mean 'scenes/naaf'?``, or an empty string.

    >>> suggest_recipes(Path("scenes/naaf"))
    "; did you mean 'scenes/naaf'?"
    >>> suggest_recipes(Path("naaf"))
    "; did you mean 'coco/naaf', 'f30k/naaf', 'flickr8k/naaf' or 'scenes/naaf'?"
    """
    given = path.with_suffix("") if path.suffix in SUFFIXES else path
    whole = "/".join(given.parts[-2:])
    last_parts = {name: name.rpartition("/")[2] for name in recipe_names()}
    close_parts = difflib.get_close_matches(given.name, last_parts.values(), 2)
    attempts = [
        [name for name in last_parts if _words(name) == _words(whole)],  # scenes/naaf
        [name for name, part in last_parts.items() if part == given.name],
        difflib.get_close_matches(whole, last_parts, 2),
        [name for name, part in last_parts.items() if part in close_parts],
    ]
    files = {one.stem: str(one) for one in sorted(path.parent.glob("*.yaml"))}
    meant = [files[stem] for stem in difflib.get_close_matches(given.name, files, 1)]
    meant += next(filter(None, attempts), [])
    *first, last = [f"'{name}'" for name in meant] or [""]
    listed = f"{', '.join(first)} or {last}" if first else last
    return f"; did you mean {listed}?" if listed else ""


def _words(name: str) -> set[str]:
    return set(re.split("[/-]", name)) - {"recipes"}
