"""Loads tables and figures, by name from the package or from a YAML file, and selects rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import yaml

from counterfoil.core.config import merge, read_recipe, read_value
from counterfoil.core.errors import ConfigError, nearest
from counterfoil.core.recipes import SUFFIXES
from counterfoil.reproduce.artifact import Line, Sweep
from counterfoil.reproduce.spec import AnyArtifact, Row, build_artifact

TABLES = Path(__file__).parent / "tables"
R = TypeVar("R", Row, Line)


def names() -> list[str]:
    """Names of all tables and figures; files that begin with _ are only bases to extend."""
    return sorted(
        (path.stem for path in TABLES.glob("*.yaml") if not path.name.startswith("_")), key=_natural
    )


def load_artifact(name: str) -> AnyArtifact:
    """A table or figure, by name or from a YAML file."""
    path = Path(name) if name.endswith(SUFFIXES) else TABLES / f"{name}.yaml"
    if path.parent == TABLES and path.stem not in names():
        raise ConfigError(
            f"unknown table or figure '{name}'{nearest(name, names())} "
            "(see counterfoil reproduce --list; a file of your own must end in .yaml)"
        )
    return build_artifact({"name": path.stem, **_read(path)}, str(path))


def _read(path: Path) -> dict[str, Any]:
    """A file that may extend a file beside it, or a table of the package."""
    try:
        tree = read_value(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return read_recipe(path)  # raises an error with the reason
    base = tree.get("extends") if isinstance(tree, dict) else None
    if not isinstance(base, str) or (path.parent / base).exists():
        return read_recipe(path)
    packaged = TABLES / (base if base.endswith(SUFFIXES) else f"{base}.yaml")
    if not packaged.is_file():
        raise ConfigError(
            f"{path}: extends: there is neither a file {path.parent / base} nor a table "
            f"'{base}'{nearest(base, names())} (counterfoil reproduce --list)"
        )
    own = {key: value for key, value in tree.items() if key != "extends"}
    return merge(read_recipe(packaged), own)


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key that puts table2 before table10 and figure1b before figure3."""
    match = re.fullmatch(r"(.*?)(\d+)[a-z]?", name)
    return [(0, match[1] if match else name), (int(match[2]) if match else 0, name)]


def only_rows(artifact: AnyArtifact, patterns: Sequence[str]) -> AnyArtifact:
    """The artifact with only the rows (or lines) whose label or run matches a pattern.

    >>> _names(Line(label="VSE (FC)", run="vse-fc"))
    ['VSE (FC)', 'vse-fc']
    """
    if not patterns:
        return artifact
    if isinstance(artifact, Sweep):
        if not artifact.lines:
            raise ConfigError(f"{artifact.name}: --rows does not apply to a sweep of one run")
        return artifact.model_copy(update={"lines": _selected(artifact, artifact.lines, patterns)})
    return artifact.model_copy(update={"rows": _selected(artifact, artifact.rows, patterns)})


def labels(artifact: AnyArtifact) -> list[list[str]]:
    """The labels of all rows, in order."""
    if isinstance(artifact, Sweep):
        return [
            [*filter(None, [point.line.label]), f"{point.value:g}"] for point in artifact.points
        ]
    return [row.label for row in artifact.rows]


def _names(row: Row | Line) -> list[str]:
    if isinstance(row, Line):
        return [row.label, row.run]
    return [row.name, *row.members]


def _selected(artifact: AnyArtifact, rows: Sequence[R], patterns: Sequence[str]) -> list[R]:
    for pattern in patterns:
        if not any(_matches(row, pattern) for row in rows):
            labels = "; ".join(_names(row)[0] for row in rows)
            raise ConfigError(
                f"--rows {pattern}: no row of {artifact.name} matches (it has: {labels})"
            )
    return [row for row in rows if any(_matches(row, pattern) for pattern in patterns)]


def _matches(row: Row | Line, pattern: str) -> bool:
    return any(fnmatchcase(name.lower(), pattern.lower()) for name in _names(row))
