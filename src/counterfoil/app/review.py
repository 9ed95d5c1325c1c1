"""The review of a served audit: decisions on its findings, and the corrected copy of its data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Literal

from counterfoil.app.problems import Problem
from counterfoil.audit.corrected import CORRECTED, export_corrected
from counterfoil.audit.decisions import (
    Action,
    CaptionKey,
    Decision,
    DecisionLog,
    Review,
    Standing,
    key_of,
)
from counterfoil.audit.findings import Finding
from counterfoil.core.storage.reading import open_regular

State = Literal["open", "decided", "all"]


class AuditReview:
    """Decisions on the findings of a report folder; other processes may decide there, too."""

    def __init__(self, folder: Path, findings: Sequence[Finding], cache: Path | None) -> None:
        self.folder, self.findings, self.cache = folder, findings, cache
        self.log = DecisionLog(folder)
        self._keys = {(key := key_of(finding)).digest: key for finding in findings}
        self._lock = Lock()
        self._reviewed: tuple[int, Review] | None = None

    def current(self) -> Review:
        """The decisions, with those that others have stored since the last call."""
        self.log.refresh()
        with self._lock:
            version = self.log.version
            if self._reviewed is None or self._reviewed[0] != version:
                self._reviewed = (version, Review.of(self.log, self.findings))
            return self._reviewed[1]

    def decide(
        self, name: str, action: Action, correction: str | None, reviewer: str
    ) -> dict[str, Any]:
        """Store a decision on the finding with this key; what stands afterwards."""
        key = self._keys.get(name)
        if key is None:
            raise Problem(404, "no finding has this key; the audit may have been written again")
        if action == "undo":
            self._check_undo(key, reviewer)
        try:
            self.log.append(Decision.on(key, action, reviewer, correction))
        except OSError as error:
            raise Problem(507, f"the decision cannot be stored ({error.strerror})") from None
        review = self.current()
        standing = review.standings.get(key, Standing())
        return {"key": name, **described(standing), "review": review.counts()}

    def _check_undo(self, key: CaptionKey, reviewer: str) -> None:
        decision = self.current().standings.get(key, Standing()).decision
        if decision is None:
            raise Problem(409, "there is no decision to undo")
        if decision.reviewer != reviewer:
            raise Problem(
                409, f"the last decision is by {decision.reviewer}; decide again to change it"
            )
        if decision.merged or not self.log.can_undo(key, reviewer):
            raise Problem(409, "the decision was not made here; decide again to change it")

    def export(self) -> dict[str, Any]:
        """Write the corrected copy into the report folder; the names of its files."""
        out = self.folder / CORRECTED
        try:
            out.mkdir(exist_ok=True)
            exported = export_corrected(self.folder, out, cache=self.cache, overwrite=True)
        except OSError as error:
            raise Problem(507, f"the copy cannot be stored ({error.strerror})") from None
        names = [Path(file).name for file in (*exported.files, exported.diff)]
        return {**exported.as_dict(), "folder": f"{self.folder.name}/{CORRECTED}", "files": names}

    def open_corrected(self, name: str) -> BinaryIO:
        """A file of the last export; the name is looked up, never used as a path."""
        out = self.folder / CORRECTED
        files = {file.name: file for file in out.iterdir()} if out.is_dir() else {}
        path = files.get(name)
        if path is None or name.startswith(".") or path.is_symlink() or not path.is_file():
            raise Problem(404, "no such file; export first")
        return open_regular(path)


def described(standing: Standing) -> dict[str, Any]:
    votes = [_info(one) for one in standing.votes]
    return {"decision": votes[0] if votes else None, "rivals": votes[1:]}


def _info(decision: Decision) -> dict[str, Any]:
    fields = ("action", "correction", "reviewer", "time")
    return {name: getattr(decision, name) for name in fields}
