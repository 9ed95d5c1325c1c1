"""The rows of an artefact, each with its runs seed by seed, before anything is known of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from counterfoil.reproduce.artefact import Point, Sweep
from counterfoil.reproduce.columns import run_reference
from counterfoil.reproduce.plan import Plan, PlannedRun
from counterfoil.reproduce.results import Found
from counterfoil.reproduce.spec import Row


@dataclass(frozen=True)
class ShownRow:
    """A row without numbers; ``runs[k]`` are the members of its seed ``seeds[k]``."""

    found: Found
    seeds: tuple[int, ...]
    runs: tuple[tuple[PlannedRun, ...], ...]
    standardise: bool = False
    foils: str | None = None
    blind: bool = False


def shown_rows(plan: Plan) -> list[ShownRow]:
    """Rows, or the points of a sweep, in their order."""
    artefact = plan.artefact
    if isinstance(artefact, Sweep):
        return [_of_point(plan, point) for point in artefact.points]
    return [_of_row(plan, row) for row in artefact.rows]


def _of_row(plan: Plan, row: Row) -> ShownRow:
    found = Found(
        label=row.label,
        published=row.published,
        published_measures=row.published_measures,
        note=row.note,
        quoted=row.published_only,
    )
    runs = [plan.runs[name] for name in row.members]
    shown = _shown(found, row.members, runs, row.standardise)
    if row.foils is None and not row.blind:
        return shown
    # rows of one run that differ in their foils are different results
    source = f"{shown.found.recipe} {row.foils} {row.blind}"
    recipe = hashlib.sha256(source.encode()).hexdigest()[:12]
    told = shown.found.model_copy(update={"recipe": recipe})
    return replace(shown, found=told, foils=row.foils, blind=row.blind)


def _of_point(plan: Plan, point: Point) -> ShownRow:
    label = [*filter(None, [point.line.label]), f"{point.value:g}"]
    found = Found(
        label=label, value=point.value, published=point.published, varied_run=point.line.run
    )
    return _shown(found, (point.line.run,), [plan.runs[point.title]])


def _shown(
    found: Found,
    names: Sequence[str],
    by_member: Sequence[Sequence[PlannedRun]],
    standardise: bool = False,
) -> ShownRow:
    runs = tuple(zip(*by_member, strict=True))
    seeds = tuple(_seed(names[0], members[0], index) for index, members in enumerate(runs))
    # as seen from OUT, so that results read the same wherever they were made
    folders = [f"runs/{run.folder.name}" for members in runs for run in members]
    recipe = _recipe(names, runs[0], standardise) if runs else ""
    told = found.model_copy(update={"recipe": recipe, "runs": folders})
    return ShownRow(told, seeds, runs, standardise)


def _seed(name: str, run: PlannedRun, index: int) -> int:
    """The seed that is in hand where a reference means this run."""
    meant = run_reference(name)
    return run.config.seed - meant.seed if meant.relative else index


def _recipe(names: Sequence[str], members: Sequence[PlannedRun], standardise: bool) -> str:
    """What a row is made of: which seeds of which settings, and how they are averaged."""
    told = [
        f"{name.partition('@')[2]}:{run.recipe}" for name, run in zip(names, members, strict=True)
    ]
    told += ["standardised"] if standardise else []
    return hashlib.sha256(" ".join(told).encode()).hexdigest()[:12]
