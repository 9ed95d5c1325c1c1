"""What every table and figure has (a paper, data sets, runs with settings in layers), and sweeps.

Importing this module does not import torch, so that listing and checking are quick.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator
from typing_extensions import Self

from counterfoil.core.config import Section
from counterfoil.core.errors import nearest
from counterfoil.reproduce.columns import run_reference

Tree = dict[str, Any]

METRICS = ("i2t_r1", "i2t_r5", "i2t_r10", "t2i_r1", "t2i_r5", "t2i_r10", "rsum")

DIRECTIONS = ("i2t", "t2i")


class Layers(Section):
    """Settings of a run, in the layers of which those that apply are merged from first to last."""

    common: Tree = Field(default_factory=dict, description="whatever the data")
    paper: Tree = Field(default_factory=dict, description="with --data PATH: the paper's own")
    scenes: Tree = Field(default_factory=dict, description="with --data scenes")
    by_data: dict[str, Tree] = Field(
        default_factory=dict, description="by `settings` of a data set"
    )
    smoke: Tree = Field(default_factory=dict, description="with --scale smoke")
    scenes_smoke: Tree = Field(default_factory=dict, description="with both")


class RunSpec(Layers):
    """One training, over the base; ``like`` starts from another one of the same file."""

    like: str | None = None
    beside: Tree = Field(
        default_factory=dict, description="terms added to its objective, whatever that is"
    )
    change: Tree = Field(
        default_factory=dict, description="single keys by their full names, in every layer"
    )
    ignores: list[str] = Field(
        default_factory=list, description="keys, by their full names, that no override reaches"
    )


class DataSet(Section):
    """A data set that numbers were published for, and how runs are judged on it."""

    title: str
    detect: list[str] = Field(default_factory=list, description="parts of a folder's name")
    settings: str | None = Field(None, description="key of `by_data` in base and runs")
    folds: int | None = Field(None, ge=0, description="where not as the runs' config says")
    elsewhere: bool = Field(False, description="the numbers are of other data than the runs")


class Artifact(Section):
    """What all kinds share."""

    name: str = Field("", description="by which it is asked for; that of its file")
    title: str
    summary: str
    paper: str
    note: str | None = None
    data_sets: dict[str, DataSet] = Field(default_factory=dict)
    base: Layers = Layers()
    runs: dict[str, RunSpec]

    @property
    def used(self) -> list[str]:
        """The runs that it shows, each once; ``name@+1`` is one of another seed."""
        return []

    @model_validator(mode="after")
    def _refers_to_what_is_there(self) -> Self:
        for text in self.used:
            self.layers(run_reference(text).name)
        return self

    def layers(self, name: str) -> list[RunSpec]:
        """The settings of a run: those of the runs it is like, then its own."""
        return [self.runs[one] for one in self.lineage(name)]

    def lineage(self, name: str) -> list[str]:
        """The runs that a run is like, the first of them first, and itself."""
        seen: list[str] = []
        here: str | None = name
        while here is not None:
            if here in seen:
                raise ValueError(f"run '{name}': 'like' goes round in a circle")
            if here not in self.runs:
                raise ValueError(f"unknown run '{here}'{nearest(here, self.runs)}")
            seen.insert(0, here)
            here = self.runs[here].like
        return seen


class Line(Section):
    """One of the lines of a sweep; ``published`` is RSUM at each of its values."""

    label: str
    run: str
    published: dict[str, list[float | None]] = Field(default_factory=dict)


class SweepPanel(Section):
    """One plot of a sweep: a recall, RSUM, or the sum of the recalls of one direction."""

    metric: str = Field(description="a recall such as i2t_r1; rsum; i2t or t2i: sum of its three")
    title: str
    y_label: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        """The metrics of a row that are added up."""
        if self.metric in DIRECTIONS:
            return tuple(name for name in METRICS if name.startswith(f"{self.metric}_"))
        return (self.metric,)

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        known = (*METRICS, *DIRECTIONS)
        if self.metric not in known:
            raise ValueError(
                f"panel '{self.title}': unknown metric '{self.metric}'"
                f"{nearest(self.metric, known)} (known: {', '.join(known)})"
            )
        return self


class Point(NamedTuple):
    """A line at one value, and what its runs are called."""

    line: Line
    value: float
    title: str
    published: dict[str, list[float | None]]


class Sweep(Artifact):
    """A run, or several as lines, with one key varied: RSUM against the value.

    ``judged_on: dev`` is for choosing a value: what is shown is of the epoch that dev chose, and
    the test split stays unseen.
    """

    kind: Literal["sweep"]
    judged_on: Literal["test", "dev"] = "test"
    run: str | None = None
    lines: list[Line] = Field(default_factory=list)
    key: str = Field(description="such as objective.selhn.epsilon")
    values: list[int | float] = Field(min_length=1)
    x_label: str
    log: bool = True
    panels: list[SweepPanel] = Field(
        default_factory=list, description="plots; by default one, of RSUM"
    )

    @property
    def used(self) -> list[str]:
        return [line.run for line in self._lines]

    @property
    def _lines(self) -> list[Line]:
        return [Line(label="", run=self.run)] if self.run else self.lines

    @property
    def points(self) -> list[Point]:
        """Line by line, value by value."""
        last = self.key.rpartition(".")[2]
        return [
            Point(
                line,
                value,
                f"{line.run}, {last}={value:g}",
                {data: _total(totals[k]) for data, totals in line.published.items()},
            )
            for line in self._lines
            for k, value in enumerate(self.values)
        ]

    @property
    def published_on(self) -> list[str]:
        return [d for d in self.data_sets if any(d in line.published for line in self.lines)]

    @model_validator(mode="after")
    def _has_lines(self) -> Self:
        if bool(self.run) == bool(self.lines):
            raise ValueError("a sweep has either a run or lines")
        for line in self.lines:
            for data, totals in line.published.items():
                if data not in self.data_sets or len(totals) != len(self.values):
                    raise ValueError(
                        f"line '{line.label}', {data}: expected {len(self.values)} numbers, one "
                        f"for each value, of one of: {', '.join(self.data_sets)}"
                    )
        return self


def _total(rsum: float | None) -> list[float | None]:
    """An RSUM of which the recalls are not known, as a row's numbers."""
    return [None, None, None, None, None, None, rsum]
