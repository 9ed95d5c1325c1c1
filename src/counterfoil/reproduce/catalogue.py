"""The tables and figures that come with the package, files of one's own, and some rows of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from counterfoil.core.config import merge, read_recipe, read_value
from counterfoil.core.errors import ConfigError, nearest
from counterfoil.core.recipes import SUFFIXES
from counterfoil.reproduce.artifact import Line, Sweep
from counterfoil.reproduce.spec import AnyArtifact, Row, build_artifact

TABLES = Path(__file__).parent / "tables"


def names() -> list[str]:
    """Everything that can be reproduced by name; a file that begins with _ is only extended."""
    return sorted(
        (path.stem for path in TABLES.glob("*.yaml") if not path.name.startswith("_")), key=_natural
    )


def load_artifact(name: str) -> AnyArtifact:
    """A table or figure by its name, or from a YAML file."""
    path = Path(name) if name.endswith(SUFFIXES) else TABLES / f"{name}.yaml"
    if path.parent == TABLES and path.stem not in names():
        raise ConfigError(
            f"nothing called '{name}' to reproduce{nearest(name, names())} "
            "(counterfoil reproduce --list shows what there is; a file of your own ends in .yaml)"
        )
    return build_artifact({"name": path.stem, **_read(path)}, str(path))


def _read(path: Path) -> dict[str, Any]:
    """A file whose ``extends`` lies beside it, or is a name or file of the package."""
    try:
        tree = read_value(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return read_recipe(path)  # which says what is wrong
    base = tree.get("extends") if isinstance(tree, dict) else None
    if not isinstance(base, str) or (path.parent / base).exists():
        return read_recipe(path)
    named = TABLES / (base if base.endswith(SUFFIXES) else f"{base}.yaml")
    if not named.is_file():
        return read_recipe(path)  # which says what is missing
    own = {key: value for key, value in tree.items() if key != "extends"}
    return merge(read_recipe(named), own)


def _natural(name: str) -> list[tuple[int, str]]:
    """table2 before table10, figure1b before figure3."""
    found = re.fullmatch(r"(.*?)(\d+)[a-z]?", name)
    return [(0, found[1] if found else name), (int(found[2]) if found else 0, name)]


def only_rows(artifact: AnyArtifact, patterns: Sequence[str]) -> AnyArtifact:
    """The artefact with the rows (or lines) that a pattern names by their label or by their run.

    >>> _names(Line(label="VSE (FC)", run="vse-fc"))
    ['VSE (FC)', 'vse-fc']
    """
    if not patterns:
        return artifact
    if isinstance(artifact, Sweep):
        if not artifact.lines:
            raise ConfigError(f"{artifact.name}: a sweep of one run has no rows to choose from")
        lines = [line for line in artifact.lines if _chosen(_names(line), patterns)]
        _refuse_unmet(artifact.name, patterns, [_names(line) for line in artifact.lines])
        return artifact.model_copy(update={"lines": lines})
    rows = [row for row in artifact.rows if _chosen(_names(row), patterns)]
    _refuse_unmet(artifact.name, patterns, [_names(row) for row in artifact.rows])
    return artifact.model_copy(update={"rows": rows})


def labels(artifact: AnyArtifact) -> list[list[str]]:
    """Of all rows, in their order."""
    if isinstance(artifact, Sweep):
        return [
            [*filter(None, [point.line.label]), f"{point.value:g}"] for point in artifact.points
        ]
    return [row.label for row in artifact.rows]


def _names(row: Row | Line) -> list[str]:
    if isinstance(row, Line):
        return [row.label, row.run]
    return [row.name, *row.members]


def _chosen(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(_meets(name, pattern) for name in names for pattern in patterns)


def _meets(name: str, pattern: str) -> bool:
    return fnmatchcase(name.lower(), pattern.lower())


def _refuse_unmet(name: str, patterns: Sequence[str], known: Sequence[Sequence[str]]) -> None:
    for pattern in patterns:
        if not any(_meets(one, pattern) for names in known for one in names):
            listed = "; ".join(names[0] for names in known)
            raise ConfigError(f"--rows {pattern}: no row of {name} is called so (it has: {listed})")
