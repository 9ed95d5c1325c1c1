"""Schema shared by all tables and figures (paper, data sets, runs with layers), and sweeps.

This module does not import torch, so that listing and validation are fast.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator
from typing_extensions import Self

from counterfoil.core.config import RunConfig, Section, nearest_key
from counterfoil.core.errors import nearest
from counterfoil.reproduce.columns import run_reference

Tree = dict[str, Any]

METRICS = ("i2t_r1", "i2t_r5", "i2t_r10", "t2i_r1", "t2i_r5", "t2i_r10", "rsum")

DIRECTIONS = ("i2t", "t2i")


class Layers(Section):
    """Settings of a run in layers; those that apply are merged in this order."""

    common: Tree = Field(default_factory=dict, description="for any data")
    paper: Tree = Field(default_factory=dict, description="the paper's settings, for --data PATH")
    scenes: Tree = Field(default_factory=dict, description="for --data scenes")
    by_data: dict[str, Tree] = Field(
        default_factory=dict, description="by `settings` of a data set"
    )
    smoke: Tree = Field(default_factory=dict, description="for --scale smoke")
    scenes_smoke: Tree = Field(default_factory=dict, description="for --data scenes --scale smoke")


def is_key(path: str) -> bool:
    """Whether a dotted key names a setting or a section; names of options are not checked."""
    section: Any = RunConfig
    for part in path.split("."):
        fields = getattr(section, "model_fields", None)
        if fields is None:
            return "dict[" in str(section)
        if part not in fields:
            return False
        section = fields[part].annotation
    return True


class RunSpec(Layers):
    """One training run, on top of the base; ``like`` names a run of the same file to extend."""

    like: str | None = None
    beside: Tree = Field(
        default_factory=dict, description="terms added to any objective of the run"
    )
    change: Tree = Field(
        default_factory=dict, description="values by dotted key, applied after all layers"
    )
    ignores: list[str] = Field(
        default_factory=list, description="dotted keys that overrides do not change"
    )


class DataSet(Section):
    """A data set with published numbers, and how runs are evaluated on it."""

    title: str
    detect: list[str] = Field(default_factory=list, description="parts of a folder's name")
    settings: str | None = Field(None, description="key of `by_data` in base and runs")
    folds: int | None = Field(None, ge=0, description="instead of those in the runs' config")
    elsewhere: bool = Field(False, description="the numbers are for other data than the runs")


class Artifact(Section):
    """Fields that all kinds share."""

    name: str = Field("", description="the name of its file, without the suffix")
    title: str
    summary: str
    paper: str
    note: str | None = None
    data_sets: dict[str, DataSet] = Field(default_factory=dict)
    needs_data: bool = Field(
        False, description="its numbers are of real photos; the scenes serve to try it (smoke)"
    )
    base: Layers = Layers()
    runs: dict[str, RunSpec]

    @property
    def used(self) -> list[str]:
        """References to the runs that it shows, without repetition."""
        return []

    @model_validator(mode="after")
    def _check_references(self) -> Self:
        for text in self.used:
            self.layers(run_reference(text).name)
        for name, run in self.runs.items():
            for key in run.ignores:
                if not is_key(key):
                    hint = nearest_key(key)
                    raise ValueError(f"run '{name}': ignores: unknown key '{key}'{hint}")
        return self

    def layers(self, name: str) -> list[RunSpec]:
        """The settings of the runs that a run extends, then its own."""
        return [self.runs[one] for one in self.lineage(name)]

    def lineage(self, name: str) -> list[str]:
        """The runs that a run extends, base first, and the run itself."""
        chain: list[str] = []
        current: str | None = name
        while current is not None:
            if current in chain:
                raise ValueError(f"run '{name}': 'like' forms a circle")
            if current not in self.runs:
                where = f"run '{chain[0]}': like: " if chain else ""
                raise ValueError(f"{where}unknown run '{current}'{nearest(current, self.runs)}")
            chain.insert(0, current)
            current = self.runs[current].like
        return chain


class Line(Section):
    """One line of a sweep; ``published`` has one RSUM per value of the sweep."""

    label: str
    run: str
    values: list[int | float] = Field(
        default_factory=list, description="values besides those of the sweep"
    )
    published: dict[str, list[float | None]] = Field(default_factory=dict)


class SweepPanel(Section):
    """One plot of a sweep: a recall, RSUM, or the sum of the recalls of one direction."""

    metric: str = Field(description="a recall such as i2t_r1, rsum, or i2t or t2i for their sums")
    title: str
    y_label: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        """The metrics of a row that are summed."""
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
    """A line at one value, and the title of its runs."""

    line: Line
    value: float
    title: str
    published: dict[str, list[float | None]]


class Sweep(Artifact):
    """RSUM against the value of one config key, for one run or several lines.

    ``judged_on: dev`` is for choosing a value: it shows the dev metrics of the best epoch, and the
    test split stays unseen.
    """

    kind: Literal["sweep"]
    judged_on: Literal["test", "dev"] = "test"
    run: str | None = None
    lines: list[Line] = Field(default_factory=list)
    key: str = Field(description="such as objective.selhn.epsilon")
    values: list[int | float] = Field(min_length=1)
    change: dict[str, Any] = Field(
        default_factory=dict,
        description="config values of all its runs, but not of the runs that they learn from",
    )
    beyond: int = Field(
        default=0,
        ge=0,
        description="most values to add to a line while its best one is at an edge of those tried",
    )
    x_label: str
    log: bool = True
    panels: list[SweepPanel] = Field(
        default_factory=list, description="plots; by default one of RSUM"
    )

    @property
    def used(self) -> list[str]:
        return [line.run for line in self._lines]

    @property
    def _lines(self) -> list[Line]:
        return [Line(label="", run=self.run)] if self.run else self.lines

    @property
    def points(self) -> list[Point]:
        """All values of the first line, then of the next."""
        last = self.key.rpartition(".")[2]
        return [
            Point(
                line,
                value,
                f"{line.run}, {last}={value:g}",
                {
                    data: _total(totals[self.values.index(value)])
                    for data, totals in line.published.items()
                    if value in self.values
                },
            )
            for line in self._lines
            for value in self.values_of(line)
        ]

    def values_of(self, line: Line) -> list[int | float]:
        """The values of the sweep, then in order with those that a line has besides."""
        return sorted({*self.values, *line.values}) if line.values else self.values

    @property
    def published_on(self) -> list[str]:
        return [d for d in self.data_sets if any(d in line.published for line in self.lines)]

    @model_validator(mode="after")
    def _has_lines(self) -> Self:
        if bool(self.run) == bool(self.lines):
            raise ValueError("a sweep needs either a run or lines")
        if self.beyond and not (self.lines and self.judged_on == "dev"):
            raise ValueError("beyond: only lines of a sweep with judged_on: dev get more values")
        for line in self.lines:
            for data, totals in line.published.items():
                if data not in self.data_sets or len(totals) != len(self.values):
                    raise ValueError(
                        f"line '{line.label}', {data}: expected {len(self.values)} numbers, one "
                        f"per value, for one of: {', '.join(self.data_sets)}"
                    )
        return self


def _total(rsum: float | None) -> list[float | None]:
    """A row's numbers if only RSUM was published."""
    return [*[None] * (len(METRICS) - 1), rsum]
