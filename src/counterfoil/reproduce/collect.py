"""Collects the numbers of a table or figure from run folders, averaged over seeds."""

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
    Plot,
    Reproduction,
    RowResult,
    SeedResult,
    ShownMeasure,
    ShownPanel,
    TableRow,
    read_cost,
    table_rows,
)
from counterfoil.reproduce.runner import DIVERGED, Outcome, describe
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
from counterfoil.reproduce.spread import Measure
from counterfoil.reproduce.word_maps import map_pairs
from counterfoil.training.logs import read_metrics

MAX_CURVE_POINTS = 200
"""Most points of a curve; longer curves are averaged over neighboring points."""


def collect(
    plan: Plan, outcome: Outcome, evaluator: RunEvaluator, *, with_measures: bool = True
) -> Reproduction:
    """The whole table or figure; unfinished rows are marked.

    ``with_measures=False`` leaves out what takes long: measured columns, maps and examples.
    """
    artifact, settings = plan.artifact, plan.settings
    chosen = artifact.data_sets.get(settings.published) if settings.published else None
    collector = _Collector(plan, outcome, evaluator, with_measures)
    on_dev = isinstance(artifact, Sweep) and artifact.judged_on == "dev"
    collector.rows = [collector.row(row, on_dev) for row in collector.table]
    fields = {"columns": getattr(artifact, "columns", []), **collector.fields()}
    return Reproduction(
        name=artifact.name,
        kind=artifact.kind,
        title=artifact.title,
        paper=artifact.paper,
        data=settings.data,
        scale=settings.scale,
        seeds=settings.seeds,
        overrides=list(settings.overrides),
        rows=collector.rows,
        published_on=settings.published if chosen else None,
        published_title=chosen.title if chosen else None,
        folds=plan.folds,
        published_elsewhere=bool(chosen and chosen.elsewhere),
        note=artifact.note,
        **fields,
    )


class _Collector:
    """Fills ``rows``, one per row of ``table``, and collects the fields that a kind adds."""

    def __init__(
        self, plan: Plan, outcome: Outcome, evaluator: RunEvaluator, with_measures: bool
    ) -> None:
        self.plan, self.outcome, self.evaluator = plan, outcome, evaluator
        self.with_measures = with_measures
        self.table = table_rows(plan)
        self.rows: list[RowResult] = []

    def fields(self) -> dict[str, Any]:
        """Fields of the `Reproduction` that depend on the kind; may add to ``rows``."""
        artifact = self.plan.artifact
        if isinstance(artifact, Sweep):
            return _sweep_fields(artifact)
        if isinstance(artifact, Scatter):
            pairs = zip(self.rows, artifact.rows, strict=True)
            self.rows = [self._with_speed(row, spec, artifact.repeats) for row, spec in pairs]
        elif isinstance(artifact, Curves):
            return {"plots": self._plots(artifact)}
        elif isinstance(artifact, Histograms):
            return {"distributions": read_distributions(self.plan, artifact)}
        elif isinstance(artifact, Maps) and self.with_measures:
            try:
                return {"pairs": map_pairs(self.plan, artifact, self.evaluator)}
            except Exception as error:  # the rows are shown without the maps
                self._add_error(0, describe(error))
        elif isinstance(artifact, Negatives):
            fields: dict[str, Any] = {"metrics": ["rsum"]}
            if self.with_measures:
                fields |= collect_negatives(artifact, self.rows, self.table, self.evaluator)
            return fields
        elif isinstance(artifact, Measured):
            return self._measured_fields(artifact)
        return {}

    def _measured_fields(self, artifact: Measured) -> dict[str, Any]:
        evaluator = MeasureEvaluator(self.evaluator, artifact.foils)
        columns = artifact.measures if self.with_measures else ()
        pairs = zip(self.rows, self.table, strict=True)
        self.rows = [self._with_measures(result, row, columns, evaluator) for result, row in pairs]
        fields: dict[str, Any] = {
            "metrics": artifact.metrics,
            "measures": [
                ShownMeasure(title=c.title, decimals=c.decimals) for c in artifact.measures
            ],
            "claims": artifact.claims,
            "trade_off": artifact.trade_off,
            "varied": artifact.vary.column if artifact.vary else "",
        }
        if isinstance(artifact, Examples) and self.with_measures:
            try:
                fields["sheet"] = collect_sheet(self.plan, self.table, evaluator)
            except Exception as error:  # the table is shown without the examples
                self._add_error(-1, f"examples: {describe(error)}")
        return fields

    def _add_error(self, index: int, error: str) -> None:
        errors = [*self.rows[index].errors, error]
        self.rows[index] = self.rows[index].model_copy(update={"errors": errors})

    def row(self, row: TableRow, on_dev: bool) -> RowResult:
        """The row with the recalls of every finished seed."""
        each: list[SeedResult] = []
        errors: list[str] = []
        missing = 0
        for seed, members in zip(row.seeds, row.runs, strict=True):
            failed = [run for run in members if run.digest in self.outcome.errors]
            if failed:
                errors += [f"{run.title}: {self.outcome.errors[run.digest]}" for run in failed]
            elif any(run.state != "finished" for run in members):
                missing += 1
            else:
                try:
                    report = self._dev(members) if on_dev else self._test(members, row)
                except Exception as error:  # one damaged folder must not hide the other rows
                    errors.append(f"{members[0].title}: {describe(error)}")
                    continue
                numbers = {key: report[key] for key in METRICS if key in report}
                each.append(SeedResult(seed=seed, recipe=row.result.recipe, numbers=numbers))
        runs = [run for members in row.runs for run in members]
        ends = [self.outcome.errors.get(run.digest, "") for run in runs]
        diverged = not each and any(end.startswith(DIVERGED) for end in ends)
        update = {"errors": errors, "missing": missing, "diverged": diverged}
        return row.result.with_each(each).model_copy(update=update)

    def _test(self, members: Sequence[PlannedRun], row: TableRow) -> dict[str, float]:
        return flat_metrics(self.evaluator.report(members, self.plan.folds, row.standardize))

    def _dev(self, members: Sequence[PlannedRun]) -> dict[str, float]:
        return read_cost(members[0].folder, members[0].config.evaluation.split).dev

    def _with_measures(
        self,
        result: RowResult,
        row: TableRow,
        columns: Sequence[MeasureColumn],
        evaluator: MeasureEvaluator,
    ) -> RowResult:
        """The row with the columns besides recalls; of ensembles, agreement with people alone."""
        errors = list(result.errors)
        each = {one.seed: one for one in result.each}
        for index, (seed, members) in enumerate(zip(row.seeds, row.runs, strict=True)):
            if not members or any(run.state != "finished" for run in members):
                continue
            values: dict[str, float] = {}
            for given in columns:
                column = given.of_row(row.foils, row.blind)
                if len(members) > 1 and column.judgements is None:
                    continue
                writer = self.plan.runs[column.writer][index] if column.writer else None
                if writer is not None and writer.state != "finished":
                    continue
                try:
                    if column.judgements is not None:
                        value = evaluator.tau(column.judgements, members, row.standardize)
                    else:
                        value = evaluator.number(column, members[0], writer)
                except Exception as error:  # a failed column must not hide the others
                    errors.append(f"{members[0].title}, {column.title}: {describe(error)}")
                    continue
                if value is not None:
                    values[column.title] = value
            before = each.get(seed) or SeedResult(seed=seed, recipe=result.recipe, numbers={})
            each[seed] = before.model_copy(update={"numbers": before.numbers | values})
        return result.with_each(list(each.values())).model_copy(update={"errors": errors})

    def _with_speed(self, result: RowResult, row: Row, repeats: int) -> RowResult:
        members = [self.plan.runs[name][0] for name in row.members]
        if not members or any(run.state != "finished" for run in members):
            return result
        return result.model_copy(update={"speed": self.evaluator.speed(members, repeats)})

    def _plots(self, artifact: Curves) -> list[Plot]:
        """One plot per panel, with one line per row that logged its metric."""
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


def _sweep_fields(artifact: Sweep) -> dict[str, Any]:
    return {
        "columns": [*(["Model"] if artifact.lines else []), artifact.x_label],
        "x_label": artifact.x_label,
        "log": artifact.log,
        "key": artifact.key,
        "judged_on": artifact.judged_on,
        "panels": [
            ShownPanel(name=p.metric, title=p.title, y_label=p.y_label, parts=list(p.parts))
            for p in artifact.panels
        ],
    }


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
    """The factor that turns a logged loss into the loss per pair, summed over both directions.

    With it, a hinge on the hardest negative is 2 × margin while all scores are equal, for any
    reduction, weight and batch size.
    """
    last, size = config.train.epochs - 1, config.train.batch_size
    margin = _find_margin(config)
    level = create_objective(config.objective).loss_at_equal_scores(size, 1.0, last)
    if margin is None or not level:
        raise ConfigError(
            f"per_pair: the loss {', '.join(config.objective)} has no level for equal scores; "
            "use per_pair for hinge losses such as 'hardest'"
        )
    return 2 * margin / level


def _levels(configs: Sequence[RunConfig]) -> dict[str, float]:
    """2 × margin for each margin of the runs: the loss per pair while all scores are equal."""
    margins = sorted({margin for one in configs if (margin := _find_margin(one)) is not None})
    return {f"2 × margin ({margin:g}): all scores equal": 2 * margin for margin in margins}


def _find_margin(config: RunConfig) -> float | None:
    """The margin of a run's hinge in its last epoch, after any warm-up."""
    return create_objective(config.objective).hinge_margin(config.train.epochs - 1)


def curve(
    of_seeds: Sequence[Sequence[dict[str, Any]]],
    metric: str,
    change: Callable[[float], float] = lambda value: value,
) -> list[tuple[float, float, float | None]]:
    """A metric over training: (epoch, mean, deviation) at every step that all seeds logged."""
    by_step: list[dict[int, float]] = []
    per_epoch = 1.0
    for records in of_seeds:
        values: dict[int, float] = {}
        for record in records:
            if record["kind"] == "epoch":
                per_epoch = record["step"] / record["epoch"]
            value = _find_value(record, metric)
            # an epoch's mean of a metric that every step logs would count twice
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


def _find_value(record: dict[str, Any], metric: str) -> float | None:
    """The number at a dotted key of a record."""
    node: Any = record
    for key in metric.split("."):
        node = node.get(key) if isinstance(node, dict) else None
    return float(node) if isinstance(node, (int, float)) else None
