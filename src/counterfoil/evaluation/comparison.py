"""Several models judged by themselves on one split, side by side."""

from __future__ import annotations

from counterfoil.evaluation.report import Recalls, Report, RetrievalReport, markdown_table
from counterfoil.evaluation.words.cases import KINDS
from counterfoil.evaluation.words.report import WordReport

RECALLS = ("RSUM", "i2t R@1", "t2i R@1")


class RunResult(Report):
    """What one run scored; ``run`` is the name of its folder."""

    run: str
    model: str
    retrieval: RetrievalReport
    words: WordReport | None = None


class Comparison(Report):
    """A row per run, all on the same images, captions and foils."""

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
        judged = [run.words for run in self.runs if run.words is not None]
        kinds = [kind for kind in KINDS if any(kind in words.kinds for words in judged)]
        header: tuple[str, ...] = ("run", "model", *RECALLS)
        if self._both_ways():
            header += tuple(f"{name}, identical right" for name in RECALLS)
        if judged:
            header += ("word AUC", "word AP", "true > false", *kinds, "effects by")
        return [header, *(_row(run, kinds, len(header)) for run in self.runs)]

    def _both_ways(self) -> bool:
        twins = self.runs[0].retrieval.identical_captions
        return twins is not None and twins.positives is not None

    def notes(self) -> str:
        """What makes the numbers comparable, in one sentence."""
        found = self.runs[0].retrieval
        parts = [f"R@K is the hit rate in percent; {found.tie_rule}"]
        if self._both_ways():
            parts.append("identical captions of other images count as wrong, then as right")
        elif found.identical_captions and found.identical_captions.counted_as == "positives":
            parts.append("identical captions of other images count as right")
        if self.runs[0].words is not None:
            parts.append(self.runs[0].words.notes())
        elif found.bootstrap:
            parts.append(f"brackets: 95% intervals, {found.bootstrap} resamples of images")
        return "; ".join(parts)

    def to_markdown(self) -> str:
        """The headline, the table and the notes."""
        lines = [self.headline(), "", *markdown_table(self.rows()), "", f"{self.notes()}."]
        return "\n".join(lines) + "\n"


def _recalls(found: Recalls) -> tuple[str, ...]:
    rsum = f"{found.rsum:.1f}"
    if found.rsum_interval:
        rsum += f" [{found.rsum_interval[0]:.1f}, {found.rsum_interval[1]:.1f}]"
    return rsum, *(f"{side.recalls[1]:.1f}" for side in (found.i2t, found.t2i))


def _row(run: RunResult, kinds: list[str], width: int) -> tuple[str, ...]:
    found, words = run.retrieval, run.words
    cells: tuple[str, ...] = (run.run, run.model, *_recalls(found))
    twins = found.identical_captions
    if twins is not None and twins.positives is not None:
        cells += _recalls(twins.positives)
    if words is not None:
        by_kind = [
            words.kinds[kind].pair_accuracy.short() if kind in words.kinds else "" for kind in kinds
        ]
        measures = (words.word_auc, words.word_ap, words.pair_accuracy)
        cells += (*map(str, measures), *by_kind, words.method)
    return cells + ("",) * (width - len(cells))
