"""Writing an audit: a page for people, and files for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from counterfoil.audit.audit import Audit
from counterfoil.audit.details import writable
from counterfoil.audit.findings import Finding
from counterfoil.audit.page import render
from counterfoil.audit.tables import to_csv, to_jsonl, to_summary
from counterfoil.data.pairs import Split
from counterfoil.data.problems import Problem, Severity
from counterfoil.files import write_atomically
from counterfoil.search.references import as_json

PAGE, LINES, TABLE, SUMMARY = "index.html", "findings.jsonl", "findings.csv", "summary.json"
IMAGES = "images.jsonl"


def write_report(
    folder: Path,
    title: str,
    audits: Sequence[Audit],
    about: Mapping[str, Any],
    *,
    details: int = 500,
    notes: Sequence[str] = (),
    problems: Sequence[Problem] = (),
) -> Path:
    """Write the page, the findings and the summary of one audit a split; the page's path.

    ``about`` goes into the summary as it is: which model, which data. The page shows the first
    ``details`` findings, the other files have all. ``problems`` are those of the data set; what it
    left out is counted.
    """
    summaries = [audit.summary for audit in audits]
    findings = [finding for audit in audits for finding in audit.findings]
    findings.sort(key=lambda finding: (finding.kind != "mismatch", -finding.suspicion))
    splits = {audit.split.name: audit.split for audit in audits}
    lost = _left_out(problems, list(splits))
    listed = {
        "threshold": max(audit.threshold for audit in audits),
        "captions": sum(audit.listed for audit in audits),
    }
    page = render(title, summaries, findings, splits, details, notes, lost)
    write_atomically(folder / LINES, to_jsonl(findings))
    write_atomically(folder / IMAGES, _image_lines(findings, splits))
    write_atomically(folder / TABLE, to_csv(findings))
    facts = {**about, "listed": listed, "notes": list(notes)}
    write_atomically(folder / SUMMARY, to_summary(summaries, facts, lost))
    write_atomically(folder / PAGE, page)
    return folder / PAGE


def _image_lines(findings: Sequence[Finding], splits: Mapping[str, Split]) -> str:
    """Captions of each image that a finding names, and where its pixels are, one image a line.

    `counterfoil serve` finds pictures by it, whatever images its index holds.
    """
    places = {
        name: {image: place for place, image in enumerate(split.ids)}
        for name, split in splits.items()
    }
    lines = []
    for name, image in dict.fromkeys(key for found in findings for key in found.images):
        split, place = splits[name], places[name][image]
        pixels = as_json(split.pixels[place]) if split.pixels is not None else None
        captions = [writable(text) for text in split.captions[place]]
        line = {"split": name, "id": image, "captions": captions, "pixels": pixels}
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines)


def _left_out(problems: Sequence[Problem], splits: Sequence[str]) -> list[Problem]:
    """What was left out of these splits, or of a split that is not named."""
    return [
        problem
        for problem in problems
        if problem.severity is Severity.SKIP
        and (problem.kind != "unreadable-image" or problem.where.split("/")[0] in splits)
    ]
