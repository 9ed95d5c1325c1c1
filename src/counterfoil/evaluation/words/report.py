"""What an evaluation of word effects found, as plain data that prints, saves and loads."""

from __future__ import annotations

import math

from counterfoil.evaluation.report import Report, markdown_table


class Measured(Report):
    """A number in percent with its 95 % interval, where there is one."""

    value: float
    interval: tuple[float, float] | None = None

    def short(self) -> str:
        """The number alone, a dash where there was nothing to measure."""
        return "–" if math.isnan(self.value) else f"{self.value:.1f}"

    def __str__(self) -> str:
        bounds = self.interval
        return self.short() + (f" [{bounds[0]:.1f}, {bounds[1]:.1f}]" if bounds else "")


class KindReport(Report):
    """One kind of error: pairs whose false caption has only errors of that kind.

    ``word_auc`` sets the wrong words of that kind, in whatever caption, against all right words.
    """

    pairs: int
    pair_accuracy: Measured
    words: int
    word_auc: Measured


class WordReport(Report):
    """How well a model prefers true captions, and how well its word effects find wrong words.

    Pooled numbers rank the words of all false captions together, those per caption each caption's
    own words. All are in percent: of a random AUC 50, of a random AP ``ap_chance``.
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
        """Split, sizes and how effects were found in one line."""
        left = f" ({self.left_out} captions could not be made false)" if self.left_out else ""
        return (
            f"{self.split}, wrong words: {self.foils} false captions{left} of {self.images} images,"
            f" {self.positives} wrong of {self.words} words; effects by {self.method}"
        )

    def rows(self) -> list[tuple[str, ...]]:
        """A header, one row of text for all errors and one per kind, and what chance would do."""
        per_caption = ("AUC per caption", "AP per caption")
        table: list[tuple[str, ...]] = [
            ("", "true > false", "word AUC", "word AP", *per_caption, "pairs")
        ]
        pooled = (self.pair_accuracy, self.word_auc, self.word_ap)
        measures = (*pooled, self.caption_auc, self.caption_ap)
        table.append(("all", *map(str, measures), str(self.foils)))
        for name, kind in self.kinds.items():
            found = (str(kind.pair_accuracy), str(kind.word_auc))
            table.append((name, *found, "", "", "", str(kind.pairs)))
        table.append(("chance", "50.0", "50.0", f"{self.ap_chance:.1f}", "50.0", "", ""))
        return table

    def notes(self) -> str:
        """What makes the numbers comparable, in one sentence."""
        parts = [
            "word AUC and AP: finding the wrong words of false captions by effect, in percent",
            "true > false: pairs in which the true caption scores higher, ties counted against the "
            "model, by kind where all errors are of that kind",
        ]
        if self.bootstrap:
            parts.append(
                f"brackets: 95% intervals, {self.bootstrap} resamples of images, seed {self.seed}"
            )
        return "; ".join(parts)

    def to_markdown(self) -> str:
        """The headline, the table and the notes."""
        lines = [self.headline(), "", *markdown_table(self.rows()), "", f"{self.notes()}."]
        return "\n".join(lines) + "\n"
