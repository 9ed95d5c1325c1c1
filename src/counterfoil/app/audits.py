"""Findings of `counterfoil audit` on disk, as the page shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from counterfoil.audit.findings import SIGN_NAMES, Finding
from counterfoil.errors import DataError

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
        counts = Counter(sign for found in self.findings for sign in found.signs)
        self.reasons = [
            {"sign": sign, "name": SIGN_NAMES.get(sign, sign), "count": count}
            for sign, count in counts.most_common()
        ]

    def page(self, offset: int, limit: int, reason: str | None) -> dict[str, Any]:
        """Some findings, those with one reason where it is given."""
        chosen = [found for found in self.findings if reason is None or reason in found.signs]
        return {
            "total": len(chosen),
            "offset": offset,
            "reasons": self.reasons,
            "findings": chosen[offset : offset + limit],
        }


def _read(path: Path) -> Iterator[Finding]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield Finding.from_json(line)
                except DataError as error:
                    raise DataError(f"{path}: line {number}: {error}") from None
