"""Schema of the YAML files that describe tables and figures: rows, runs, published numbers.

This module does not import torch, so that listing and validation are fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError, model_validator
from typing_extensions import Self

from counterfoil.core.config import Section
from counterfoil.core.errors import ConfigError, nearest
from counterfoil.reproduce.artifact import METRICS, Artifact, Sweep
from counterfoil.reproduce.columns import FoilOptions, MeasureColumn

KINDS = ("table", "scatter", "curves", "histograms", "maps", "sweep", "examples", "negatives")
NEGATIVE_NUMBERS = {
    "margins": ("i2t_margin", "t2i_margin", "i2t_won", "t2i_won"),
    "similarity": ("image_below_half", "text_below_half", "image_similarity", "text_similarity"),
    "map": ("similarity_to_hardest", "hardest_score", "positive_score"),
}
"""Numbers available to columns of `Negatives`, by `Negatives.show`."""
ROUNDING_TOLERANCE = 0.15
"""Largest plausible difference between six recalls rounded to a tenth and their rounded sum."""


class Row(Section):
    """A row of a table: a run, an ensemble of runs, or only numbers quoted from the paper."""

    label: list[str] = Field(min_length=1)
    run: str | None = None
    ensemble: list[str] = Field(default_factory=list)
    standardize: bool = Field(
        False, description="divide each member's scores by their deviation before averaging"
    )
    published_only: bool = False
    published: dict[str, list[float | None]] = Field(default_factory=dict)
    published_measures: dict[str, list[float | None]] = Field(
        default_factory=dict, description="one number per measure of the table"
    )
    note: str | None = Field(None, description="e.g. why the paper's numbers do not add up")
    foils: str | None = Field(
        None, description="source of the foils in columns with `own`: rules, a run, or retrieved"
    )
    blind: bool = Field(False, description="`own` foils are written without the image")

    @property
    def members(self) -> tuple[str, ...]:
        """The runs whose scores are averaged; none for a quoted row."""
        return (self.run,) if self.run else tuple(self.ensemble)

    @property
    def name(self) -> str:
        return ", ".join(self.label)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.run) + bool(self.ensemble) + self.published_only != 1:
            raise ValueError(
                f"row '{self.name}': needs exactly one of run, ensemble and published_only"
            )
        if self.standardize and not self.ensemble:
            raise ValueError(f"row '{self.name}': standardize is only for ensembles")
        if (self.foils is not None or self.blind) and not self.run:
            raise ValueError(f"row '{self.name}': foils and blind are only for rows of one run")
        if self.published_only and not (self.published or self.published_measures):
            raise ValueError(f"row '{self.name}': published_only, but there are no numbers")
        for data, numbers in self.published.items():
            self._check_numbers(data, numbers)
        return self

    def _check_numbers(self, data: str, numbers: list[float | None]) -> None:
        if len(numbers) != len(METRICS):
            raise ValueError(
                f"row '{self.name}', {data}: expected {len(METRICS)} numbers "
                f"({', '.join(METRICS)}; null if not published), got {len(numbers)}"
            )
        known = [number for number in numbers if number is not None]
        if len(known) == len(METRICS) and self.note is None:
            total = math.fsum(known[:-1])
            if abs(total - known[-1]) > ROUNDING_TOLERANCE:
                raise ValueError(
                    f"row '{self.name}', {data}: the recalls add up to {total:.1f}, but RSUM is "
                    f"{known[-1]:.1f}; correct it, or explain in 'note' that the paper prints this"
                )


class Claim(Section):
    """A claim that one row of a table has a higher RSUM than another; rows by their names."""

    text: str
    better: str
    worse: str


class Panel(Section):
    """One plot of a figure: a metric of metrics.jsonl against the epoch."""

    metric: str = Field(description="a key of the records, such as loss or dev.rsum")
    title: str
    y_label: str = ""
    remainder: str | None = Field(None, description="also draw 1 − the metric, with this name")
    per_pair: bool = Field(
        False, description="loss per pair, summed over both directions; also draws 2 × margin"
    )

    @model_validator(mode="after")
    def _only_losses_are_per_pair(self) -> Self:
        if self.per_pair and (self.metric != "loss" or self.remainder is not None):
            raise ValueError(
                f"panel '{self.title}': per_pair is for the metric 'loss', without remainder"
            )
        return self


class ShownNumber(Section):
    """A column of `Negatives`."""

    title: str
    number: str
    decimals: int = Field(1, ge=0)


class Vary(Section):
    """The table's rows are trained once with every value of a key, which becomes a label."""

    column: str = Field(description="heading of the values")
    key: str = Field(description="dotted key of the config, such as train.optimizer.lr")
    values: list[int | float] = Field(min_length=2)
    fixed: list[str] = Field(default_factory=list, description="runs that are trained once")

    @model_validator(mode="after")
    def _check(self) -> Self:
        written = [f"{value:g}" for value in self.values]
        if len(set(written)) < len(written):
            raise ValueError(f"vary: two values are written {max(written, key=written.count)}")
        return self

    def expand(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """The tree with a row and a run per value; quoted rows are not repeated."""
        rows, runs = [], dict(tree["runs"])
        for run in self.fixed:
            if run not in runs:
                raise ValueError(f"vary: fixed: unknown run '{run}'{nearest(run, runs)}")
        for row in tree["rows"]:
            run = row.get("run")
            if row.get("ensemble"):
                raise ValueError("vary: rows of ensembles are not repeated; leave them out")
            if run is None or run in self.fixed:
                rows.append({**row, "label": [*row["label"], "–"]})
                continue
            for value in self.values:
                name = f"{run}={value:g}"
                runs[name] = {"like": run, "change": {self.key: value}}
                rows.append({**row, "label": [*row["label"], f"{value:g}"], "run": name})
        return {**tree, "columns": [*tree["columns"], self.column], "rows": rows, "runs": runs}


class _WithRows(Artifact):
    one_run_per_row: ClassVar[bool] = False

    columns: list[str] = Field(["Model"], min_length=1, description="headings of the labels")
    rows: list[Row] = Field(min_length=1)

    @property
    def used(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row.members))

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        for row in self.rows:
            if self.one_run_per_row and row.run is None:
                kind = type(self).__name__.lower()
                raise ValueError(f"row '{row.name}': rows of the kind '{kind}' need one run each")
            if len(row.label) != len(self.columns):
                raise ValueError(
                    f"row '{row.name}': {len(row.label)} labels for {len(self.columns)} columns"
                )
            for data in (*row.published, *row.published_measures):
                if data not in self.data_sets:
                    raise ValueError(
                        f"row '{row.name}': unknown data set '{data}'"
                        f"{nearest(data, self.data_sets)} (known: {', '.join(self.data_sets)})"
                    )
        names = [row.name for row in self.rows]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two rows are called '{name}'")
        return self

    def _check_measures(self, count: int) -> None:
        for row in self.rows:
            for data, numbers in row.published_measures.items():
                if len(numbers) != count:
                    raise ValueError(
                        f"row '{row.name}', {data}: {len(numbers)} published measures for "
                        f"{count} columns"
                    )

    @property
    def published_on(self) -> list[str]:
        """Data sets for which any row has published numbers, in the file's order."""
        used = {data for row in self.rows for data in (*row.published, *row.published_measures)}
        return [data for data in self.data_sets if data in used]


class Measured(_WithRows):
    """Recalls in both directions and RSUM per row, beside the published numbers.

    ``metrics`` selects among these. ``measures`` are further columns; ``foils`` has the options of
    those measured on foils. ``claims`` are differences between rows that the paper reports.
    ``trade_off`` are titles of measures, whose mean is drawn against RSUM. With ``vary``, rows are
    repeated with several values of a key.
    """

    metrics: list[str] = Field(list(METRICS))
    measures: list[MeasureColumn] = Field(default_factory=list)
    foils: FoilOptions = FoilOptions()
    claims: list[Claim] = Field(default_factory=list)
    trade_off: list[str] = Field(default_factory=list)
    vary: Vary | None = None

    @property
    def used(self) -> list[str]:
        writers = [
            column.of_row(row.foils, row.blind).writer
            for row in self.rows
            for column in self.measures
        ]
        return list(dict.fromkeys([*super().used, *filter(None, writers)]))

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, tree: Any) -> Any:
        if not isinstance(tree, dict) or tree.get("vary") is None:
            return tree
        vary = Vary.model_validate(tree["vary"])
        try:
            return vary.expand(tree)
        except (KeyError, TypeError, AttributeError):
            raise ValueError("vary: needs columns, runs, and rows with labels") from None

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        for metric in self.metrics:
            if metric not in METRICS:
                raise ValueError(
                    f"metrics: unknown '{metric}'{nearest(metric, METRICS)} "
                    f"(known: {', '.join(METRICS)})"
                )
        titles = [column.title for column in self.measures]
        if len(set(titles)) < len(titles):
            raise ValueError("measures: two columns have the same title")
        for title in self.trade_off:
            if title not in titles:
                raise ValueError(f"trade_off: no measure '{title}'{nearest(title, titles)}")
        known = [row.name for row in self.rows]
        for claim in self.claims:
            for name in (claim.better, claim.worse):
                if name not in known:
                    raise ValueError(f"claim '{claim.text}': no row '{name}'{nearest(name, known)}")
        if not self.metrics and not self.measures:
            raise ValueError("a table needs at least one of metrics and measures")
        self._check_measures(len(titles))
        return self


class Table(Measured):
    """A table of a paper."""

    kind: Literal["table"]


class Examples(Measured):
    """Sentences about images of the test split, with the scores of the rows' runs.

    ``negatives`` shows each caption with a foil per row, and a scatter plot of their scores over
    the whole split. ``corrections`` shows a foil of the last row and its correction by that run.
    """

    one_run_per_row = True

    kind: Literal["examples"]
    show: Literal["negatives", "corrections"]
    examples: int = Field(6, ge=1, description="captions, drawn at random from different images")


class Negatives(_WithRows):
    """How trained models score the negatives of the test split.

    ``margins``: the positive's score minus that of the hardest negative. ``similarity``: cosines
    between the hardest negative and the ``nearest`` others of the same query. ``map``: t-SNE of
    one image, its captions and its ``nearest`` negative captions.
    """

    one_run_per_row = True

    kind: Literal["negatives"]
    show: Literal["margins", "similarity", "map"]
    nearest: int = Field(30, ge=2, description="number of highest-scoring negatives per query")
    panels: dict[Literal["i2t", "t2i"], str] = Field(
        default_factory=dict, description="titles of the plots, by direction"
    )
    measures: list[ShownNumber] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        self._check_measures(len(self.measures))
        known = NEGATIVE_NUMBERS[self.show]
        for column in self.measures:
            if column.number not in known:
                raise ValueError(
                    f"column '{column.title}': unknown number '{column.number}'"
                    f"{nearest(column.number, known)} (known: {', '.join(known)})"
                )
        return self


class Scatter(_WithRows):
    """Speed (pairs scored per second) against RSUM, all measured in one call on one machine."""

    kind: Literal["scatter"]
    repeats: int = Field(3, ge=1, description="timings, of which the median is taken")


class Curves(_WithRows):
    """Training curves, one line per row."""

    one_run_per_row = True

    kind: Literal["curves"]
    panels: list[Panel] = Field(min_length=1)


class Histograms(_WithRows):
    """Distributions of the similarities sampled by NAAF's runs (its figure 3)."""

    one_run_per_row = True

    kind: Literal["histograms"]
    epochs: list[Literal["first", "unadjusted", "last"]] = Field(
        ["first", "unadjusted", "last"],
        min_length=1,
        description="among the epochs with samples; 'unadjusted' is the last one before α*",
    )


class Maps(_WithRows):
    """Words × regions of selected test pairs, for several models (NAAF, figure 4)."""

    one_run_per_row = True

    kind: Literal["maps"]
    captions: int = Field(3, ge=1, description="each with its own image and with a wrong one")
    confused: str = Field(description="the run that chooses the wrong image of each caption")

    @property
    def used(self) -> list[str]:
        return list(dict.fromkeys([*super().used, self.confused]))


AnyArtifact = Table | Scatter | Curves | Histograms | Maps | Sweep | Examples | Negatives
_ADAPTER: TypeAdapter[AnyArtifact] = TypeAdapter(
    Annotated[AnyArtifact, Field(discriminator="kind")]
)


def build_artifact(tree: Mapping[str, Any], where: str) -> AnyArtifact:
    """Validate a tree of plain values; an error names the file, the key and the mistake."""
    try:
        return _ADAPTER.validate_python(dict(tree))
    except ValidationError as error:
        raise ConfigError(f"{where}: " + "\n  ".join(map(_explain, error.errors()))) from None


def _explain(error: Any) -> str:
    # pydantic puts the kind before the path of the key
    parts = error["loc"][1:] if error["loc"][:1] in [(kind,) for kind in KINDS] else error["loc"]
    key = ".".join(map(str, parts)) or "(top)"
    if error["type"] == "extra_forbidden":
        return f"unknown key '{key}'"
    if error["type"] == "missing":
        return f"{key}: missing"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"].startswith("union_tag"):
        return f"kind: expected {', '.join(KINDS[:-1])} or {KINDS[-1]}"
    return f"{key}: {error['msg']}, got {error['input']!r}"
