"""The rows of an artefact, each with its runs seed by seed, before anything is known of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from counterfoil.reproduce.artifact import Point, Sweep
from counterfoil.reproduce.columns import run_reference
from counterfoil.reproduce.plan import Plan, PlannedRun
from counterfoil.reproduce.results import RowResult
from counterfoil.reproduce.spec import Row


@dataclass(frozen=True)
class TableRow:
    """A row without numbers; ``runs[k]`` are the members of its seed ``seeds[k]``."""

    result: RowResult
    seeds: tuple[int, ...]
    runs: tuple[tuple[PlannedRun, ...], ...]
    standardize: bool = False
    foils: str | None = None
    blind: bool = False


def table_rows(plan: Plan) -> list[TableRow]:
    """Rows, or the points of a sweep, in their order."""
    artifact = plan.artifact
    if isinstance(artifact, Sweep):
        return [_of_point(plan, point) for point in artifact.points]
    return [_of_row(plan, row) for row in artifact.rows]


def _of_row(plan: Plan, row: Row) -> TableRow:
    found = RowResult(
        label=row.label,
        published=row.published,
        published_measures=row.published_measures,
        note=row.note,
        quoted=row.published_only,
    )
    runs = [plan.runs[name] for name in row.members]
    shown = _shown(found, row.members, runs, row.standardize)
    if row.foils is None and not row.blind:
        return shown
    # rows of one run that differ in their foils are different results
    source = f"{shown.result.recipe} {row.foils} {row.blind}"
    recipe = hashlib.sha256(source.encode()).hexdigest()[:12]
    told = shown.result.model_copy(update={"recipe": recipe})
    return replace(shown, result=told, foils=row.foils, blind=row.blind)


def _of_point(plan: Plan, point: Point) -> TableRow:
    label = [*filter(None, [point.line.label]), f"{point.value:g}"]
    found = RowResult(
        label=label, value=point.value, published=point.published, varied_run=point.line.run
    )
    return _shown(found, (point.line.run,), [plan.runs[point.title]])


def _shown(
    found: RowResult,
    names: Sequence[str],
    by_member: Sequence[Sequence[PlannedRun]],
    standardize: bool = False,
) -> TableRow:
    runs = tuple(zip(*by_member, strict=True))
    seeds = tuple(_seed(names[0], members[0], index) for index, members in enumerate(runs))
    # as seen from OUT, so that results read the same wherever they were made
    folders = [f"runs/{run.folder.name}" for members in runs for run in members]
    recipe = _recipe(names, runs[0], standardize) if runs else ""
    told = found.model_copy(update={"recipe": recipe, "runs": folders})
    return TableRow(told, seeds, runs, standardize)


def _seed(name: str, run: PlannedRun, index: int) -> int:
    """The seed that is in hand where a reference means this run."""
    meant = run_reference(name)
    return run.config.seed - meant.seed if meant.relative else index


def _recipe(names: Sequence[str], members: Sequence[PlannedRun], standardize: bool) -> str:
    """What a row is made of: which seeds of which settings, and how they are averaged."""
    told = [
        f"{name.partition('@')[2]}:{run.recipe}" for name, run in zip(names, members, strict=True)
    ]
    told += ["standardised"] if standardize else []
    return hashlib.sha256(" ".join(told).encode()).hexdigest()[:12]
