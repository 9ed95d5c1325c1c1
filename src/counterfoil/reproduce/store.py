"""Results that outlive the runs: a folder of JSON, filled seed by seed from any number of calls.

Checkpoints are large and machines are lent; what was measured is small and stays. A result is known
by its row, its seed and the settings it was made with, so that a later call trains what is missing,
replaces what has changed, and leaves the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from counterfoil.core.errors import ConfigError, DataError
from counterfoil.core.storage.atomic import write_atomically
from counterfoil.core.storage.locks import LOCK, locked_in_turn
from counterfoil.reproduce.artifact import Sweep
from counterfoil.reproduce.plan import Plan, PlannedRun
from counterfoil.reproduce.results import Distribution, Reproduction, RowResult, SeedResult
from counterfoil.reproduce.spec import Curves, Examples, Histograms, Maps, Measured, Negatives
from counterfoil.reproduce.table_rows import TableRow, table_rows

KnownResults = dict[str, dict[int, SeedResult]]
"""Results by the recipe of a row, then by seed."""

Protocol = tuple[str, int | None]
"""The split that was judged, and the folds it was judged in where a data set says so."""


def stored_name(plan: Plan) -> str:
    """The file of an artefact: other data, protocols and scales have one of their own."""
    settings = plan.settings
    parts = [f"{plan.artifact.name}@{Path(settings.data).name}"]
    parts += [str(settings.published)] if plan.folds is not None else []
    parts += [settings.scale] if settings.scale != "full" else []
    return re.sub(r"[^A-Za-z0-9.=+@_-]+", "_", "-".join(parts))[:150] + ".json"


def read_stored(path: Path) -> Reproduction | None:
    """What a file of the store holds; None where there is none."""
    try:
        return Reproduction.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, DataError) as error:
        raise DataError(f"{path}: not results of a reproduction: {error}") from None


def protocol_of(found: Reproduction) -> Protocol:
    return found.judged_on, found.folds


def known_results(stored: Iterable[Reproduction], like: Protocol) -> KnownResults:
    """By recipe, what any table knows that was judged in the same way: tables share rows."""
    known: KnownResults = {}
    for one in stored:
        if protocol_of(one) == like:
            for row in one.rows:
                for each in row.each:
                    before = known.setdefault(each.recipe, {}).get(each.seed)
                    known[each.recipe][each.seed] = _both(before, each)
    return known


def skip_known(plan: Plan, known: KnownResults) -> None:
    """Mark the runs of which every row knows the numbers already, so that they are not trained."""
    done: set[str] = set()
    wanted: set[str] = set()
    for shown in table_rows(plan):
        seeds = known.get(shown.result.recipe, {})
        for index, (seed, members) in enumerate(zip(shown.seeds, shown.runs, strict=True)):
            needed = [*members, *_writers(plan, shown, index)]
            (done if seed in seeds else wanted).update(run.digest for run in needed)
    plan.settled |= done - wanted


def _writers(plan: Plan, shown: TableRow, index: int) -> list[PlannedRun]:
    """Other runs of a seed that write the foils on which a row is measured."""
    if not isinstance(plan.artifact, Measured):
        return []
    columns = [column.of_row(shown.foils, shown.blind) for column in plan.artifact.measures]
    return [plan.runs[column.writer][index] for column in columns if column.writer]


def merged(
    stored: Reproduction | None,
    found: Reproduction,
    known: KnownResults | None = None,
    order: Sequence[Sequence[str]] = (),
) -> Reproduction:
    """What was found now and what was known, row by row and seed by seed, the new before the old.

    A row of which nothing was found, in a call that was stopped say, leaves the old one as it is.
    ``order`` are the labels of all rows, for where only some of them were asked for.
    """
    known = known or {}
    before = {tuple(row.label): row for row in stored.rows} if stored is not None else {}
    rows_now = [_with_known(row, known.get(row.recipe, {})) for row in found.rows]
    labeled = {tuple(row.label): row for row in rows_now}
    now = {label: row for label, row in labeled.items() if row.each or label not in before}
    every = {**before, **now}
    places = {tuple(label): place for place, label in enumerate(order)}
    labels = [label for label in every if not order or label in places]
    if order:
        labels.sort(key=places.__getitem__)
    rows = [every[label] for label in labels]
    seeds = max((len(row.each) for row in rows), default=0)
    said = found.overrides
    if stored is not None and any(label not in now for label in labels):
        said = [one for one in said if one in stored.overrides]  # what is true of every row
    changed = {"rows": rows, "seeds": seeds or found.seeds, "overrides": said}
    if stored is not None:
        changed["distributions"] = _distributions(stored, found, [row.name for row in rows])
        changed["pairs"] = found.pairs or stored.pairs
    drawn = _figures(stored) if stored is not None and not _figures(found) else {}
    return found.model_copy(update=changed | drawn)


def _distributions(
    stored: Reproduction, found: Reproduction, names: Sequence[str]
) -> list[Distribution]:
    """Those of each row in order, the new before the old; rows that are gone have none."""
    again = {one.row for one in found.distributions}
    every = [*found.distributions, *(one for one in stored.distributions if one.row not in again)]
    return [one for name in names for one in every if one.row == name]


def _figures(one: Reproduction) -> dict[str, Any]:
    """What is drawn besides rows; nothing where no run of it was at hand."""
    if any(plot.curves for plot in one.plots) or one.maps or one.sheet is not None:
        return {"plots": one.plots, "maps": one.maps, "sheet": one.sheet}
    return {}


def _with_known(row: RowResult, known: Mapping[int, SeedResult]) -> RowResult:
    """A row with the seeds that were known of the same settings; old numbers of a seed stay."""
    new = {one.seed: one for one in row.each}
    each = [_both(known.get(seed), new.get(seed)) for seed in {*known, *new}]
    missing = max(0, row.missing - len(each) + len(row.each))
    return row.with_each(each).model_copy(update={"missing": missing})


def _both(old: SeedResult | None, new: SeedResult | None) -> SeedResult:
    if old is None or new is None:
        one = new or old
        assert one is not None  # noqa: S101 - a seed is asked for because one of them has it
        return one
    return new.model_copy(update={"numbers": old.numbers | new.numbers})


def write_stored(folder: Path, found: Reproduction, name: str) -> Path:
    """Write a file of the store; nothing of it says on which machine it was made.

    What failed is the affair of the call, which has said so: here it is a seed that is missing.
    """
    path = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    rows = [_without_errors(row) for row in found.rows]
    bare = found.model_copy(update={"data": Path(found.data).name, "rows": rows})
    write_atomically(path, bare.to_json() + "\n")
    return path


def _without_errors(row: RowResult) -> RowResult:
    failed = int(bool(row.errors) and not row.each)
    return row.model_copy(update={"errors": [], "missing": max(row.missing, failed)})


class ResultCache:
    """The file of a store that a plan belongs to, and what the other files know of its rows."""

    def __init__(self, folder: Path, plan: Plan, order: Sequence[Sequence[str]]) -> None:
        """``order`` are the labels of all rows, of which the plan may have but some."""
        self.folder, self.plan, self.order = folder, plan, order
        self.name = stored_name(plan)
        self._read()

    def _read(self) -> None:
        self.before = read_stored(self.folder / self.name)
        others = [p for p in sorted(self.folder.glob("*@*.json")) if p.name != self.name]
        # its own file last: of two that know a seed, it has the word
        stored = [*map(read_stored, others), self.before]
        artifact = self.plan.artifact
        on_dev = isinstance(artifact, Sweep) and artifact.judged_on == "dev"
        like = ("dev" if on_dev else "test", self.plan.folds)
        self.known = known_results([one for one in stored if one is not None], like)

    def skip_known(self) -> None:
        """Leave out of the plan what is known, unless a figure is still to be drawn from runs.

        Another table knows the numbers of a row, but not its curves, plots and examples.
        """
        artifact = self.plan.artifact
        if isinstance(artifact, (Histograms, Maps)):
            return
        drawn = self.before is not None and bool(_figures(self.before))
        if drawn or not isinstance(artifact, (Curves, Negatives, Examples)):
            skip_known(self.plan, self.known)

    def add(self, found: Reproduction) -> Reproduction:
        """Write what was found beside what is known by now, and give back both."""
        with locked_in_turn(self.folder / LOCK, "writing results there"):
            self._read()  # another call may have added rows meanwhile
            both = merged(self.before, found, self.known, self.order)
            write_stored(self.folder, both, self.name)
        return both


def best_values(found: Reproduction) -> dict[str, str]:
    """Of a sweep judged on dev: by run, the override that was best; equals go to the smaller."""
    if found.kind != "sweep" or not found.key:
        raise ConfigError(f"{found.name}: not a sweep, so it chooses no value")
    if found.judged_on != "dev":
        raise ConfigError(f"{found.name}: was judged on test; values are chosen on dev")
    best: dict[str, tuple[float, float]] = {}
    for row in found.rows:
        if row.varied_run is None or row.value is None or "rsum" not in row.numbers:
            continue
        score = (row.numbers["rsum"].mean, -row.value)
        best[row.varied_run] = max(score, best.get(row.varied_run, score))
    return {run: f"{found.key}={-value!r}" for run, (_, value) in best.items()}
