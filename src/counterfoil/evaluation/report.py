"""Reports of retrieval, of word effects and of several runs: tables, Markdown and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from typing_extensions import Self

from counterfoil.core.errors import DataError
from counterfoil.data.duplicates import MANY_TWINS_SHARE

Protocol = Literal["full", "folds"]

RECALLS = ("RSUM", "i2t R@1", "t2i R@1")
"""Recalls of a run in the table of several runs."""

Treatment = Literal["negatives", "positives"]
"""How identical captions of other images count: as wrong (as in the papers) or as right."""


class Report(BaseModel):
    """Base of the reports: frozen, with unknown keys forbidden, to and from JSON."""

    # JSON has no NaN (the recall of no queries), so it is written as a string.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")

    def as_dict(self) -> dict[str, Any]:
        """Plain values that JSON and YAML can hold."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `as_dict`."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise DataError(f"not a {cls.__name__}: {key}: {first['msg']}") from error

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
    """mAP@R, R-precision and R@K with positives beyond the data set's own pairs."""

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
                f"{side.map_at_r:.1f}",
                f"{side.r_precision:.1f}",
                *(f"{side.recalls[k]:.1f}" for k in ks),
                str(side.queries),
            )
            for name, side in (("image → text", self.i2t), ("text → image", self.t2i))
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
        """RSUM with its interval, and the RSUM of chance."""
        return f"RSUM {self.rsum:.1f}{_bracket(self.rsum_interval)} (chance {self.rsum_chance:.1f})"

    def rows(self) -> list[tuple[str, ...]]:
        """A header, one row of text per direction, and one row each for chance."""
        recalls = tuple(f"R@{k}" for k in self.ks)
        table: list[tuple[str, ...]] = [("", *recalls, "median rank", "mean rank", "MRR")]
        for name, side in (("image → text", self.i2t), ("text → image", self.t2i)):
            cells = [
                f"{side.recalls[k]:.1f}{_bracket(side.intervals.get(f'R@{k}'))}" for k in self.ks
            ]
            ranks = (_median(side.median_rank), f"{side.mean_rank:.1f}", f"{side.mrr:.3f}")
            table.append((name, *cells, *ranks))
        for name, side in (("chance, i → t", self.i2t), ("chance, t → i", self.t2i)):
            table.append((name, *(f"{side.chance[k]:.1f}" for k in self.ks), "", "", ""))
        return table


def _median(rank: float) -> str:
    """A median is a whole or half number; a mean of medians, over folds, is rounded."""
    return f"{rank:g}" if (2 * rank).is_integer() else f"{rank:.1f}"


class IdenticalCaptions(Report):
    """Captions that another image has word for word, too, and how they count.

    ``share`` is in percent of all captions. ``counted_as`` applies to the numbers of the report
    itself. ``negatives`` and ``positives`` are set if both were computed.
    """

    captions: int
    share: float
    counted_as: Treatment
    negatives: Recalls | None = None
    positives: Recalls | None = None

    @property
    def many(self) -> bool:
        """Whether their share is too large for the usual recalls to be meaningful."""
        return self.share > 100 * MANY_TWINS_SHARE


class RetrievalReport(Recalls):
    """Retrieval in both directions on one split under one protocol."""

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

    def __repr__(self) -> str:
        return f"RetrievalReport({self.headline()})"

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
        """One line if identical captions make the usual recalls less meaningful, else empty."""
        twins = self.identical_captions
        if twins is None or twins.positives is None:
            return ""
        return (
            f"warning: {twins.captions:,} of {self.captions:,} captions ({twins.share:.1f} %) "
            "stand word for word at another image, too; recalls are reported twice, with them "
            "as negatives (as in the papers) and as positives"
        )

    def tables(self) -> list[tuple[str, list[tuple[str, ...]]]]:
        """Title and rows of each table: one, or two if identical captions are counted both ways."""
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
        """The headline, the tables and the notes needed to compare the numbers."""
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
    """Rows of text as a Markdown table; the first row is the header."""
    rule = ("---",) + ("---:",) * (len(rows[0]) - 1)
    return [f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:])]


class Measured(Report):
    """A metric in percent, with its 95 % interval if one was computed."""

    value: float
    interval: tuple[float, float] | None = None

    def short(self) -> str:
        """The value alone; a dash if there was nothing to measure."""
        return "–" if math.isnan(self.value) else f"{self.value:.1f}"

    def __str__(self) -> str:
        return self.short() + _bracket(self.interval)


class KindReport(Report):
    """Metrics of one kind of error, on pairs whose false caption has only errors of that kind.

    ``word_auc`` compares the wrong words of that kind, in any caption, with all right words.
    """

    pairs: int
    pair_accuracy: Measured
    words: int
    word_auc: Measured


class WordReport(Report):
    """How well a model prefers true captions, and how well its word effects find wrong words.

    Pooled metrics rank the words of all false captions together, metrics per caption only its own
    words. All are in percent; chance is 50 for AUC and ``ap_chance`` for AP.
    """

    split: str
    images: int
    captions: int
    foils: int
    left_out: int
    words: int
    positives: int
    method: str
    word_auc: Measured
    word_ap: Measured
    caption_auc: Measured
    caption_ap: Measured
    ap_chance: float
    pair_accuracy: Measured
    kinds: dict[str, KindReport]
    bootstrap: int = 0
    seed: int = 0

    def headline(self) -> str:
        """Split, sizes and the method of the effects in one line."""
        left = f" ({self.left_out} captions could not be made false)" if self.left_out else ""
        return (
            f"{self.split}, wrong words: {self.foils} false captions{left} of {self.images} images,"
            f" {self.positives} wrong of {self.words} words; effects by {self.method}"
        )

    def rows(self) -> list[tuple[str, ...]]:
        """A header, one row of text for all errors, one per kind, and one for chance."""
        per_caption = ("AUC per caption", "AP per caption")
        table: list[tuple[str, ...]] = [
            ("", "true > false", "word AUC", "word AP", *per_caption, "pairs")
        ]
        pooled = (self.pair_accuracy, self.word_auc, self.word_ap)
        measures = (*pooled, self.caption_auc, self.caption_ap)
        table.append(("all", *map(str, measures), str(self.foils)))
        for name, kind in self.kinds.items():
            cells = (str(kind.pair_accuracy), str(kind.word_auc))
            table.append((name, *cells, "", "", "", str(kind.pairs)))
        table.append(("chance", "50.0", "50.0", f"{self.ap_chance:.1f}", "50.0", "", ""))
        return table

    def notes(self) -> str:
        """What is needed to compare the numbers, in one sentence."""
        parts = [
            "word AUC and AP: finding the wrong words of false captions by effect, in percent",
            "true > false: pairs in which the true caption scores higher, ties counted against the "
            "model; per kind, pairs with errors of that kind only",
        ]
        if self.bootstrap:
            parts.append(
                f"brackets: 95% intervals, {self.bootstrap} resamples of images, seed {self.seed}"
            )
        return "; ".join(parts)

    def to_markdown(self) -> str:
        return _page(self)


class RunResult(Report):
    """Reports of one run; ``run`` is the name of its folder."""

    run: str
    model: str
    retrieval: RetrievalReport
    words: WordReport | None = None


class Comparison(Report):
    """Several runs evaluated separately on the same images, captions and foils."""

    split: str
    runs: tuple[RunResult, ...]

    def headline(self) -> str:
        """Split and sizes in one line."""
        first = self.runs[0]
        text = f"{self.split}: {first.retrieval.images} images, {first.retrieval.captions} captions"
        if first.words is not None:
            text += f"; {first.words.foils} false captions, {first.words.positives} wrong words"
        return text

    def rows(self) -> list[tuple[str, ...]]:
        """A header and one row of text per run."""
        reports = [run.words for run in self.runs if run.words is not None]
        kinds = list(dict.fromkeys(kind for words in reports for kind in words.kinds))
        header: tuple[str, ...] = ("run", "model", *RECALLS)
        if self._both_ways():
            header += tuple(f"{name}, identical right" for name in RECALLS)
        if reports:
            header += ("word AUC", "word AP", "true > false", *kinds, "effects by")
        return [header, *(_row(run, kinds, len(header)) for run in self.runs)]

    def _both_ways(self) -> bool:
        twins = self.runs[0].retrieval.identical_captions
        return twins is not None and twins.positives is not None

    def notes(self) -> str:
        """What is needed to compare the numbers, in one sentence."""
        first = self.runs[0].retrieval
        parts = [f"R@K is the hit rate in percent; {first.tie_rule}"]
        if self._both_ways():
            parts.append("identical captions of other images count as wrong, then as right")
        elif first.identical_captions and first.identical_captions.counted_as == "positives":
            parts.append("identical captions of other images count as right")
        if self.runs[0].words is not None:
            parts.append(self.runs[0].words.notes())
        elif first.bootstrap:
            parts.append(f"brackets: 95% intervals, {first.bootstrap} resamples of images")
        return "; ".join(parts)

    def to_markdown(self) -> str:
        return _page(self)


def _recall_cells(recalls: Recalls) -> tuple[str, ...]:
    rsum = f"{recalls.rsum:.1f}{_bracket(recalls.rsum_interval)}"
    return rsum, *(f"{side.recalls[1]:.1f}" for side in (recalls.i2t, recalls.t2i))


def _row(run: RunResult, kinds: list[str], width: int) -> tuple[str, ...]:
    retrieval, words = run.retrieval, run.words
    cells: tuple[str, ...] = (run.run, run.model, *_recall_cells(retrieval))
    twins = retrieval.identical_captions
    if twins is not None and twins.positives is not None:
        cells += _recall_cells(twins.positives)
    if words is not None:
        by_kind = [
            words.kinds[kind].pair_accuracy.short() if kind in words.kinds else "" for kind in kinds
        ]
        measures = (words.word_auc, words.word_ap, words.pair_accuracy)
        cells += (*map(str, measures), *by_kind, words.method)
    return cells + ("",) * (width - len(cells))


def _page(report: WordReport | Comparison) -> str:
    """The headline, the table and the notes of a report as Markdown."""
    lines = [report.headline(), "", *markdown_table(report.rows()), "", f"{report.notes()}."]
    return "\n".join(lines) + "\n"
