"""The report of an evaluation on foils: tables, Markdown and JSON."""

from __future__ import annotations

from pydantic import Field

from counterfoil.evaluation.report import Report, markdown_table

TRUE_KINDS = {
    "same": "claims what the caption claims, by other words",
    "meant": "claims something else that is true of the same things",
    "generous": "is true of other things, or only by a generous reading",
}


class KindShare(Report):
    """Foils that exchange one kind of word: counts, how many are false, and the accuracy."""

    kind: str
    foils: int
    false: int
    true: int
    accuracy: float
    false_accuracy: float | None = None

    def cells(self, with_truth: bool) -> tuple[str, ...]:
        """One row of the table, with or without the columns that need ground truth."""
        plain = (self.kind, str(self.foils))
        if not with_truth:
            return (*plain, f"{self.accuracy:.1f}")
        checked = self.false + self.true
        negatives = f"{100 * self.false / checked:.1f}" if checked else ""
        false_accuracy = f"{self.false_accuracy:.1f}" if self.false_accuracy is not None else ""
        return (*plain, negatives, f"{self.accuracy:.1f}", false_accuracy)


class FoilReport(Report):
    """A model on foils of one source. Shares are in percent; None if they could not be measured.

    ``accuracy`` is the share of foils that score below their caption, ``harder`` the share above,
    ``gap`` the mean difference of the scores. ``false_accuracy`` counts only foils that are
    certainly false of their image. ``other_image`` is the accuracy with the image of another
    pair. Compare it with that of the model before training with foils: a rise is a preference for
    sentences like the captions, whatever the image shows. In ``own_image`` it cancels: the share of
    foils for which caption minus foil is larger with their own image than with another one.

    Words of foils (TAGS-DC §4.4): ``wod_auc`` and ``wod_accuracy`` of detecting replaced words,
    ``wod_found`` their recall at a threshold of 0.5, ``woc_accuracy`` the share corrected.

    Ground truth: of the ``checked`` foils, ``true_negatives`` are false of their image and
    ``false_negatives`` true of it; ``senseless`` are true negatives with a word that makes no
    sense. ``unsure`` foils could not be decided; ``undecided`` is their share of all foils.

    On request, ``by_kind`` has shares per kind of exchange, and ``true_kinds`` the number of true
    foils per kind of truth (`TRUE_KINDS`).
    """

    split: str
    foils: str
    captions: int
    left_out: int
    pairs: int
    accuracy: float
    caption_accuracy: float
    harder: float
    gap: float
    other_image: float | None = None
    own_image: float | None = None
    true_negatives: float | None = None
    false_accuracy: float | None = None
    checked: int = 0
    unsure: int = 0
    false_negatives: float | None = None
    senseless: float | None = None
    undecided: float | None = None
    wod_auc: float | None = None
    wod_accuracy: float | None = None
    wod_found: float | None = None
    woc_accuracy: float | None = None
    word_pairs: int = 0
    perplexity_true: float | None = None
    perplexity_foils: float | None = None
    perplexity_corrected: float | None = None
    language_model: str | None = None
    by_kind: list[KindShare] = Field(default_factory=list)
    true_kinds: dict[str, int] = Field(default_factory=dict)

    def headline(self) -> str:
        """Split, source and sizes in one line."""
        left = f" ({self.left_out} of {self.captions} captions have none)" if self.left_out else ""
        return f"{self.split}, foils by {self.foils}: {self.pairs} foils{left}"

    def rows(self) -> list[tuple[str, ...]]:
        """A header and one row per available metric."""
        shares: list[tuple[str, float | None]] = [
            ("true caption > foil", self.accuracy),
            ("true caption > false foil", self.false_accuracy),
            ("true caption > all its foils", self.caption_accuracy),
            ("foil > true caption", self.harder),
            ("true caption > foil, with another image", self.other_image),
            ("more clearly with its own image than with another", self.own_image),
            ("true negatives", self.true_negatives),
            ("word discrimination, AUC", self.wod_auc),
            ("word discrimination, accuracy", self.wod_accuracy),
            ("replaced words found", self.wod_found),
            ("word correction, accuracy", self.woc_accuracy),
        ]
        table: list[tuple[str, ...]] = [("", "%")]
        table += [(name, f"{value:.1f}") for name, value in shares if value is not None]
        table.append(("mean gap of the scores", f"{self.gap:.4f}"))
        perplexities = (
            ("perplexity of the captions", self.perplexity_true),
            ("perplexity of the foils", self.perplexity_foils),
            ("perplexity of corrected foils", self.perplexity_corrected),
        )
        table += [(name, f"{value:.2f}") for name, value in perplexities if value is not None]
        return table

    def kind_rows(self) -> list[tuple[str, ...]]:
        """A header, one row per kind of exchange, and one for all; empty without ``by_kind``."""
        if not self.by_kind:
            return []
        known = self.true_negatives is not None
        truth = ("true negatives", "true > foil", "true > false foil")
        total = KindShare(
            kind="all",
            foils=self.pairs,
            false=sum(share.false for share in self.by_kind),
            true=sum(share.true for share in self.by_kind),
            accuracy=self.accuracy,
            false_accuracy=self.false_accuracy,
        )
        head = ("exchanged", "foils", *(truth if known else truth[1:2]))
        return [head, *(share.cells(known) for share in (*self.by_kind, total))]

    def true_kind_rows(self) -> list[tuple[str, ...]]:
        """A header and the number of true foils per kind of truth; empty if there are none."""
        total = sum(self.true_kinds.values())
        if not total:
            return []
        shares = [(name, self.true_kinds.get(key, 0)) for key, name in TRUE_KINDS.items()]
        head = ("a foil that is true …", "foils", "%")
        return [head, *((name, str(count), f"{100 * count / total:.1f}") for name, count in shares)]

    def notes(self) -> str:
        """What is needed to compare the numbers, in one sentence."""
        parts = ["a tie counts against the model"]
        if self.other_image is not None:
            parts.append("what rises with another image, too, needs no look at the image")
        if self.true_negatives is not None:
            parts.append(f"true negatives of {self.checked} foils, {self.unsure} more are unsure")
        if self.word_pairs:
            parts.append(f"words of the {self.word_pairs} foils that are as long as their captions")
        if self.language_model is not None:
            parts.append(f"perplexity under {self.language_model}")
        return "; ".join(parts)

    def to_markdown(self) -> str:
        """The headline, the tables and the notes."""
        lines = [self.headline()]
        for table in (self.rows(), self.kind_rows(), self.true_kind_rows()):
            lines += ["", *markdown_table(table)] if table else []
        return "\n".join([*lines, "", f"{self.notes()}."]) + "\n"
