"""From run folders to the numbers of a table or figure, mean and deviation over seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from counterfoil.core.config import RunConfig
from counterfoil.core.errors import ConfigError
from counterfoil.evaluation.evaluate import flat_metrics
from counterfoil.objectives import create_objective
from counterfoil.reproduce.artifact import METRICS, Sweep
from counterfoil.reproduce.columns import MeasureColumn
from counterfoil.reproduce.distributions import read_distributions
from counterfoil.reproduce.examples import collect_sheet
from counterfoil.reproduce.measure import MeasureEvaluator, RunEvaluator
from counterfoil.reproduce.negatives import collect_negatives
from counterfoil.reproduce.plan import Plan, PlannedRun
from counterfoil.reproduce.results import (
    Curve,
    Measure,
    Plot,
    Reproduction,
    RowResult,
    SeedResult,
    ShownMeasure,
    ShownPanel,
    StatedClaim,
    read_cost,
)
from counterfoil.reproduce.runner import Outcome, describe
from counterfoil.reproduce.spec import (
    Curves,
    Examples,
    Histograms,
    Maps,
    Measured,
    Negatives,
    Panel,
    Row,
    Scatter,
)
from counterfoil.reproduce.table_rows import TableRow, table_rows
from counterfoil.reproduce.word_maps import map_pairs
from counterfoil.training.logs import read_metrics

MAX_CURVE_POINTS = 200
"""Of one curve; longer ones are averaged over neighbouring points."""


def collect(
    plan: Plan, outcome: Outcome, evaluator: RunEvaluator, *, with_measures: bool = True
) -> Reproduction:
    """Everything there is to show; rows that are not finished say so.

    Without measures it is a matter of moments.
    """
    artifact, settings = plan.artifact, plan.settings
    chosen = artifact.data_sets.get(settings.published) if settings.published else None
    folds = plan.folds
    collector = _Collector(plan, outcome, evaluator, folds)
    found = Reproduction(
        name=artifact.name,
        kind=artifact.kind,
        title=artifact.title,
        paper=artifact.paper,
        data=settings.data,
        scale=settings.scale,
        seeds=settings.seeds,
        overrides=list(settings.overrides),
        columns=[],
        rows=[],
        published_on=settings.published if chosen else None,
        published_title=chosen.title if chosen else None,
        folds=folds,
        published_elsewhere=bool(chosen and chosen.elsewhere),
        note=artifact.note,
    )
    shown = table_rows(plan)
    if isinstance(artifact, Sweep):
        on_dev = artifact.judged_on == "dev"
        rows = [collector.row(row, on_dev=on_dev) for row in shown]
        named = ["Model"] if artifact.lines else []
        more = {
            "columns": [*named, artifact.x_label],
            "x_label": artifact.x_label,
            "log": artifact.log,
            "key": artifact.key,
            "judged_on": artifact.judged_on,
            "panels": [
                ShownPanel(name=p.metric, title=p.title, y_label=p.y_label, parts=list(p.parts))
                for p in artifact.panels
            ],
        }
        return found.model_copy(update={"rows": rows, **more})
    rows = [collector.row(row) for row in shown]
    if isinstance(artifact, Scatter):
        rows = [
            collector.with_speed(row, spec, artifact.repeats)
            for row, spec in zip(rows, artifact.rows, strict=True)
        ]
    plots = collector.plots(artifact) if isinstance(artifact, Curves) else []
    if isinstance(artifact, Histograms):
        found = found.model_copy(update={"distributions": read_distributions(plan, artifact)})
    if isinstance(artifact, Maps) and with_measures:
        try:
            found = found.model_copy(update={"pairs": map_pairs(plan, artifact, evaluator)})
        except Exception as error:  # the rows are wanted all the same
            failed = {"errors": [*rows[0].errors, describe(error)]}
            rows[0] = rows[0].model_copy(update=failed)
    if isinstance(artifact, Negatives):
        more = collect_negatives(artifact, rows, shown, evaluator) if with_measures else {}
        return found.model_copy(
            update={"columns": artifact.columns, "metrics": ["rsum"], "rows": rows, **more}
        )
    if isinstance(artifact, Measured):
        measure_evaluator = MeasureEvaluator(evaluator, artifact.foils)
        rows = [
            collector.with_measures(
                row, each, artifact.measures if with_measures else (), measure_evaluator
            )
            for row, each in zip(rows, shown, strict=True)
        ]
        columns = [ShownMeasure(title=c.title, decimals=c.decimals) for c in artifact.measures]
        claims = [StatedClaim(**claim.model_dump()) for claim in artifact.claims]
        told = {"metrics": artifact.metrics, "measures": columns, "claims": claims}
        found = found.model_copy(update=told)
        if isinstance(artifact, Examples) and with_measures:
            try:
                found = found.model_copy(
                    update={"sheet": collect_sheet(plan, shown, measure_evaluator)}
                )
            except Exception as error:  # the table is wanted all the same
                errors = [*rows[-1].errors, f"examples: {describe(error)}"]
                rows[-1] = rows[-1].model_copy(update={"errors": errors})
    return found.model_copy(update={"columns": artifact.columns, "rows": rows, "plots": plots})


class _Collector:
    def __init__(
        self, plan: Plan, outcome: Outcome, evaluator: RunEvaluator, folds: int | None
    ) -> None:
        self.plan, self.outcome, self.evaluator, self.folds = plan, outcome, evaluator, folds

    def row(self, shown: TableRow, on_dev: bool = False) -> RowResult:
        """The row with the recalls of every seed that is finished."""
        each: list[SeedResult] = []
        errors: list[str] = []
        missing = 0
        for seed, members in zip(shown.seeds, shown.runs, strict=True):
            failed = [run for run in members if run.digest in self.outcome.errors]
            if failed:
                errors += [f"{run.title}: {self.outcome.errors[run.digest]}" for run in failed]
            elif any(run.state != "finished" for run in members):
                missing += 1
            else:
                try:
                    report = self._dev(members) if on_dev else self._test(members, shown)
                except Exception as error:  # one damaged folder must not hide the other rows
                    errors.append(f"{members[0].title}: {describe(error)}")
                    continue
                numbers = {key: report[key] for key in METRICS if key in report}
                each.append(SeedResult(seed=seed, recipe=shown.result.recipe, numbers=numbers))
        update = {"errors": errors, "missing": missing}
        return shown.result.with_each(each).model_copy(update=update)

    def _test(self, members: Sequence[PlannedRun], shown: TableRow) -> dict[str, float]:
        return flat_metrics(self.evaluator.report(members, self.folds, shown.standardize))

    def _dev(self, members: Sequence[PlannedRun]) -> dict[str, float]:
        return read_cost(members[0].folder, members[0].config.evaluation.split).dev

    def with_measures(
        self,
        found: RowResult,
        shown: TableRow,
        columns: Sequence[MeasureColumn],
        evaluator: MeasureEvaluator,
    ) -> RowResult:
        """The columns besides recalls, of rows that are one run each."""
        errors = list(found.errors)
        each = {one.seed: one for one in found.each}
        for index, (seed, members) in enumerate(zip(shown.seeds, shown.runs, strict=True)):
            if len(members) != 1 or members[0].state != "finished":
                continue
            values: dict[str, float] = {}
            for given in columns:
                column = given.of_row(shown.foils, shown.blind)
                writer = self.plan.runs[column.writer][index] if column.writer else None
                if writer is not None and writer.state != "finished":
                    continue
                try:
                    value = evaluator.number(column, members[0], writer)
                except Exception as error:  # the other columns and rows are wanted all the same
                    errors.append(f"{members[0].title}, {column.title}: {describe(error)}")
                    continue
                if value is not None:
                    values[column.title] = value
            before = each.get(seed) or SeedResult(seed=seed, recipe=found.recipe, numbers={})
            each[seed] = before.model_copy(update={"numbers": before.numbers | values})
        return found.with_each(list(each.values())).model_copy(update={"errors": errors})

    def with_speed(self, found: RowResult, row: Row, repeats: int) -> RowResult:
        members = [self.plan.runs[name][0] for name in row.members]
        if not members or any(run.state != "finished" for run in members):
            return found
        return found.model_copy(update={"speed": self.evaluator.speed(members, repeats)})

    def plots(self, artifact: Curves) -> list[Plot]:
        """A panel a metric, a line a row that has it."""
        records: dict[str, list[list[dict[str, Any]]]] = {}
        configs: dict[str, RunConfig] = {}
        for row in artifact.rows:
            runs = self.plan.runs[row.members[0]]
            done = [run for run in runs if run.state == "finished"]
            records[row.name] = [read_metrics(run.folder / "metrics.jsonl") for run in done]
            configs[row.name] = runs[0].config
        return [
            Plot(
                metric=panel.metric,
                title=panel.title,
                y_label=panel.y_label,
                curves=_curves(panel, records, configs),
                levels=_levels(list(configs.values())) if panel.per_pair else {},
            )
            for panel in artifact.panels
        ]


def _curves(
    panel: Panel,
    records: dict[str, list[list[dict[str, Any]]]],
    configs: dict[str, RunConfig],
) -> list[Curve]:
    lines = []
    for name, of_seeds in records.items():
        scale = per_pair(configs[name]) if panel.per_pair else 1.0
        points = curve(of_seeds, panel.metric, lambda value, scale=scale: scale * value)  # type: ignore[misc]
        lines.append(Curve(name=name, points=points))
        if panel.remainder is not None:
            rest = curve(of_seeds, panel.metric, lambda value: 1 - value)
            lines.append(Curve(name=panel.remainder, points=rest))
    return [line for line in lines if line.points]


def per_pair(config: RunConfig) -> float:
    """What a logged loss is multiplied by to be that of one pair, both directions added.

    Then a hinge on the hardest negative is 2 × margin while all scores are equal, whatever the
    reduction, the weight and the batch size.
    """
    last, size = config.train.epochs - 1, config.train.batch_size
    margin, flat = (
        _margin(config),
        create_objective(config.objective).loss_at_equal_scores(size, 1.0, last),
    )
    if margin is None or not flat:
        raise ConfigError(
            f"per_pair: the loss {', '.join(config.objective)} has no level at which all scores "
            "are equal; use it for hinge losses such as 'hardest'"
        )
    return 2 * margin / flat


def _levels(configs: Sequence[RunConfig]) -> dict[str, float]:
    """2 × margin of each margin that the runs have: where a loss stays while scores are equal."""
    known = sorted({margin for one in configs if (margin := _margin(one)) is not None})
    return {f"2 × margin ({margin:g}): all scores equal": 2 * margin for margin in known}


def _margin(config: RunConfig) -> float | None:
    """The margin of a run's hinge in its last epoch, after any epochs of warm-up."""
    return create_objective(config.objective).hinge_margin(config.train.epochs - 1)


def curve(
    of_seeds: Sequence[Sequence[dict[str, Any]]],
    metric: str,
    change: Callable[[float], float] = lambda value: value,
) -> list[tuple[float, float, float | None]]:
    """A metric against the epoch: [epoch, mean, deviation] at every step that all seeds logged."""
    by_step: list[dict[int, float]] = []
    per_epoch = 1.0
    for records in of_seeds:
        values: dict[int, float] = {}
        for record in records:
            if record["kind"] == "epoch":
                per_epoch = record["step"] / record["epoch"]
            value = _value(record, metric)
            # the epoch's mean of a metric that every step has would count twice
            if value is not None and (record["kind"] == "step" or "." in metric):
                values[record["step"]] = change(value)
        by_step.append(values)
    steps = sorted(set.intersection(*map(set, by_step))) if by_step else []
    size = -(-len(steps) // MAX_CURVE_POINTS) or 1
    points = []
    for first in range(0, len(steps), size):
        part = steps[first : first + size]
        mean = Measure.over([sum(values[s] for s in part) / len(part) for values in by_step])
        points.append((sum(part) / len(part) / per_epoch, mean.mean, mean.std))
    return points


def _value(record: dict[str, Any], metric: str) -> float | None:
    """A key of a record; after a dot, one of the section before it."""
    node: Any = record
    for key in metric.split("."):
        node = node.get(key) if isinstance(node, dict) else None
    return float(node) if isinstance(node, (int, float)) else None
