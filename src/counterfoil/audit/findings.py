"""What an audit found, as plain data that is written (JSON lines, CSV), read back and shown."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from counterfoil.data.pairs import Problem, count_kinds
from counterfoil.evaluation.report import Report

Kind = Literal["mismatch", "false-negative"]
Sign = Literal["low-score", "other-image", "wrong-words", "near-duplicate"]

SIGN_NAMES: dict[str, str] = {
    "low-score": "low score",
    "other-image": "another image fits better",
    "wrong-words": "words that do not fit",
    "near-duplicate": "nearly the same caption elsewhere",
}

LOST_KINDS = ("unreadable-image", "missing-image", "missing-features")
FORMULA = ("=", "+", "-", "@", "\t", "\r")


class Reason(Report):
    """Why a caption is listed: a sign, its strength from 0 to 1, and a sentence with the facts."""

    sign: Sign
    strength: float
    text: str


class WrongWord(Report):
    """A word that does less for the match than it usually does.

    ``span`` is its place in the caption, ``suggestions`` what could stand there, likeliest first.
    """

    word: str
    span: tuple[int, int]
    effect: float
    usual: float
    suggestions: tuple[str, ...] = ()


class UnknownWord(Report):
    """A word that the model does not know, and its place; it was left out before scoring."""

    word: str
    span: tuple[int, int]


class OtherImage(Report):
    """Another image of the split, and the caption's score with it."""

    image: str
    score: float


class OtherCaption(Report):
    """A caption of another image, and its score with this one or, for duplicates, its likeness."""

    text: str
    image: str
    score: float


class Corrected(Report):
    """The caption as the corrector would write it, with its scores before and after."""

    text: str
    before: float
    after: float
    changes: tuple[tuple[str, str], ...]


class Planted(Report):
    """A caption that was made wrong on purpose: how, and what stood there before."""

    error: Literal["swapped", "words"]
    original: str


class Finding(Report):
    """A caption to look at.

    ``caption`` is its number among the captions of ``image``, ``rank`` the place of the image among
    ``compared`` images by their score with the caption (1: no other fits as well), ``margin`` the
    score less that of the best other image, ``quantile`` the share of the split's captions that
    score lower with their images. ``planted`` is set when the error is a known one.
    """

    kind: Kind
    split: str
    image: str
    caption: int
    text: str
    suspicion: float
    score: float
    quantile: float
    rank: int
    compared: int
    margin: float | None
    reasons: tuple[Reason, ...]
    wrong_words: tuple[WrongWord, ...]
    words_examined: bool
    better_image: OtherImage | None
    better_caption: OtherCaption | None
    near_duplicate: OtherCaption | None
    near_duplicate_images: int
    unknown_words: tuple[UnknownWord, ...] = ()
    correction: Corrected | None = None
    correction_note: str = ""
    planted: Planted | None = None

    @property
    def signs(self) -> tuple[str, ...]:
        return tuple(reason.sign for reason in self.reasons)

    @property
    def images(self) -> list[tuple[str, str]]:
        """Split and id of the own image, and of every other image that the finding names."""
        others = (self.better_image, self.better_caption, self.near_duplicate)
        return [(self.split, name) for name in (self.image, *(o.image for o in others if o))]


class Summary(Report):
    """What an audit of one split found, whatever the threshold of its list.

    ``suspicious`` counts captions with a suspicion of at least 0.5, ``signs`` their reasons.
    ``false_negatives`` counts captions with a near-duplicate at another image, which is no error.
    ``unknown_words`` counts different words outside the model's vocabulary, ``unknown_captions``
    those skipped captions that have no other words.
    """

    split: str
    images: int
    captions: int
    suspicious: int
    false_negatives: int
    false_negative_images: int
    share: float
    signs: dict[str, int]
    words_examined: int
    word_method: str
    score_median: float
    recall_at_1: float
    skipped_images: int
    skipped_captions: int
    unknown_captions: int
    unknown_words: int
    skipped: tuple[str, ...]
    notes: tuple[str, ...]

    def rows(self) -> list[tuple[str, str]]:
        """Name and number, for a table."""
        table: list[tuple[str, Any]] = [
            ("captions", self.captions),
            ("images", self.images),
            ("suspicious", f"{self.suspicious} ({100 * self.share:.1f} %)"),
            *((f"  {SIGN_NAMES[sign]}", count) for sign, count in self.signs.items()),
            ("own image ranked first", f"{100 * self.recall_at_1:.1f} %"),
            ("images skipped", self.skipped_images),
            ("captions skipped, no word known", self.unknown_captions),
        ]
        return [(name, str(value)) for name, value in table]

    def near_duplicate_rows(self) -> list[tuple[str, str]]:
        """Name and number, for a table of its own: near-duplicates are no suspicious captions."""
        share = self.false_negatives / max(1, self.captions)
        return [
            ("captions", f"{self.false_negatives} ({100 * share:.1f} %)"),
            ("images", str(self.false_negative_images)),
        ]


COLUMNS = (
    "kind",
    "split",
    "image",
    "caption",
    "text",
    "suspicion",
    "reasons",
    "wrong_words",
    "unknown_words",
    "score",
    "quantile",
    "rank",
    "compared",
    "margin",
    "correction",
    "better_caption",
    "better_image",
    "near_duplicate",
    "near_duplicate_images",
)


def to_jsonl(findings: Sequence[Finding]) -> str:
    """One finding a line, with everything that is known of it."""
    return "".join(f"{finding.to_json(indent=None)}\n" for finding in findings)


def to_csv(findings: Sequence[Finding]) -> str:
    """One finding a row, lists joined by semicolons.

    A text that a spreadsheet would take for a formula gets an apostrophe in front; the JSON lines
    have it as it is.
    """
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for finding in findings:
        row = _row(finding)
        writer.writerow([_harmless(row[column]) for column in COLUMNS])
    return buffer.getvalue()


def _row(finding: Finding) -> dict[str, Any]:
    correction, better = finding.correction, finding.better_caption
    near, image = finding.near_duplicate, finding.better_image
    return {
        **{name: getattr(finding, name) for name in ("kind", "split", "image", "caption", "text")},
        "suspicion": f"{finding.suspicion:.6g}",
        "reasons": ";".join(finding.signs),
        "wrong_words": ";".join(word.word for word in finding.wrong_words),
        "unknown_words": ";".join(word.word for word in finding.unknown_words),
        "score": f"{finding.score:.6g}",
        "quantile": f"{finding.quantile:.6g}",
        "rank": finding.rank,
        "compared": finding.compared,
        "margin": None if finding.margin is None else f"{finding.margin:.6g}",
        "correction": correction.text if correction else None,
        "better_caption": better.text if better else None,
        "better_image": image.image if image else None,
        "near_duplicate": near.text if near else None,
        "near_duplicate_images": finding.near_duplicate_images,
    }


def _harmless(value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith(FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def total(summaries: Sequence[Summary]) -> tuple[int, int]:
    """Suspicious captions, and captions, of all splits."""
    return sum(one.suspicious for one in summaries), sum(one.captions for one in summaries)


def skipped_images(summaries: Sequence[Summary], problems: Sequence[Problem] = ()) -> int:
    """Images that could not be used: those the model met, and those the data had lost before."""
    lost = sum(problem.kind in LOST_KINDS for problem in problems)
    return lost + sum(one.skipped_images for one in summaries)


def to_summary(
    summaries: Sequence[Summary], about: Mapping[str, Any], problems: Sequence[Problem] = ()
) -> str:
    """One JSON object: totals, what was audited with what, and the counts of each split."""
    suspicious, captions = total(summaries)
    tree = {
        **about,
        "captions": captions,
        "suspicious": suspicious,
        "share": suspicious / max(1, captions),
        "false_negatives": sum(one.false_negatives for one in summaries),
        "skipped_images": skipped_images(summaries, problems),
        "problems": count_kinds(list(problems)),
        "splits": [one.as_dict() for one in summaries],
    }
    return json.dumps(tree, ensure_ascii=False, indent=2) + "\n"
