"""What a retrieval evaluation found, as plain data that prints, saves and loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from typing_extensions import Self

from counterfoil.core.errors import DataError
from counterfoil.data.duplicates import MANY_TWINS_SHARE

Protocol = Literal["full", "folds"]

Treatment = Literal["negatives", "positives"]
"""What identical captions of other images count as: the papers' way, or as right answers."""


class Report(BaseModel):
    """Base of the reports: frozen, strict about its keys, to and from JSON."""

    # JSON has no NaN (the recall of no queries): it is written as text, and read back as NaN.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")

    def as_dict(self) -> dict[str, Any]:
        """Plain values that JSON and YAML can hold."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The report `as_dict` made."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise DataError(f"not a {cls.__name__}: {place}: {first['msg']}") from error

    def to_json(self, indent: int | None = 2) -> str:
        return self.model_dump_json(indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Self:
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise DataError(f"not a {cls.__name__}: {error.errors()[0]['msg']}") from error


class DirectionReport(Report):
    """One direction. Recalls are hit rates in percent; ranks are counted from 1."""

    queries: int
    left_out: int
    recalls: dict[int, float]
    chance: dict[int, float]
    median_rank: float
    mean_rank: float
    mrr: float
    intervals: dict[str, tuple[float, float]] = {}


class ExtendedDirection(Report):
    """One direction with extended positives, in percent."""

    queries: int
    left_out: int
    positives: int
    map_at_r: float
    r_precision: float
    recalls: dict[int, float]


class ExtendedReport(Report):
    """mAP@R, R-precision and R@K with more positives than the data set's own pairs."""

    source: str
    i2t: ExtendedDirection
    t2i: ExtendedDirection

    def rows(self) -> list[tuple[str, ...]]:
        """A header and one row of text per direction."""
        ks = list(self.i2t.recalls)
        header = ("extended positives", "mAP@R", "R-P", *(f"R@{k}" for k in ks), "queries")
        return [header] + [
            (
                name,
                f"{found.map_at_r:.1f}",
                f"{found.r_precision:.1f}",
                *(f"{found.recalls[k]:.1f}" for k in ks),
                str(found.queries),
            )
            for name, found in (("image → text", self.i2t), ("text → image", self.t2i))
        ]


class Recalls(Report):
    """Both directions of retrieval, and the sum of their recalls."""

    i2t: DirectionReport
    t2i: DirectionReport
    rsum: float
    rsum_chance: float
    rsum_interval: tuple[float, float] | None = None
    fold_rsums: tuple[float, ...] = ()

    @property
    def ks(self) -> tuple[int, ...]:
        return tuple(self.i2t.recalls)

    def sum_line(self) -> str:
        """RSUM with its interval, and that of chance."""
        return f"RSUM {self.rsum:.1f}{_bracket(self.rsum_interval)} (chance {self.rsum_chance:.1f})"

    def rows(self) -> list[tuple[str, ...]]:
        """A header, one row of text per direction, and what chance would score."""
        recalls = tuple(f"R@{k}" for k in self.ks)
        table: list[tuple[str, ...]] = [("", *recalls, "median rank", "mean rank", "MRR")]
        for name, found in (("image → text", self.i2t), ("text → image", self.t2i)):
            cells = [
                f"{found.recalls[k]:.1f}{_bracket(found.intervals.get(f'R@{k}'))}" for k in self.ks
            ]
            ranks = (f"{found.median_rank:g}", f"{found.mean_rank:.1f}", f"{found.mrr:.3f}")
            table.append((name, *cells, *ranks))
        for name, found in (("chance, i → t", self.i2t), ("chance, t → i", self.t2i)):
            table.append((name, *(f"{found.chance[k]:.1f}" for k in self.ks), "", "", ""))
        return table


class IdenticalCaptions(Report):
    """Captions that stand word for word at another image, too, and what they count as.

    ``share`` is in percent of all captions. ``counted_as`` says it of the numbers of the report
    itself. ``negatives`` and ``positives`` are there if both ways were computed.
    """

    captions: int
    share: float
    counted_as: Treatment
    negatives: Recalls | None = None
    positives: Recalls | None = None

    @property
    def many(self) -> bool:
        """Whether there are so many that the usual recalls say little."""
        return self.share > 100 * MANY_TWINS_SHARE


class RetrievalReport(Recalls):
    """Both directions of retrieval on one split under one protocol."""

    split: str
    protocol: Protocol
    folds: int
    images: int
    captions: int
    tie_rule: str
    bootstrap: int = 0
    seed: int = 0
    extended: ExtendedReport | None = None
    identical_captions: IdenticalCaptions | None = None

    def headline(self) -> str:
        """Split, protocol, sizes and RSUM in one line."""
        how = "full" if self.protocol == "full" else f"mean of {self.folds} folds"
        left = self.i2t.left_out
        return (
            f"{self.split}, {how}: {self.images} images, {self.captions} captions"
            f"{f' (images without captions, left out: {left})' if left else ''}; "
            f"{self.sum_line()}"
        )

    def warning(self) -> str:
        """One line if identical captions make the usual recalls say little, else nothing."""
        twins = self.identical_captions
        if twins is None or twins.positives is None:
            return ""
        return (
            f"warning: {twins.captions:,} of {self.captions:,} captions ({twins.share:.1f} %) "
            "stand word for word at another image, too; recalls follow both ways, with them "
            "as negatives (as in the papers) and as positives"
        )

    def tables(self) -> list[tuple[str, list[tuple[str, ...]]]]:
        """Title and rows of each table: one, or one for each way to count identical captions."""
        twins = self.identical_captions
        if twins is None or twins.positives is None:
            chosen = twins is not None and (twins.counted_as == "positives" or twins.many)
            ending = f"; identical captions as {twins.counted_as}" if twins and chosen else ""
            return [(f"{self.headline()}{ending}", self.rows())]
        return [
            (f"{self.headline()}; identical captions as negatives", self.rows()),
            (
                f"the same, {twins.positives.sum_line()}; identical captions as positives",
                twins.positives.rows(),
            ),
        ]

    def to_markdown(self) -> str:
        """The headline, the table and the notes that make the numbers comparable."""
        parts = [f"{self.warning()}.", ""] if self.warning() else []
        for title, rows in self.tables():
            parts += [title, "", *markdown_table(rows), ""]
        parts.pop()
        if self.extended is not None:
            parts += ["", *markdown_table(self.extended.rows())]
        notes = [f"R@K is the hit rate in percent; {self.tie_rule}"]
        if self.bootstrap:
            notes.append(
                f"brackets: 95% intervals, {self.bootstrap} resamples of images, seed {self.seed}"
            )
        return "\n".join([*parts, "", "; ".join(notes) + "."]) + "\n"


def _bracket(bounds: tuple[float, float] | None) -> str:
    return f" [{bounds[0]:.1f}, {bounds[1]:.1f}]" if bounds else ""


def markdown_table(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows of text, the first of them the header, as a Markdown table."""
    rule = ("---",) + ("---:",) * (len(rows[0]) - 1)
    return [f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:])]
