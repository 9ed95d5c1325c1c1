"""Findings and summaries of an audit as plain data, written as JSON lines, CSV and JSON."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from counterfoil.core.errors import DataError
from counterfoil.core.storage.reading import LINES_BYTES, open_regular, read_lines
from counterfoil.data.formats.text_files import csv_row
from counterfoil.data.pairs import Problem, count_kinds
from counterfoil.data.text.words import STOP_WORDS, words
from counterfoil.evaluation.report import Report

Kind = Literal["mismatch", "false-negative"]
Sign = Literal[
    "low-score", "other-image", "other-caption", "neighbors", "wrong-words", "near-duplicate"
]

SIGN_NAMES: dict[str, str] = {
    "low-score": "low score",
    "other-image": "another image fits better",
    "other-caption": "another caption fits better",
    "neighbors": "captions of similar images differ",
    "wrong-words": "words that do not fit",
    "near-duplicate": "nearly the same caption elsewhere",
}

LINES = "findings.jsonl"
LOST_KINDS = ("unreadable-image", "missing-image", "missing-features")
FORMULA = ("=", "+", "-", "@", "\t", "\r")


class Reason(Report):
    """Why a caption is listed: a sign, its strength from 0 to 1, and a sentence with the facts."""

    sign: Sign
    strength: float
    text: str


class WrongWord(Report):
    """A word with a smaller effect on the score than it usually has.

    ``span`` is its position in the caption, ``suggestions`` are replacements, likeliest first.
    """

    word: str
    span: tuple[int, int]
    effect: float
    usual: float
    suggestions: tuple[str, ...] = ()


class UnknownWord(Report):
    """A word unknown to the model, and its position; it was removed before scoring."""

    word: str
    span: tuple[int, int]


class OtherImage(Report):
    """Another image of the split, and the caption's score with it."""

    image: str
    score: float


class OtherCaption(Report):
    """A caption of another image, and its score with this one or its similarity (duplicates)."""

    text: str
    image: str
    score: float


class Corrected(Report):
    """The corrected caption, with the scores before and after."""

    text: str
    before: float
    after: float
    changes: tuple[tuple[str, str], ...]


class Planted(Report):
    """A caption made wrong on purpose: the kind of error, and the original caption."""

    error: Literal["swapped", "words"]
    original: str


class Finding(Report):
    """A caption to check.

    ``caption`` is its number among the captions of ``image``; ``rank`` the rank of the image among
    ``compared`` images by their score with the caption (1 is best); ``margin`` the score minus that
    of the best other image; ``quantile`` the share of the split's captions with a lower score.
    ``planted`` is set if the error was made on purpose.
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
        """(split, id) of the own image and of every other image in the finding."""
        others = (self.better_image, self.better_caption, self.near_duplicate)
        return [(self.split, name) for name in (self.image, *(o.image for o in others if o))]


class Summary(Report):
    """Counts of an audit of one split.

    ``suspicious`` counts the listed captions, whose suspicion is at least ``threshold``, and
    ``signs`` their reasons.
    ``false_negatives`` counts captions with a near-duplicate at another image, which is no error.
    ``unknown_words`` counts distinct words outside the model's vocabulary, ``unknown_captions``
    the captions skipped because they have no other words.
    """

    split: str
    images: int
    captions: int
    threshold: float
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
        """(name, value) rows of a table."""
        table: list[tuple[str, Any]] = [
            ("captions", self.captions),
            ("images", self.images),
            ("suspicious", f"{self.suspicious} ({100 * self.share:.1f} %)"),
            *((f"  {SIGN_NAMES[sign]}", count) for sign, count in self.signs.items()),
            ("own image ranked first", f"{100 * self.recall_at_1:.1f} %"),
            ("images that could not be scored", self.skipped_images),
            ("captions skipped, no word known", self.unknown_captions),
        ]
        return [(name, str(value)) for name, value in table]

    def near_duplicate_rows(self) -> list[tuple[str, str]]:
        """(name, value) rows of the table of near-duplicates, which are not suspicious."""
        share = self.false_negatives / max(1, self.captions)
        return [
            ("captions", f"{self.false_negatives} ({100 * share:.1f} %)"),
            ("images", str(self.false_negative_images)),
        ]


FIRST_PAGE = 20
_PAGE_LIMITS = ((1, 2), (1, FIRST_PAGE), (FIRST_PAGE, FIRST_PAGE))
"""Most findings of the first page with the same image and with the same caption pattern: these, or
the next if too few findings differ."""


def caption_pattern(text: str) -> str:
    """A caption with a gap for each content word.

    >>> caption_pattern("A man's red dog sits on the beach.")
    "a _ 's _ _ _ on the _"
    """
    spoken = (word for word in words(text) if any(map(str.isalnum, word)))
    return " ".join(word if word in STOP_WORDS else "_" for word in spoken)


def diverse_first(findings: Sequence[Finding]) -> list[Finding]:
    """The findings with a diverse first page, otherwise in their order (by suspicion).

    The first 20 have one finding per image and at most two per caption pattern. If too few differ,
    the limit on patterns is dropped, then the one on images.
    """
    page: set[int] = set()
    images: Counter[tuple[str, str]] = Counter()
    patterns: Counter[str] = Counter()
    for most_image, most_pattern in _PAGE_LIMITS:
        for index, finding in enumerate(findings):
            if len(page) == FIRST_PAGE:
                break
            image, pattern = (finding.split, finding.image), caption_pattern(finding.text)
            fits = images[image] < most_image and patterns[pattern] < most_pattern
            if fits and index not in page:
                images[image] += 1
                patterns[pattern] += 1
                page.add(index)
    rest = (index for index in range(len(findings)) if index not in page)
    return [findings[index] for index in (*sorted(page), *rest)]


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
    """One finding per line, with all fields."""
    return "".join(f"{finding.to_json(indent=None)}\n" for finding in findings)


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The non-blank lines of a file, with their numbers."""
    try:
        with open_regular(path, LINES_BYTES) as file:
            for number, line in enumerate(read_lines(file, path), start=1):
                if text := line.decode("utf-8", "replace").strip():
                    yield number, text
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def read_findings(folder: Path, most: int | None = None) -> list[Finding]:
    """The findings of a report folder, or the first ``most`` of them."""
    path = folder / LINES
    if not path.is_file():
        raise DataError(
            f"{folder}: has no {LINES}; write one with: counterfoil audit RUN PAIRS --out {folder}"
        )
    findings: list[Finding] = []
    for number, line in numbered_lines(path):
        if most is not None and len(findings) >= most:
            break
        try:
            finding = Finding.from_json(line)
        except DataError as error:
            raise DataError(f"{path}: line {number}: {error}") from None
        if not _is_finite(finding.as_dict()):
            raise DataError(f"{path}: line {number}: damaged (a number is not finite)")
        findings.append(finding)
    return findings


def _is_finite(tree: object) -> bool:
    """Whether all numbers of a tree are finite, so that JSON can represent them."""
    if isinstance(tree, dict):
        return all(map(_is_finite, tree.values()))
    if isinstance(tree, (list, tuple)):
        return all(map(_is_finite, tree))
    return not isinstance(tree, float) or math.isfinite(tree)


def to_csv(findings: Sequence[Finding]) -> str:
    """One finding per row, lists joined by semicolons.

    A text that a spreadsheet would read as a formula gets a leading apostrophe.
    """
    lines = [csv_row(COLUMNS)]
    for finding in findings:
        row = _row(finding)
        lines.append(csv_row([_escape_formula(row[column]) for column in COLUMNS]))
    return "".join(lines)


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


def _escape_formula(value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith(FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def unescape_formula(text: str) -> str:
    """A text of `to_csv` as it was, without the apostrophe before a formula.

    >>> unescape_formula("'=1+1"), unescape_formula("'tis")
    ('=1+1', "'tis")
    """
    return text[1:] if text.startswith("'") and text[1:].startswith(FORMULA) else text


def total(summaries: Sequence[Summary]) -> tuple[int, int]:
    """Numbers of suspicious captions and of all captions over all splits."""
    return sum(summary.suspicious for summary in summaries), sum(
        summary.captions for summary in summaries
    )


MOST_DIGITS = 17
"""Digits that tell any two numbers in double precision apart."""


def threshold_text(summaries: Sequence[Summary]) -> str:
    """The threshold of suspicion, rounded; every one if it differs between splits.

    With a rate of false alarms, it is the smallest number above the measured threshold.
    """
    levels = sorted({summary.threshold for summary in summaries})
    return " or ".join(dict.fromkeys(map(level_text, levels)))


def level_text(level: float) -> str:
    """A suspicion with three digits, and more if it would be rounded to 1 otherwise.

    >>> level_text(0.30249), level_text(0.9995), level_text(1.0)
    ('0.302', '0.9995', '1')
    """
    digits = 3
    while digits < MOST_DIGITS and level < 1.0 == float(f"{level:.{digits}g}"):
        digits += 1
    return f"{level:.{digits}g}"


def skipped_images(summaries: Sequence[Summary], problems: Sequence[Problem] = ()) -> int:
    """Number of unusable images: unreadable for the model, or already missing in the data."""
    lost = sum(problem.kind in LOST_KINDS for problem in problems)
    return lost + sum(summary.skipped_images for summary in summaries)


def to_summary(
    summaries: Sequence[Summary], about: Mapping[str, Any], problems: Sequence[Problem] = ()
) -> str:
    """One JSON object: totals, ``about`` (model and data), and the counts of each split."""
    suspicious, captions = total(summaries)
    tree = {
        **about,
        "captions": captions,
        "suspicious": suspicious,
        "share": suspicious / max(1, captions),
        "false_negatives": sum(summary.false_negatives for summary in summaries),
        "skipped_images": skipped_images(summaries, problems),
        "problems": count_kinds(list(problems)),
        "splits": [summary.as_dict() for summary in summaries],
    }
    return json.dumps(tree, ensure_ascii=False, indent=2) + "\n"
