"""Results of a reproduction as plain data for JSON and Markdown, and the rows to be filled."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from typing_extensions import Self

from counterfoil.core.storage.atomic import write_atomically
from counterfoil.evaluation.report import Report
from counterfoil.reproduce.artifact import METRICS, Point, Sweep
from counterfoil.reproduce.columns import run_reference
from counterfoil.reproduce.plan import Plan, PlannedRun
from counterfoil.reproduce.spec import Claim, Row
from counterfoil.reproduce.spread import Measure
from counterfoil.training.logs import read_metrics


class SeedResult(Report):
    """Numbers of one seed of a row; ``recipe`` is a digest of its settings without the seed."""

    seed: int
    recipe: str
    numbers: dict[str, float]


class Speed(Report):
    """Thousands of pairs scored per second: with encoding, and matching only."""

    kpps: float
    matching_kpps: float
    images: int
    captions: int
    device: str


class ShownMeasure(Report):
    """A column besides the recalls: its name in ``RowResult.numbers``, and its decimals."""

    title: str
    decimals: int = 1


class ShownPanel(Report):
    """A plot of a sweep: per row, the sum of the numbers in ``parts``."""

    name: str
    title: str
    y_label: str = ""
    parts: list[str]


class RowResult(Report):
    """One row: numbers of its runs, published numbers, errors.

    ``swept`` says that all its runs have values that a sweep on dev chose, for them or for runs
    that they extend. ``tuned``: for them, and inside the sweep's grid. ``diverged``: it has no
    numbers, as training ended with a loss or a gradient that is not finite.
    """

    label: list[str]
    numbers: dict[str, Measure] = Field(default_factory=dict)
    recipe: str = ""
    each: list[SeedResult] = Field(default_factory=list)
    published: dict[str, list[float | None]] = Field(default_factory=dict)
    published_measures: dict[str, list[float | None]] = Field(default_factory=dict)
    runs: list[str] = Field(default_factory=list)
    quoted: bool = False
    swept: bool = False
    tuned: bool = False
    errors: list[str] = Field(default_factory=list)
    diverged: bool = False
    missing: int = 0
    note: str | None = None
    value: float | None = None
    varied_run: str | None = None
    speed: Speed | None = None

    @property
    def name(self) -> str:
        return ", ".join(self.label)

    def total(self, parts: Sequence[str]) -> Measure | None:
        """The sum of some numbers, over seeds; None if no seed has all of them."""
        sums = [
            math.fsum(one.numbers[part] for part in parts)
            for one in self.each
            if all(part in one.numbers for part in parts)
        ]
        return Measure.over(sums) if sums else None

    def with_each(self, each: Sequence[SeedResult]) -> Self:
        """The row with these results per seed, and their means."""
        ordered = sorted(each, key=lambda one: one.seed)
        known = dict.fromkeys(key for one in ordered for key in one.numbers)
        numbers = {
            key: Measure.over([one.numbers[key] for one in ordered if key in one.numbers])
            for key in known
        }
        return self.model_copy(update={"each": ordered, "numbers": numbers})


class Curve(Report):
    """One line of a panel: [epoch, mean over seeds, standard deviation or None]."""

    name: str
    points: list[tuple[float, float, float | None]]


class Plot(Report):
    """One panel with its lines, and named horizontal reference levels."""

    metric: str
    title: str
    y_label: str
    curves: list[Curve]
    x_label: str = "epoch"
    levels: dict[str, float] = Field(default_factory=dict)


class PointMap(Report):
    """Points in a plane, by group; ``diagonal`` adds the line of equal coordinates."""

    name: str
    title: str
    groups: dict[str, list[tuple[float, float]]]
    x_label: str = ""
    y_label: str = ""
    diagonal: bool = False
    note: str = ""


class ExampleWord(Report):
    """A word of an example.

    ``new``: not in the caption. ``wrong``: the probability that it is wrong (TAGS-DC).
    """

    text: str
    new: bool = False
    wrong: float | None = None


class ExampleLine(Report):
    """A sentence about an image: its kind, its words, and its score per run."""

    kind: str
    words: list[ExampleWord]
    scores: dict[str, float]


class Example(Report):
    """An image with sentences; ``picture`` is a JPEG in base64, or empty without pixels."""

    image: str
    picture: str
    lines: list[ExampleLine]


class ExampleSheet(Report):
    """Examples of one seed, and the rule that chose them."""

    split: str
    seed: int
    rule: str
    examples: list[Example]
    maps: list[PointMap] = Field(default_factory=list)


class Distribution(Report):
    """Histograms of matched and mismatched similarities of a row in one epoch of training.

    Counts, in equal bins from ``low`` to ``high``, are those of its first seed; so are the boundary
    and ``alpha`` (None if the boundary is μ₊ − 3σ₊). ``numbers`` are over all seeds.
    """

    row: str
    when: str
    epoch: int
    low: float
    high: float
    matched: list[int]
    mismatched: list[int]
    boundary: float
    alpha: float | None
    numbers: dict[str, Measure]


class WordMap(Report):
    """Values of one model for a pair: one row per word, one column per region."""

    row: str
    quantity: Literal["s − t", "attention"]
    score: float
    values: list[list[float]]


class MappedPair(Report):
    """A caption with its own or a wrong image, and one map per model."""

    caption: str
    image: str
    own: bool
    words: list[str]
    regions: list[str]
    maps: list[WordMap]


class Reproduction(Report):
    """A whole table or figure."""

    name: str
    kind: Literal[
        "table", "scatter", "curves", "histograms", "maps", "sweep", "examples", "negatives"
    ]
    title: str
    paper: str
    data: str
    scale: str
    seeds: int
    overrides: list[str]
    columns: list[str]
    rows: list[RowResult]
    metrics: list[str] = Field(list(METRICS))
    measures: list[ShownMeasure] = Field(default_factory=list)
    published_on: str | None = None
    published_title: str | None = None
    published_elsewhere: bool = False
    claims: list[Claim] = Field(default_factory=list)
    trade_off: list[str] = Field(default_factory=list)
    varied: str = Field("", description="the column of the values with which rows are repeated")
    key: str = ""
    judged_on: str = "test"
    folds: int | None = None
    note: str | None = None
    plots: list[Plot] = Field(default_factory=list)
    distributions: list[Distribution] = Field(default_factory=list)
    pairs: list[MappedPair] = Field(default_factory=list)
    panels: list[ShownPanel] = Field(default_factory=list)
    maps: list[PointMap] = Field(default_factory=list)
    sheet: ExampleSheet | None = None
    x_label: str = ""
    log: bool = False

    @property
    def same_data(self) -> bool:
        """Whether the published numbers are for the data of the runs."""
        known = self.published_on is not None and not self.published_elsewhere
        return self.data != "scenes" and known

    @property
    def complete(self) -> bool:
        return not any(row.missing or row.errors for row in self.rows)


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
    """The rows of an artifact, or the points of a sweep, in order."""
    artifact = plan.artifact
    if isinstance(artifact, Sweep):
        return [_point_row(plan, point) for point in artifact.points]
    return [_plain_row(plan, row) for row in artifact.rows]


def _plain_row(plan: Plan, row: Row) -> TableRow:
    result = RowResult(
        label=row.label,
        published=row.published,
        published_measures=row.published_measures,
        note=row.note,
        quoted=row.published_only,
    )
    runs = [plan.runs[name] for name in row.members]
    names = [run_reference(name).name for name in row.members]
    swept = bool(names) and all(_tuned_keys(plan, plan.artifact.lineage(one)) for one in names)
    tuned = swept and all(_is_tuned(plan, one) for one in names)
    result = result.model_copy(update={"swept": swept, "tuned": tuned})
    filled = _with_runs(result, row.members, runs, row.standardize)
    if row.foils is None and not row.blind:
        return filled
    # rows of one run that differ in their foils are different results
    recipe = _digest(f"{filled.result.recipe} {row.foils} {row.blind}")
    result = filled.result.model_copy(update={"recipe": recipe})
    return replace(filled, result=result, foils=row.foils, blind=row.blind)


def _is_tuned(plan: Plan, name: str) -> bool:
    """Whether every value that sweeps gave a run was chosen for itself, and none at an edge."""
    inherited = _tuned_keys(plan, plan.artifact.lineage(name))
    return inherited == _tuned_keys(plan, [name]) and name not in plan.settings.at_edges


def _tuned_keys(plan: Plan, names: Sequence[str]) -> set[str]:
    """The keys of which sweeps chose values for some of the named runs."""
    overrides = [one for name in names for one in plan.settings.tuned.get(name, ())]
    return {override.partition("=")[0] for override in overrides}


def _point_row(plan: Plan, point: Point) -> TableRow:
    label = [*filter(None, [point.line.label]), f"{point.value:g}"]
    result = RowResult(
        label=label, value=point.value, published=point.published, varied_run=point.line.run
    )
    return _with_runs(result, (point.line.run,), [plan.runs[point.title]])


def _with_runs(
    result: RowResult,
    names: Sequence[str],
    by_member: Sequence[Sequence[PlannedRun]],
    standardize: bool = False,
) -> TableRow:
    runs = tuple(zip(*by_member, strict=True))
    seeds = tuple(_row_seed(names[0], members[0], index) for index, members in enumerate(runs))
    # relative to OUT, so that results are the same on every machine
    folders = [f"runs/{run.folder.name}" for members in runs for run in members]
    recipe = _row_recipe(names, runs[0], standardize) if runs else ""
    result = result.model_copy(update={"recipe": recipe, "runs": folders})
    return TableRow(result, seeds, runs, standardize)


def _row_seed(name: str, run: PlannedRun, index: int) -> int:
    """The row's seed for which a reference yields this run."""
    reference = run_reference(name)
    return run.config.seed - reference.seed if reference.relative else index


def _row_recipe(names: Sequence[str], members: Sequence[PlannedRun], standardize: bool) -> str:
    """A digest of the members' settings and seeds, and of how they are averaged."""
    parts = [
        f"{name.partition('@')[2]}:{run.recipe}" for name, run in zip(names, members, strict=True)
    ]
    parts += ["standardised"] if standardize else []
    return _digest(" ".join(parts))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Cost:
    """Seconds from the first batch to the last evaluation, and the best epoch on dev.

    ``device_seconds`` are these divided by the number of runs that shared the device;
    ``gpu_seconds`` are the same, if the device was a GPU. None if the run did not log it. ``dev``
    has every metric of the best epoch.
    """

    seconds: float | None
    device_seconds: float | None
    gpu_seconds: float | None
    updates: float | None
    best_epoch: float | None
    dev_rsum: float | None
    dev: dict[str, float]


def read_cost(folder: Path, split: str = "dev") -> Cost:
    """The cost of the run in a folder; ``split`` is the one that selected its best epoch."""
    epochs = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "epoch"]
    evaluated = [record for record in epochs if split in record]
    # of equal epochs, training keeps the first, and so does max
    best: dict[str, Any] = max(evaluated, key=lambda record: record[split]["rsum"], default={})
    dev = dict(best.get(split, {}))
    timed = _find_last_timing(folder / "timing.jsonl")
    seconds = None if timed is None else float(timed["seconds"])
    shared = None if seconds is None else seconds / _shared_by(folder)
    return Cost(
        seconds=seconds,
        device_seconds=shared,
        gpu_seconds=shared if timed is not None and timed.get("device") == "cuda" else None,
        updates=epochs[-1]["step"] if epochs else None,
        best_epoch=best.get("epoch"),
        dev_rsum=dev.get("rsum"),
        dev=dev,
    )


def _find_last_timing(path: Path) -> dict[str, Any] | None:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for line in reversed(lines):
        try:
            timed: dict[str, Any] = json.loads(line)
        except ValueError:  # truncated when the run was killed
            continue
        return timed
    return None


def note_sharing(folder: Path, at_once: int) -> None:
    """Store how many jobs ran in parallel with the run in this folder."""
    path = _sharing_file(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, f"{at_once}\n")


def _shared_by(folder: Path) -> int:
    path = _sharing_file(folder)
    text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    return max(1, int(text)) if text.isdigit() else 1


def _sharing_file(folder: Path) -> Path:
    """Beside the runs: only the run itself writes to its folder."""
    return folder.parent.parent / "shared" / folder.name
