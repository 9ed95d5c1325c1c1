"""Findings for programs: JSON lines, CSV and the summary."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from counterfoil.audit.findings import Finding, Summary
from counterfoil.data.problems import Problem, count_kinds

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
LOST = ("unreadable-image", "missing-image", "missing-features")
FORMULA = ("=", "+", "-", "@", "\t", "\r")


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
    lost = sum(problem.kind in LOST for problem in problems)
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
