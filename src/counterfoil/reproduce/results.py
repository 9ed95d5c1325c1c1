"""What a reproduction found, as plain data that is written as JSON and shown as Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from typing_extensions import Self

from counterfoil.core.storage.atomic import write_atomically
from counterfoil.evaluation.report import Report
from counterfoil.reproduce.artifact import METRICS
from counterfoil.training.logs import read_metrics


class Measure(Report):
    """A number over seeds; ``std`` is that of a sample (n − 1), and absent for one seed."""

    mean: float
    std: float | None = None
    seeds: int

    @classmethod
    def over(cls, values: Sequence[float]) -> Self:
        """
        >>> Measure.over([1.0, 3.0]).std
        1.4142135623730951
        """
        mean = math.fsum(values) / len(values)
        if len(values) < 2:
            return cls(mean=mean, seeds=len(values))
        spread = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
        return cls(mean=mean, std=math.sqrt(spread), seeds=len(values))

    def text(self, decimals: int = 1) -> str:
        spread = "" if self.std is None else f" ± {self.std:.{decimals}f}"
        return f"{self.mean:.{decimals}f}{spread}"


class SeedResult(Report):
    """What one seed of a row came to; ``recipe`` says of which settings, whatever the seed."""

    seed: int
    recipe: str
    numbers: dict[str, float]


class Speed(Report):
    """Thousand pairs scored in a second: with encoding everything once, and without."""

    kpps: float
    matching_kpps: float
    images: int
    captions: int
    device: str


class ShownMeasure(Report):
    """A column besides the recalls: under which name rows have it, and how it is written."""

    title: str
    decimals: int = 1


class ShownPanel(Report):
    """A plot of a sweep: the sum of some numbers of each row."""

    name: str
    title: str
    y_label: str = ""
    parts: list[str]


class RowResult(Report):
    """One row: what its runs scored, what the paper says, what went wrong."""

    label: list[str]
    numbers: dict[str, Measure] = Field(default_factory=dict)
    recipe: str = ""
    each: list[SeedResult] = Field(default_factory=list)
    published: dict[str, list[float | None]] = Field(default_factory=dict)
    published_measures: dict[str, list[float | None]] = Field(default_factory=dict)
    runs: list[str] = Field(default_factory=list)
    quoted: bool = False
    errors: list[str] = Field(default_factory=list)
    missing: int = 0
    note: str | None = None
    value: float | None = None
    varied_run: str | None = None
    speed: Speed | None = None

    @property
    def name(self) -> str:
        return ", ".join(self.label)

    def total(self, parts: Sequence[str]) -> Measure | None:
        """The sum of some numbers over seeds; None if no seed has all of them."""
        sums = [
            math.fsum(one.numbers[part] for part in parts)
            for one in self.each
            if all(part in one.numbers for part in parts)
        ]
        return Measure.over(sums) if sums else None

    def with_each(self, each: Sequence[SeedResult]) -> Self:
        """The row with these results of seeds, and the numbers over them."""
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
    """One panel with its lines, and named levels that lines are compared with."""

    metric: str
    title: str
    y_label: str
    curves: list[Curve]
    x_label: str = "epoch"
    levels: dict[str, float] = Field(default_factory=dict)


class PointMap(Report):
    """Points in a plane, by group; ``diagonal`` draws where both coordinates are equal."""

    name: str
    title: str
    groups: dict[str, list[tuple[float, float]]]
    x_label: str = ""
    y_label: str = ""
    diagonal: bool = False
    note: str = ""


class ExampleWord(Report):
    """A word of an example: whether its caption lacks it, how likely it is wrong (TAGS-DC)."""

    text: str
    new: bool = False
    wrong: float | None = None


class ExampleLine(Report):
    """A sentence about an image: what it is, its words, and the score of each run."""

    kind: str
    words: list[ExampleWord]
    scores: dict[str, float]


class Example(Report):
    """An image by its id, its picture (base64 of a JPEG file, if there are pixels), sentences."""

    image: str
    picture: str
    lines: list[ExampleLine]


class ExampleSheet(Report):
    """Examples of one seed, and the rule by which they were chosen."""

    split: str
    seed: int
    rule: str
    examples: list[Example]
    maps: list[PointMap] = Field(default_factory=list)


class Distribution(Report):
    """Matched and mismatched similarities that a row sampled in one epoch of training.

    Counts, in equal bins from ``low`` to ``high``, are those of its first seed; so are boundary and
    ``alpha`` (None where the boundary is μ₊ − 3σ₊). ``numbers`` are over all seeds.
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
    """What one model makes of a pair: a number for each word (row) and region (column)."""

    row: str
    quantity: Literal["s − t", "attention"]
    score: float
    values: list[list[float]]


class MappedPair(Report):
    """A caption with an image, its own or a wrong one, and the maps of all models."""

    caption: str
    image: str
    own: bool
    words: list[str]
    regions: list[str]
    maps: list[WordMap]


class StatedClaim(Report):
    """That one row is ahead of another, by their names."""

    text: str
    better: str
    worse: str


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
    claims: list[StatedClaim] = Field(default_factory=list)
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
        """Whether the published numbers are of the data that the runs were made on."""
        known = self.published_on is not None and not self.published_elsewhere
        return self.data != "scenes" and known

    @property
    def complete(self) -> bool:
        return not any(row.missing or row.errors for row in self.rows)


@dataclass(frozen=True)
class Cost:
    """Seconds from the first batch to the last evaluation, and the epoch that dev chose.

    ``device_seconds`` are these divided by the number of runs that shared the device, and
    ``gpu_seconds`` the same where that was a GPU. None where the run did not log it. ``dev`` has
    every metric of the best epoch.
    """

    seconds: float | None
    device_seconds: float | None
    gpu_seconds: float | None
    updates: float | None
    best_epoch: float | None
    dev_rsum: float | None
    dev: dict[str, float]


def read_cost(folder: Path, split: str = "dev") -> Cost:
    """The cost of the run in a folder; ``split`` is the one that it was selected on."""
    epochs = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "epoch"]
    judged = [record for record in epochs if split in record]
    # the first of equals is the one that was kept
    best: dict[str, Any] = max(judged, key=lambda record: record[split]["rsum"], default={})
    dev = dict(best.get(split, {}))
    timed = _last_timed(folder / "timing.jsonl")
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


def _last_timed(path: Path) -> dict[str, Any] | None:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for line in reversed(lines):
        try:
            timed: dict[str, Any] = json.loads(line)
        except ValueError:  # cut short by a kill
            continue
        return timed
    return None


def note_sharing(folder: Path, at_once: int) -> None:
    """Remember how many were carried out at a time where the run in this folder was."""
    path = _sharing(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, f"{at_once}\n")


def _shared_by(folder: Path) -> int:
    path = _sharing(folder)
    text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    return max(1, int(text)) if text.isdigit() else 1


def _sharing(folder: Path) -> Path:
    """Beside the runs: what lies in a run's own folder is the run's alone."""
    return folder.parent.parent / "shared" / folder.name
