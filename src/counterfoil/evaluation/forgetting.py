"""What fine-tuning gained on foils, and what it lost in retrieval and classification.

A run is compared with the model it started from, on the same images: true captions against foils,
retrieval in both directions, and zero-shot classification by prompts. Intervals are of paired
differences, by resampling images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from counterfoil.core.errors import DataError
from counterfoil.core.progress import Progress
from counterfoil.data.pairs import Split
from counterfoil.evaluation.ranks import count_ranks
from counterfoil.evaluation.report import Report, markdown_table
from counterfoil.evaluation.zero_shot import ClassSet, classes_of, correct_classes
from counterfoil.plots.comparison import TradeOff, trade_off_chart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from counterfoil.models.model import Model

FOILS = ("rules", "rules:word-swap")
RECALL_RANKS = (1, 5, 10)
I2T, T2I = "image → text", "text → image"
REPORT_FILE = "forgetting.json"
"""File of the report in the folder of a run."""
Interval = tuple[float, float]
Floats = NDArray[np.float64]


class Change(Report):
    """One number before and after fine-tuning, with 95 % intervals; shares are in percent."""

    name: str
    kind: str
    before: float
    after: float
    before_interval: Interval | None = None
    after_interval: Interval | None = None
    interval: Interval | None = None
    items: int

    @property
    def difference(self) -> float:
        return self.after - self.before

    def cells(self) -> tuple[str, ...]:
        ends = (
            "" if self.interval is None else f" [{self.interval[0]:+.1f}, {self.interval[1]:+.1f}]"
        )
        return (
            self.name,
            f"{self.before:.1f}",
            f"{self.after:.1f}",
            f"{self.difference:+.1f}{ends}",
            str(self.items),
        )


class ForgettingReport(Report):
    """A run against the model it started from, on one split."""

    start: str
    run: str
    split: str
    images: int
    changes: list[Change]
    bootstrap: int
    notes: tuple[str, ...] = ()

    def of_kind(self, kind: str) -> list[Change]:
        """The changes of one kind: foils, retrieval or classes."""
        return [change for change in self.changes if change.kind == kind]

    def headline(self) -> str:
        return f"{self.run} against its start {self.start}, {self.split}: {self.images} images"

    def rows(self) -> list[tuple[str, ...]]:
        """A header and one row per number."""
        return [("", "start", "run", "change", "items"), *(one.cells() for one in self.changes)]

    def numbers(self) -> dict[str, float]:
        """The changes by short names, for tables: those of `FORGETTING_NUMBERS` that are known."""
        by_name = {one.name: one.difference for one in self.of_kind("retrieval")}
        numbers = {"i2t_change": by_name[I2T], "t2i_change": by_name[T2I]}
        for key, kind in (("foil_change", "foils"), ("class_change", "classes")):
            if changes := self.of_kind(kind):
                numbers[key] = _mean(changes)
        return numbers

    def sentence(self) -> str:
        """What was gained and lost, in one line."""
        parts = []
        if foils := self.of_kind("foils"):
            parts.append(f"true > foil {_mean(foils):+.1f} points")
        rsum = sum(change.difference for change in self.of_kind("retrieval"))
        parts.append(f"RSUM {rsum:+.1f}")
        if classes := self.of_kind("classes"):
            parts.append(f"classification by prompts {_mean(classes):+.1f} points")
        return ", ".join(parts)

    def footnote(self) -> str:
        """What is needed to read the numbers."""
        parts = [
            f"retrieval is the sum of R@1, R@5 and R@10 among these {self.images:,} images at "
            "once, with identical captions of other images as negatives; the RSUM of a run may "
            "be of more images or of folds",
            "ties count against the model",
        ]
        if self.bootstrap:
            parts.append(
                f"brackets: 95% intervals of the change, {self.bootstrap} resamples of images"
            )
        return "; ".join([*parts, *self.notes])

    def chart(self) -> Figure:
        """Foils against retrieval, with an arrow from the start to the run; empty without foils."""
        foils, retrieval = self.of_kind("foils"), self.of_kind("retrieval")
        points = [
            TradeOff(
                name,
                sum(getattr(one, side) for one in retrieval),
                float(np.mean([getattr(one, side) for one in foils])),
            )
            for name, side in ((self.start, "before"), (self.run, "after"))
            if foils
        ]
        return trade_off_chart(points, f"{self.run}: foils against retrieval ({self.split})")

    def to_markdown(self) -> str:
        table = markdown_table(self.rows())
        return "\n".join([self.headline(), "", *table, "", f"{self.footnote()}.", ""])


def _mean(changes: Sequence[Change]) -> float:
    return float(np.mean([change.difference for change in changes]))


@dataclass(frozen=True)
class PerImage:
    """A number as a ratio of sums over images: ``total`` [n] and ``count`` [n], in percent."""

    name: str
    kind: str
    total: Floats
    count: Floats

    @property
    def value(self) -> float:
        return float(self.total.sum() / self.count.sum())

    def resampled(self, draws: NDArray[np.int64]) -> Floats:
        """The number in each resample of images [resamples, n]; NaN if it has no item."""
        with np.errstate(invalid="ignore", divide="ignore"):
            ratios: Floats = self.total[draws].sum(1) / self.count[draws].sum(1)
        return ratios


def measure(
    model: Model,
    split: Split,
    foils: Sequence[str] = FOILS,
    classes: Sequence[ClassSet] = (),
    progress: Progress | None = None,
) -> dict[str, PerImage]:
    """The numbers of one model, image by image."""
    from counterfoil.evaluation.foils.scores import score_foils
    from counterfoil.evaluation.foils.sets import FoilChoice, foils_by, is_rules
    from counterfoil.scoring.encode import score_split

    measures = []
    for source in foils:
        try:
            made = foils_by(source, split, FoilChoice(), _no_writer, progress)
        except DataError:
            if is_rules(source):  # captions without a word that the rules exchange
                continue
            raise
        scores = score_foils(model, split, made, progress)
        images = [int(split.image_of[pair.caption]) for pair in scores.pairs]
        right = 100.0 * (scores.true > scores.foil)
        measures.append(_sums(_foil_name(source), "foils", right, images, len(split)))
    scored = score_split(model, split, progress=progress)
    ranks = count_ranks(scored.scores, scored.image_of)
    rows = np.array(scored.images)
    owners = rows[scored.image_of[ranks.texts]]
    for name, ranked, owned in (
        (I2T, ranks.i2t, rows[ranks.images]),
        (T2I, ranks.t2i, owners),
    ):
        hits = 100.0 * sum((ranked < k).astype(np.float64) for k in RECALL_RANKS)
        measures.append(_sums(name, "retrieval", hits, owned, len(split)))
    measures += [_classified(model, split, one, progress) for one in classes]
    return {one.name: one for one in measures}


def _foil_name(source: str) -> str:
    return f"true > foil ({source})"


def _no_writer(path: Path) -> Any:
    raise DataError(f"{path}: foils of the forgetting report are made by rule or read from a file")


def _sums(name: str, kind: str, values: Any, images: Any, size: int) -> PerImage:
    index = np.asarray(images, dtype=np.int64)
    total = np.zeros(size)
    np.add.at(total, index, values)
    return PerImage(name, kind, total, np.bincount(index, minlength=size).astype(np.float64))


def _classified(
    model: Model, split: Split, classes: ClassSet, progress: Progress | None
) -> PerImage:
    from counterfoil.core.tensors.modes import eval_mode
    from counterfoil.scoring.encode import encode_images, encode_texts, score_all

    with eval_mode(model):
        images, readable, _ = encode_images(model, split, progress=progress)
        scores = score_all(model, images, encode_texts(model, classes.prompts), progress)
    right, labeled = correct_classes(scores, classes, readable)
    return _sums(
        f"classes by prompts ({classes.name})", "classes", 100.0 * right, labeled, len(split)
    )


def compare_with_start(
    start: Model,
    run: Model,
    split: Split,
    *,
    names: tuple[str, str] = ("start", "run"),
    foils: Sequence[str] = FOILS,
    classes: Path | Sequence[ClassSet] | None = None,
    bootstrap: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> ForgettingReport:
    """Compare a fine-tuned model with its start on one split.

    ``classes`` is a file (`read_classes`), a list of class sets, or None for the default of the
    data (`classes_of`).
    """
    given = classes if isinstance(classes, Path) or classes is None else None
    sets = classes_of(split, given) if not isinstance(classes, Sequence) else list(classes)
    before, after = (measure(model, split, foils, sets, progress) for model in (start, run))
    rng = np.random.default_rng([seed, len(split)])
    draws = rng.integers(len(split), size=(bootstrap, len(split)))
    changes = [_change(before[name], after[name], draws) for name in after if name in before]
    notes = [one.note() for one in sets] or ["no classes: name them in a file (--classes)"]
    without = [source for source in foils if _foil_name(source) not in after]
    notes += [f"{source}: no caption has a foil" for source in without]
    return ForgettingReport(
        start=names[0],
        run=names[1],
        split=split.name,
        images=len(split),
        changes=changes,
        bootstrap=bootstrap,
        notes=tuple(notes),
    )


def _change(before: PerImage, after: PerImage, draws: NDArray[np.int64]) -> Change:
    ends: dict[str, Interval] = {}
    if len(draws):
        one, two = before.resampled(draws), after.resampled(draws)
        for key, values in (("before_", one), ("after_", two), ("", two - one)):
            low, high = np.nanpercentile(values, [2.5, 97.5])
            ends[f"{key}interval"] = (float(low), float(high))
    return Change(
        name=after.name,
        kind=after.kind,
        before=before.value,
        after=after.value,
        items=int(after.count.sum()),
        **ends,
    )
