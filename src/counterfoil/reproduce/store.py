"""Stored results: a folder of JSON files to which any number of calls add rows and seeds.

Checkpoints are large and training is expensive; results are small, so they are kept. A result is
identified by its row, its seed and its settings. A later call trains what is missing, replaces what
has changed, and leaves the rest.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.storage.atomic import write_atomically
from counterfoil.core.storage.locks import LOCK, locked_in_turn
from counterfoil.reproduce.artifact import Sweep
from counterfoil.reproduce.grid import best_value, ends_at_edge
from counterfoil.reproduce.plan import Plan, PlannedRun
from counterfoil.reproduce.results import (
    Distribution,
    Reproduction,
    RowResult,
    SeedResult,
    TableRow,
    table_rows,
)
from counterfoil.reproduce.spec import Curves, Examples, Histograms, Maps, Measured, Negatives

KnownResults = dict[str, dict[int, SeedResult]]
"""Results by the recipe of a row, then by seed."""

Protocol = tuple[str, int | None]
"""The evaluated split, and its folds if a data set defines them."""


def stored_name(plan: Plan) -> str:
    """The file name of an artifact for one data set, protocol and scale."""
    settings = plan.settings
    parts = [f"{plan.artifact.name}@{Path(settings.data).name}"]
    parts += [str(settings.published)] if plan.folds is not None else []
    parts += [settings.scale] if settings.scale != "full" else []
    return re.sub(r"[^A-Za-z0-9.=+@_-]+", "_", "-".join(parts))[:150] + ".json"


def read_stored(path: Path) -> Reproduction | None:
    """The results in a file; None if there is no file."""
    try:
        return Reproduction.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, DataError) as error:
        raise DataError(f"{path}: not results of a reproduction: {error}") from None


def known_results(stored: Iterable[Reproduction], protocol: Protocol) -> KnownResults:
    """Results of all tables with the same protocol, as tables share rows."""
    known: KnownResults = {}
    for one in stored:
        if (one.judged_on, one.folds) == protocol:
            for row in one.rows:
                for each in row.each:
                    before = known.setdefault(each.recipe, {}).get(each.seed)
                    known[each.recipe][each.seed] = _both(before, each)
    return known


def skip_known(plan: Plan, known: KnownResults, diverged: Collection[str] = frozenset()) -> None:
    """Mark runs as settled if all rows that need them have their numbers.

    Runs of rows whose recipe has ``diverged`` are settled, too.
    """
    done: set[str] = set()
    wanted: set[str] = set()
    for row in table_rows(plan):
        seeds = known.get(row.result.recipe, {})
        for index, (seed, members) in enumerate(zip(row.seeds, row.runs, strict=True)):
            needed = [*members, *_writers(plan, row, index)]
            settled = seed in seeds or row.result.recipe in diverged
            (done if settled else wanted).update(run.digest for run in needed)
    plan.settled |= done - wanted


def _writers(plan: Plan, row: TableRow, index: int) -> list[PlannedRun]:
    """The other runs that write the foils of a row, for one seed."""
    if not isinstance(plan.artifact, Measured):
        return []
    columns = [column.of_row(row.foils, row.blind) for column in plan.artifact.measures]
    return [plan.runs[column.writer][index] for column in columns if column.writer]


def merged(
    stored: Reproduction | None,
    result: Reproduction,
    known: KnownResults | None = None,
    order: Sequence[Sequence[str]] = (),
) -> Reproduction:
    """Merge new results into the stored ones, per row and seed; new numbers replace old ones.

    A new row without numbers, for example of an interrupted call, does not replace a stored one,
    unless that has none either and its run diverged now.
    ``order`` has the labels of all rows, of which ``result`` may have only some.
    """
    known = known or {}
    before = {tuple(row.label): row for row in stored.rows} if stored is not None else {}
    rows_now = [_with_known(row, known.get(row.recipe, {})) for row in result.rows]
    labeled = {tuple(row.label): row for row in rows_now}
    now = {
        label: row
        for label, row in labeled.items()
        if row.each or label not in before or (row.diverged and not before[label].each)
    }
    every = {**before, **now}
    labels = [label for label in map(tuple, order) if label in every] if order else list(every)
    labels += _further_values(every, labels)
    rows = [every[label] for label in labels]
    seeds = max((len(row.each) for row in rows), default=0)
    overrides = result.overrides
    if stored is not None and any(label not in now for label in labels):
        # only the overrides that all rows have in common
        overrides = [one for one in overrides if one in stored.overrides]
    changed = {"rows": rows, "seeds": seeds or result.seeds, "overrides": overrides}
    if stored is not None:
        changed["distributions"] = _distributions(stored, result, [row.name for row in rows])
        changed["pairs"] = result.pairs or stored.pairs
    drawn = _figures(stored) if stored is not None and not _figures(result) else {}
    return result.model_copy(update=changed | drawn)


def _further_values(
    every: Mapping[tuple[str, ...], RowResult], labels: Sequence[tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """The values that lines of a sweep have been tried at, besides those of its grid."""
    lines = {label[:-1] for label in labels if every[label].value is not None}
    return [label for label in every if label not in labels and label[:-1] in lines]


def _distributions(
    stored: Reproduction, result: Reproduction, names: Sequence[str]
) -> list[Distribution]:
    """The distributions of the named rows, in order; new ones replace stored ones."""
    new = {one.row for one in result.distributions}
    every = [*result.distributions, *(one for one in stored.distributions if one.row not in new)]
    return [one for name in names for one in every if one.row == name]


def _figures(one: Reproduction) -> dict[str, Any]:
    """Plots, maps and examples; empty if there was no run to draw them from."""
    if any(plot.curves for plot in one.plots) or one.maps or one.sheet is not None:
        return {"plots": one.plots, "maps": one.maps, "sheet": one.sheet}
    return {}


def _with_known(row: RowResult, known: Mapping[int, SeedResult]) -> RowResult:
    """A row with the known seeds of the same settings added, and known numbers per seed."""
    new = {one.seed: one for one in row.each}
    each = [_both(known.get(seed), new.get(seed)) for seed in {*known, *new}]
    missing = max(0, row.missing - len(each) + len(row.each))
    update = {"missing": missing, "diverged": row.diverged and not each}
    return row.with_each(each).model_copy(update=update)


def _both(old: SeedResult | None, new: SeedResult | None) -> SeedResult:
    if old is None or new is None:
        one = new or old
        assert one is not None  # noqa: S101 - each seed comes from one of them
        return one
    return new.model_copy(update={"numbers": old.numbers | new.numbers})


def write_stored(folder: Path, result: Reproduction, name: str) -> Path:
    """Write a file of the store, without paths of this machine.

    Errors are not stored, as the call has reported them; a failed seed counts as missing, unless
    it diverged: that is a result.
    """
    path = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    rows = [_without_errors(row) for row in result.rows]
    bare = result.model_copy(update={"data": Path(result.data).name, "rows": rows})
    write_atomically(path, bare.to_json() + "\n")
    return path


def _without_errors(row: RowResult) -> RowResult:
    failed = int(bool(row.errors) and not row.each and not row.diverged)
    return row.model_copy(update={"errors": [], "missing": max(row.missing, failed)})


class ResultCache:
    """The stored file of a plan, and the results for its rows in all files of the store."""

    def __init__(self, folder: Path, plan: Plan, order: Sequence[Sequence[str]]) -> None:
        """``order`` has the labels of all rows, of which the plan may have only some."""
        self.folder, self.plan, self.order = folder, plan, order
        self.name = stored_name(plan)
        self._read()

    def _read(self) -> None:
        self.before = read_stored(self.folder / self.name)
        others = [p for p in sorted(self.folder.glob("*@*.json")) if p.name != self.name]
        # its own file last, so that it takes precedence
        stored = [*map(read_stored, others), self.before]
        artifact = self.plan.artifact
        split = artifact.judged_on if isinstance(artifact, Sweep) else "test"
        self.known = known_results(filter(None, stored), (split, self.plan.folds))

    def skip_known(self) -> None:
        """Skip runs with known results, unless a figure must still be drawn from them.

        Other tables may have the numbers of a row, but not its curves, plots and examples.
        """
        artifact = self.plan.artifact
        if isinstance(artifact, (Histograms, Maps)):
            return
        drawn = self.before is not None and bool(_figures(self.before))
        if drawn or not isinstance(artifact, (Curves, Negatives, Examples)):
            rows = self.before.rows if self.before is not None else []
            skip_known(self.plan, self.known, {row.recipe for row in rows if row.diverged})

    def add(self, result: Reproduction) -> Reproduction:
        """Merge results into the stored ones, write them, and return them."""
        with locked_in_turn(self.folder / LOCK, "writing results there"):
            self._read()  # another call may have added rows meanwhile
            total = merged(self.before, result, self.known, self.order)
            write_stored(self.folder, total, self.name)
        return total


def best_values(*results: Reproduction) -> dict[str, tuple[str, ...]]:
    """The best overrides per run of sweeps on dev, one for each key.

    Of equal values, the smaller one is chosen.
    """
    values: dict[str, dict[str, str]] = {}
    for result in results:
        for run, value in _best_of(result).items():
            values.setdefault(run, {})[result.key or ""] = f"{result.key}={value!r}"
    return {run: tuple(overrides.values()) for run, overrides in values.items()}


def runs_at_edges(*results: Reproduction) -> frozenset[str]:
    """The runs that `best_values` gives a value at an edge of what its sweep tried."""
    edges: dict[tuple[str, str | None], bool] = {}
    for result in results:
        for run, rows in _by_run(result).items():
            if best_value(rows) is not None:
                edges[run, result.key] = ends_at_edge(rows)  # a later sweep of the key counts
    return frozenset(run for (run, _), at_edge in edges.items() if at_edge)


def _by_run(result: Reproduction) -> dict[str, list[RowResult]]:
    rows: dict[str, list[RowResult]] = {}
    for row in result.rows:
        if row.varied_run is not None:
            rows.setdefault(row.varied_run, []).append(row)
    return rows


def _best_of(result: Reproduction) -> dict[str, float]:
    if result.kind != "sweep" or not result.key:
        raise ConfigError(f"{result.name}: not a sweep; give the results of a sweep on dev")
    if result.judged_on != "dev":
        raise ConfigError(f"{result.name}: a sweep on test, but values are chosen on dev")
    best = {run: best_value(rows) for run, rows in _by_run(result).items()}
    tried = [row.value for row in result.rows if row.value is not None]
    number = int if all(value.is_integer() for value in tried) else float
    return {run: number(value) for run, value in best.items() if value is not None}
