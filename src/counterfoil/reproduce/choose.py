"""Some rows of an artefact, by pattern."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from counterfoil.errors import ConfigError
from counterfoil.reproduce.spec import AnyArtefact, Row
from counterfoil.reproduce.sweep import Line, Sweep


def only_rows(artefact: AnyArtefact, patterns: Sequence[str]) -> AnyArtefact:
    """The artefact with the rows (or lines) that a pattern names by their label or by their run.

    >>> _names(Line(label="VSE (FC)", run="vse-fc"))
    ['VSE (FC)', 'vse-fc']
    """
    if not patterns:
        return artefact
    if isinstance(artefact, Sweep):
        if not artefact.lines:
            raise ConfigError(f"{artefact.name}: a sweep of one run has no rows to choose from")
        lines = [line for line in artefact.lines if _chosen(_names(line), patterns)]
        _refuse_unmet(artefact.name, patterns, [_names(line) for line in artefact.lines])
        return artefact.model_copy(update={"lines": lines})
    rows = [row for row in artefact.rows if _chosen(_names(row), patterns)]
    _refuse_unmet(artefact.name, patterns, [_names(row) for row in artefact.rows])
    return artefact.model_copy(update={"rows": rows})


def labels(artefact: AnyArtefact) -> list[list[str]]:
    """Of all rows, in their order."""
    if isinstance(artefact, Sweep):
        return [
            [*filter(None, [point.line.label]), f"{point.value:g}"] for point in artefact.points
        ]
    return [row.label for row in artefact.rows]


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
