"""What a table or figure of a paper is, as a YAML file: runs, rows, published numbers.

Importing this module does not import torch, so that listing and checking are quick.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

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
"""What columns of `Negatives` may show, by what the figure shows."""
ROUNDING_TOLERANCE = 0.15
"""Six recalls rounded to a tenth may differ so much from their rounded sum, and hardly more."""


class Row(Section):
    """A line of a table: a run, an ensemble of runs, or numbers quoted from the paper alone."""

    label: list[str] = Field(min_length=1)
    run: str | None = None
    ensemble: list[str] = Field(default_factory=list)
    standardize: bool = Field(
        False, description="divide each member's scores by their deviation before they are averaged"
    )
    published_only: bool = False
    published: dict[str, list[float | None]] = Field(default_factory=dict)
    published_measures: dict[str, list[float | None]] = Field(
        default_factory=dict, description="one number for each measure of the table"
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
    def _is_one_thing(self) -> Self:
        said = [bool(self.run), bool(self.ensemble), self.published_only]
        if sum(said) != 1:
            raise ValueError(
                f"row '{self.name}': needs exactly one of run, ensemble and published_only"
            )
        if self.standardize and not self.ensemble:
            raise ValueError(f"row '{self.name}': standardize is for ensembles")
        if (self.foils is not None or self.blind) and not self.run:
            raise ValueError(f"row '{self.name}': foils and blind are for rows of one run")
        if self.published_only and not (self.published or self.published_measures):
            raise ValueError(f"row '{self.name}': published_only, but nothing is published")
        for data, numbers in self.published.items():
            self._check_numbers(data, numbers)
        return self

    def _check_numbers(self, data: str, numbers: list[float | None]) -> None:
        if len(numbers) != len(METRICS):
            raise ValueError(
                f"row '{self.name}', {data}: expected {len(METRICS)} numbers "
                f"({', '.join(METRICS)}; null where none was published), got {len(numbers)}"
            )
        known = [number for number in numbers if number is not None]
        if len(known) == len(METRICS) and self.note is None:
            total = math.fsum(known[:-1])
            if abs(total - known[-1]) > ROUNDING_TOLERANCE:
                raise ValueError(
                    f"row '{self.name}', {data}: the recalls add up to {total:.1f}, RSUM says "
                    f"{known[-1]:.1f}; correct it, or say in 'note' that the paper has it so"
                )


class Claim(Section):
    """That one row of a table is ahead of another in RSUM, rows by their names."""

    text: str
    better: str
    worse: str


class Panel(Section):
    """One plot of a figure: a metric of metrics.jsonl against the epoch."""

    metric: str = Field(description="a key of its records; 'dev.rsum' is one of the evaluation")
    title: str
    y_label: str = ""
    remainder: str | None = Field(None, description="also draw 1 − the metric, under this name")
    per_pair: bool = Field(
        False, description="loss of one pair, both directions added; 2 × margin is drawn"
    )

    @model_validator(mode="after")
    def _only_losses_are_per_pair(self) -> Self:
        if self.per_pair and (self.metric != "loss" or self.remainder is not None):
            raise ValueError(f"panel '{self.title}': per_pair is for the metric 'loss', alone")
        return self


class ShownNumber(Section):
    """A column of `Negatives`."""

    title: str
    number: str
    decimals: int = Field(1, ge=0)


class _WithRows(Artifact):
    columns: list[str] = Field(["Model"], min_length=1, description="what the labels are")
    rows: list[Row] = Field(min_length=1)

    @property
    def used(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row.members))

    @model_validator(mode="after")
    def _labels_fit(self) -> Self:
        for row in self.rows:
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

    @property
    def published_on(self) -> list[str]:
        """Data sets that any row has published numbers for, in the file's order."""
        named = {data for row in self.rows for data in (*row.published, *row.published_measures)}
        return [data for data in self.data_sets if data in named]


class Measured(_WithRows):
    """Recalls both ways and RSUM of every row, beside what the paper says.

    ``metrics`` says which of these are shown; ``measures`` are columns besides them, measured on
    foils as ``foils`` says. ``claims`` are differences that the paper reports, set beside ours.
    """

    metrics: list[str] = Field(list(METRICS))
    measures: list[MeasureColumn] = Field(default_factory=list)
    foils: FoilOptions = FoilOptions()
    claims: list[Claim] = Field(default_factory=list)

    @property
    def used(self) -> list[str]:
        of_rows = [
            column.of_row(row.foils, row.blind).writer
            for row in self.rows
            for column in self.measures
        ]
        return list(dict.fromkeys([*super().used, *filter(None, of_rows)]))

    @model_validator(mode="after")
    def _columns_fit(self) -> Self:
        for metric in self.metrics:
            if metric not in METRICS:
                raise ValueError(
                    f"metrics: unknown '{metric}'{nearest(metric, METRICS)} "
                    f"(known: {', '.join(METRICS)})"
                )
        titles = [column.title for column in self.measures]
        if len(set(titles)) < len(titles):
            raise ValueError("measures: two columns have one title")
        known = [row.name for row in self.rows]
        for claim in self.claims:
            for name in (claim.better, claim.worse):
                if name not in known:
                    raise ValueError(f"claim '{claim.text}': no row '{name}'{nearest(name, known)}")
        if not self.metrics and not self.measures:
            raise ValueError("a table shows at least one of its metrics or measures")
        for row in self.rows:
            for data, numbers in row.published_measures.items():
                if len(numbers) != len(titles):
                    raise ValueError(
                        f"row '{row.name}', {data}: {len(numbers)} published measures for "
                        f"{len(titles)} columns"
                    )
        return self


class Table(Measured):
    """A table of a paper."""

    kind: Literal["table"]


class Examples(Measured):
    """Sentences about some images of the test split, with the scores of the rows' runs.

    ``negatives`` shows the foil of each row beside its caption, and the scores of both over the
    whole split. ``corrections`` shows a foil of the last row, and what its run makes of it.
    """

    kind: Literal["examples"]
    show: Literal["negatives", "corrections"]
    examples: int = Field(6, ge=1, description="captions, drawn at random from different images")

    @model_validator(mode="after")
    def _rows_have_runs(self) -> Self:
        for row in self.rows:
            if row.run is None:
                raise ValueError(f"row '{row.name}': examples are of one run each")
        return self


class Negatives(_WithRows):
    """What trained models make of the negatives of the test split.

    ``margins``: the positive's score minus that of the hardest negative. ``similarity``: cosines
    between the hardest negative and the ``nearest`` others of the same query. ``map``: t-SNE of
    one image, its captions and its ``nearest`` negative captions.
    """

    kind: Literal["negatives"]
    show: Literal["margins", "similarity", "map"]
    nearest: int = Field(30, ge=2, description="negatives of a query that score highest")
    panels: dict[Literal["i2t", "t2i"], str] = Field(
        default_factory=dict, description="titles of the plots, by direction"
    )
    measures: list[ShownNumber] = Field(default_factory=list)

    @model_validator(mode="after")
    def _rows_fit(self) -> Self:
        for row in self.rows:
            if row.run is None:
                raise ValueError(f"row '{row.name}': negatives are those of one run each")
            for data, numbers in row.published_measures.items():
                if len(numbers) != len(self.measures):
                    raise ValueError(
                        f"row '{row.name}', {data}: {len(numbers)} published measures for "
                        f"{len(self.measures)} columns"
                    )
        for column in self.measures:
            known = NEGATIVE_NUMBERS[self.show]
            if column.number not in known:
                raise ValueError(
                    f"column '{column.title}': unknown number '{column.number}'"
                    f"{nearest(column.number, known)} (known: {', '.join(known)})"
                )
        return self


class Scatter(_WithRows):
    """Speed (pairs scored in a second) against RSUM, all measured in one call on one machine."""

    kind: Literal["scatter"]
    repeats: int = Field(3, ge=1, description="the median of so many timings")


class Curves(_WithRows):
    """What happens during training, row by row."""

    kind: Literal["curves"]
    panels: list[Panel] = Field(min_length=1)

    @model_validator(mode="after")
    def _every_row_is_one_run(self) -> Self:
        for row in self.rows:
            if row.run is None:
                raise ValueError(f"row '{row.name}': curves are of one run each")
        return self


class Histograms(_WithRows):
    """Distributions of the similarities that NAAF's runs sample (its figure 3)."""

    kind: Literal["histograms"]
    epochs: list[Literal["first", "unadjusted", "last"]] = Field(
        ["first", "unadjusted", "last"],
        min_length=1,
        description="epochs that sampled anything; 'unadjusted' is the last one before α*",
    )

    @model_validator(mode="after")
    def _every_row_is_one_run(self) -> Self:
        for row in self.rows:
            if row.run is None:
                raise ValueError(f"row '{row.name}': histograms are of one run each")
        return self


class Maps(_WithRows):
    """Words × regions of some test pairs, model beside model (NAAF, figure 4)."""

    kind: Literal["maps"]
    captions: int = Field(3, ge=1, description="each with its own image and with a wrong one")
    confused: str = Field(description="the run whose best wrong image a caption is shown with")

    @property
    def used(self) -> list[str]:
        return list(dict.fromkeys([*super().used, self.confused]))

    @model_validator(mode="after")
    def _every_row_is_one_run(self) -> Self:
        for row in self.rows:
            if row.run is None:
                raise ValueError(f"row '{row.name}': maps are of one run each")
        return self


AnyArtifact = Table | Scatter | Curves | Histograms | Maps | Sweep | Examples | Negatives
_ADAPTER: TypeAdapter[AnyArtifact] = TypeAdapter(
    Annotated[AnyArtifact, Field(discriminator="kind")]
)


def build_artifact(tree: Mapping[str, Any], where: str) -> AnyArtifact:
    """Check a tree of plain values; an error names the file, the key, and what is wrong."""
    try:
        return _ADAPTER.validate_python(dict(tree))
    except ValidationError as error:
        raise ConfigError(f"{where}: " + "\n  ".join(map(_explain, error.errors()))) from None


def _explain(error: Any) -> str:
    # the first part of a place is the kind that was chosen, which the file says itself
    parts = error["loc"][1:] if error["loc"][:1] in [(kind,) for kind in KINDS] else error["loc"]
    place = ".".join(map(str, parts)) or "(top)"
    if error["type"] == "extra_forbidden":
        return f"unknown key '{place}'"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"].startswith("union_tag"):
        return f"kind: expected {', '.join(KINDS[:-1])} or {KINDS[-1]}"
    return f"{place}: {error['msg']}, got {error['input']!r}"
