"""The report of a benchmark: one table per metric, Markdown, JSON and a chart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from counterfoil.core.errors import DataError
from counterfoil.evaluation.compositional.accuracy import (
    Bootstrap,
    Scored,
    chance,
    from_outcomes,
    measure,
    measured,
    metric_names,
)
from counterfoil.evaluation.compositional.readers import Benchmark, Form, Subset
from counterfoil.evaluation.report import Measured, Report, markdown_table
from counterfoil.plots.comparison import Dot, Panel, panel_chart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHANCE, MEAN = "chance", "mean"
MAX_NAMES = 5
"""Missing images that a report names."""


class Scorer(Protocol):
    """Scores the items of a subset, by the name of the row; None: an image is missing."""

    def score(self, subset: Subset) -> dict[str, list[Scored | None]]: ...


class SubsetReport(Report):
    """One file: values by scorer and metric. ``left_out`` items lack an image."""

    name: str
    form: Form
    items: int
    excluded: int
    left_out: int
    values: dict[str, dict[str, Measured]]


class BenchmarkReport(Report):
    """All files of a benchmark. ``means`` are macro means over the files, if there are several.

    A file of which no item could be scored stays, with 0 items; ``means`` are over the others.
    ``missing`` are the images that were not found or not readable, with the reasons.
    ``language_model`` and ``notes`` say how the numbers were made.
    """

    benchmark: str
    subsets: list[SubsetReport]
    means: dict[str, dict[str, Measured]]
    missing: dict[str, str] = Field(default_factory=dict)
    language_model: str | None = None
    notes: list[str] = Field(default_factory=list)
    bootstrap: int = 0
    seed: int = 0

    def headline(self) -> str:
        items = sum(subset.items for subset in self.subsets)
        parts = [f"{self.benchmark}: {items:,} items"]
        if len(self.subsets) > 1:
            parts.append(f"{len(self.subsets)} parts")
        if excluded := sum(subset.excluded for subset in self.subsets):
            parts.append(f"{excluded:,} more do not count by the benchmark's own rule")
        return ", ".join(parts)

    def tables(self) -> list[tuple[str, list[tuple[str, ...]]]]:
        """Titles and rows: files × scorers per metric, or scorers × metrics for a single file."""
        tables = []
        for form in dict.fromkeys(subset.form for subset in self.subsets):
            subsets = [subset for subset in self.subsets if subset.form == form]
            if len(subsets) == 1 or len(_metrics(subsets)) > 2:
                tables += [(one.name, _one_file(one, _metrics(subsets))) for one in subsets]
            else:
                tables += [
                    (metric, self._all_files(metric, subsets)) for metric in _metrics(subsets)
                ]
        return tables

    def _all_files(self, metric: str, subsets: Sequence[SubsetReport]) -> list[tuple[str, ...]]:
        scorers = list(dict.fromkeys(name for subset in subsets for name in subset.values))
        rows = [("part", "items", *scorers)]
        for subset in subsets:
            rows.append((subset.name, str(subset.items), *_cells(metric, scorers, subset.values)))
        items = sum(subset.items for subset in subsets)
        rows.append((MEAN, str(items), *_cells(metric, scorers, self.means)))
        return rows

    def footnotes(self) -> list[str]:
        """What a reader must know to compare the numbers."""
        notes = ["percent; a tie counts against the scorer"]
        if self.bootstrap:
            notes.append(f"95 % intervals: {self.bootstrap} bootstrap resamples of the images")
        if any(subset.form == "square" for subset in self.subsets):
            notes.append("two images × two captions: a score without images has 0 by construction")
        if self.missing:
            left_out = sum(subset.left_out for subset in self.subsets)
            notes.append(
                f"{len(self.missing):,} images are missing or unreadable "
                f"({_first(self.missing)}): {left_out:,} items are left out of every row"
            )
        if empty := [subset.name for subset in self.subsets if not subset.items]:
            count = len(self.subsets)
            notes.append(
                f"no item of {', '.join(empty)} could be scored: means are over "
                f"{count - len(empty)} of {count} parts"
            )
        if self.language_model:
            notes.append(self.language_model)
        return notes + self.notes

    def to_markdown(self) -> str:
        lines = [self.headline()]
        for title, rows in self.tables():
            lines += ["", f"**{title}**", "", *markdown_table(rows)]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.footnotes())]) + "\n"

    def chart(self) -> Figure:
        """One panel per file and metric, one dot per scorer with its interval."""
        scorers = list(dict.fromkeys(name for one in self.subsets for name in one.values))
        panels = []
        for subset in self.subsets:
            if not subset.items:
                panels.append(Panel(f"{subset.name}: 0 items", [None] * len(scorers)))
                continue
            for metric in _metrics([subset]):
                title = f"{subset.name}: {metric}" if len(_metrics([subset])) > 1 else subset.name
                values = [subset.values.get(name, {}).get(metric) for name in scorers]
                panels.append(Panel(title, [_dot(value) for value in values]))
        return panel_chart(scorers, panels, f"{self.headline()} (%)")


def _metrics(subsets: Iterable[SubsetReport]) -> list[str]:
    """The metrics that at least one scorer has a value for; all, if the files have no items."""
    every = [
        (metric, name != CHANCE and not math.isnan(value.value))
        for subset in subsets
        for name, values in subset.values.items()
        for metric, value in values.items()
    ]
    known = [metric for metric, has_value in every if has_value]
    return list(dict.fromkeys(known or [metric for metric, _ in every]))


def _first(missing: dict[str, str]) -> str:
    """The first names of images, each with the reason."""
    named = [f"{name}: {' '.join(why.split())}" for name, why in missing.items()]
    return "; ".join(named[:MAX_NAMES]) + ("; …" if len(named) > MAX_NAMES else "")


def _one_file(subset: SubsetReport, others: Sequence[str]) -> list[tuple[str, ...]]:
    """The rows of one file; ``others`` are the columns if it has no items."""
    metrics = _metrics([subset]) if subset.items else others
    rows: list[tuple[str, ...]] = [(f"{subset.items} items", *metrics)]
    for name, values in subset.values.items():
        rows.append((name, *(_text(values.get(metric)) for metric in metrics)))
    return rows


def _cells(
    metric: str, scorers: Sequence[str], values: dict[str, dict[str, Measured]]
) -> list[str]:
    return [_text(values.get(name, {}).get(metric)) for name in scorers]


def _text(value: Measured | None) -> str:
    """With two decimals, as published tables have them."""
    if value is None or math.isnan(value.value):
        return "–"
    bounds = f" [{value.interval[0]:.1f}, {value.interval[1]:.1f}]" if value.interval else ""
    return f"{value.value:.2f}{bounds}"


def _dot(value: Measured | None) -> Dot | None:
    if value is None or math.isnan(value.value):
        return None
    low, high = value.interval or (value.value, value.value)
    return Dot(value.value, (high - low) / 2)


def evaluate_benchmark(
    benchmark: Benchmark,
    scorers: Sequence[Scorer],
    *,
    missing: Sequence[dict[str, str]] = (),
    language_model: str | None = None,
    notes: Sequence[str] = (),
    bootstrap: int = 1000,
    seed: int = 0,
) -> BenchmarkReport:
    """Score every subset with every scorer, over the items whose images all could be read.

    ``missing`` are the images that the scorers did not find; they are filled while scoring.
    """
    reports, draws = [], list[dict[str, dict[str, Draws]]]()
    for subset in benchmark.subsets:
        report, values = _evaluate_subset(benchmark.name, subset, scorers, bootstrap, seed)
        reports.append(report)
        draws.append(values)
    reasons = {name: why for one in reversed(missing) for name, why in one.items()}
    if not any(report.items for report in reports):
        raise DataError(
            f"{benchmark.name}: none of its {len(reasons):,} images could be read "
            f"({_first(reasons)}); name the folder or the shards that have them with --images, or "
            "leave out --model for the scores without images"
        )
    return BenchmarkReport(
        benchmark=benchmark.name,
        subsets=reports,
        means=_means(draws) if len(draws) > 1 else {},
        missing=reasons,
        language_model=language_model,
        notes=list(notes),
        bootstrap=bootstrap,
        seed=seed,
    )


Draws = NDArray[np.float64]
"""The value of a metric on all items, then on each resample."""


def _evaluate_subset(
    benchmark: str, subset: Subset, scorers: Sequence[Scorer], bootstrap: int, seed: int
) -> tuple[SubsetReport, dict[str, dict[str, Draws]]]:
    names = metric_names(benchmark, subset)
    scored = {name: one for scorer in scorers for name, one in scorer.score(subset).items()}
    rows = [
        n for n in range(len(subset.items)) if all(one[n] is not None for one in scored.values())
    ]
    items = [subset.items[row] for row in rows]
    draws: dict[str, dict[str, Draws]] = {}
    if items:
        resamples = Bootstrap(items, bootstrap, seed)
        if subset.results is not None:
            stored = from_outcomes([subset.results[row] for row in rows])
            draws["stored results"] = {name: resamples.values(stored[name]) for name in names}
        for name, each in scored.items():
            metrics = measure(names, items, [one for row in rows if (one := each[row]) is not None])
            draws[name] = {metric: resamples.values(metrics[metric]) for metric in names}
        constant = chance(names, items)
        draws[CHANCE] = {name: np.array([constant[name]]) for name in names}
    values = {
        name: {metric: measured(one) for metric, one in metrics.items()}
        for name, metrics in draws.items()
    }
    nothing = Measured(value=math.nan)
    report = SubsetReport(
        name=subset.name,
        form=subset.form,
        items=len(items),
        excluded=subset.excluded,
        left_out=len(subset.items) - len(items),
        values=values or {name: dict.fromkeys(names, nothing) for name in (*scored, CHANCE)},
    )
    return report, draws


def _means(draws: Sequence[dict[str, dict[str, Draws]]]) -> dict[str, dict[str, Measured]]:
    """Macro means over the files that a scorer has values for; files are resampled apart."""
    means: dict[str, dict[str, Measured]] = {}
    for name in dict.fromkeys(name for one in draws for name in one):
        own = [one[name] for one in draws if name in one]
        for metric in dict.fromkeys(metric for one in own for metric in one):
            values = [one[metric] for one in own if metric in one]
            means.setdefault(name, {})[metric] = measured(np.mean(values, axis=0))
    return means
