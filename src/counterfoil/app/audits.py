"""Findings of `counterfoil audit` on disk, as the page shows them."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from counterfoil.audit.findings import SIGN_NAMES, Finding
from counterfoil.audit.report import SUMMARY
from counterfoil.errors import DataError
from counterfoil.reading import read_text

FINDINGS = "findings.jsonl"
MOST = 50_000
"""Findings that are read; they come most suspicious first."""


class Audit:
    """The findings of a folder, read once."""

    def __init__(self, folder: Path) -> None:
        path = folder / FINDINGS
        if not path.is_file():
            raise DataError(
                f"{folder}: no {FINDINGS} there; write one with: counterfoil audit RUN PAIRS "
                f"--out {folder}"
            )
        self.findings = list(islice(_read(path), MOST))
        self.notes = _notes(folder / SUMMARY)
        self._by_reason: dict[str, list[Finding]] = defaultdict(list)
        for found in self.findings:
            for sign in dict.fromkeys(found.signs):
                self._by_reason[sign].append(found)
        counts = Counter({sign: len(found) for sign, found in self._by_reason.items()})
        self.reasons = [
            {"sign": sign, "name": SIGN_NAMES.get(sign, sign), "count": count}
            for sign, count in counts.most_common()
        ]

    def page(self, offset: int, limit: int, reason: str | None) -> dict[str, Any]:
        """Some findings, those with one reason where it is given."""
        chosen = self.findings if reason is None else self._by_reason.get(reason, [])
        return {
            "total": len(chosen),
            "offset": offset,
            "reasons": self.reasons,
            "notes": self.notes,
            "findings": chosen[offset : offset + limit],
        }


def _notes(path: Path) -> list[str]:
    """What the audit says of itself as a whole; nothing if there is no summary to read."""
    try:
        notes = json.loads(read_text(path))["notes"]
    except (OSError, ValueError, KeyError, TypeError, DataError):
        return []
    return [str(note) for note in notes] if isinstance(notes, list) else []


def _read(path: Path) -> Iterator[Finding]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield Finding.from_json(line)
                except DataError as error:
                    raise DataError(f"{path}: line {number}: {error}") from None
