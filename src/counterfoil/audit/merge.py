"""Merge the decisions of several reviewers: agreement, conflicts, nothing lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from counterfoil.audit.decisions import LOG, CaptionKey, Decision, DecisionLog, Review, Standing
from counterfoil.audit.findings import Finding
from counterfoil.core.errors import DataError
from counterfoil.evaluation.report import Report

Prefer = Literal["none", "mine", "theirs", "latest"]


class Agreement(Report):
    """How two reviewers agree on the findings that both decided.

    ``share`` and Cohen's ``kappa`` compare keep, fix and discard; None if they are not defined.
    ``corrections_differ`` counts findings that both fixed, but differently.
    """

    both: int
    same: int
    share: float | None
    kappa: float | None
    corrections_differ: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[Decision, Decision]]) -> Agreement:
        actions = [(one.outcome[0], other.outcome[0]) for one, other in pairs]
        same = sum(one == other for one, other in actions)
        differing = sum(
            one.outcome != other.outcome and one.outcome[0] == other.outcome[0]
            for one, other in pairs
        )
        share = same / len(pairs) if pairs else None
        return cls(
            both=len(pairs),
            same=same,
            share=share,
            kappa=cohen_kappa(actions),
            corrections_differ=differing,
        )


def cohen_kappa(pairs: Sequence[tuple[str, str]]) -> float | None:
    """Agreement beyond chance (Cohen 1960); None if chance alone makes two raters agree.

    >>> cohen_kappa([("keep", "keep"), ("fix", "fix"), ("fix", "keep"), ("keep", "keep")])
    0.5
    """
    if not pairs:
        return None
    count = len(pairs)
    mine, theirs = (Counter(pair[side] for pair in pairs) for side in (0, 1))
    chance = sum(mine[name] * theirs[name] for name in mine) / count**2
    observed = sum(one == other for one, other in pairs) / count
    return None if chance == 1 else (observed - chance) / (1 - chance)


class Conflict(Report):
    """A caption with different decisions; ``chosen`` is the one that --prefer selected."""

    mine: Decision
    theirs: Decision
    chosen: Decision | None


class Merged(Report):
    """What merging one log added.

    ``added`` decisions are new here, ``present`` ones were merged before. ``unknown`` ones are
    about captions that are not among the findings; they are stored, too.
    """

    source: str
    added: int
    present: int
    unknown: int
    damaged: int
    agreement: Agreement
    conflicts: tuple[Conflict, ...]


def merge_log(
    log: DecisionLog, other: Path, findings: Sequence[Finding], prefer: Prefer = "none"
) -> Merged:
    """Add the decisions of another log; conflicts stay open unless ``prefer`` chooses."""
    theirs = _open_other(other)
    mine, yours = Review.of(log, findings), Review.of(theirs, findings)
    pairs, conflicts = [], []
    new: list[Decision] = []
    present = 0
    for key, standing in _all_standings(yours):
        own = mine.standings.get(key, log.standings().get(key, Standing()))
        one, two = own.final, standing.final
        if one is not None and two is not None:
            pairs.append((one, two))
        for vote in standing.votes:
            if vote.identity in log.identities:
                present += 1
                continue
            added = vote.model_copy(update={**key._asdict(), "merged": True})
            new.append(added)
            if own.decision is not None and own.after(added) is not own:
                chosen = _choose(own.decision, added, prefer)
                conflicts.append(Conflict(mine=own.decision, theirs=added, chosen=chosen))
            own = own.after(added)
    # Resolutions last: they count as decisions made with knowledge of both.
    chosen_ones = [one.chosen for one in conflicts if one.chosen is not None]
    if new:
        log.append(*new, *(one.model_copy(update={"merged": False}) for one in chosen_ones))
    return Merged(
        source=str(other),
        added=len(new),
        present=present,
        unknown=len(yours.unknown),
        damaged=theirs.damaged,
        agreement=Agreement.of(pairs),
        conflicts=tuple(conflicts),
    )


def _all_standings(review: Review) -> Iterator[tuple[CaptionKey, Standing]]:
    yield from review.standings.items()
    for standing in review.unknown:
        if standing.decision is not None:
            yield standing.decision.key, standing


def _choose(mine: Decision, theirs: Decision, prefer: Prefer) -> Decision | None:
    if prefer == "latest":
        return theirs if theirs.time > mine.time else mine
    return {"mine": mine, "theirs": theirs}.get(prefer)


def _open_other(path: Path) -> DecisionLog:
    target = path / LOG if path.is_dir() else path
    if not target.exists():
        raise DataError(f"{target}: no such file; give an audit folder or its {LOG}")
    log = DecisionLog(target)
    if log.damaged and not log.identities:
        raise DataError(f"{target}: none of its lines is a decision; expected a {LOG}")
    return log
