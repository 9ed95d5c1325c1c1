"""Merge the decisions of several reviewers: agreement, conflicts, nothing lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
    """A caption with different decisions; ``chosen`` is the one that ``prefer`` selected.

    ``theirs`` is a decision of the merged log, ``mine`` one that differs from it.
    """

    mine: Decision
    theirs: Decision
    chosen: Decision | None


class Merged(Report):
    """What merging one log added.

    ``added`` decisions are new here, ``present`` ones were merged before. ``unknown`` ones are
    about captions that are not among the findings; they are stored, too. ``withdrawn`` ones were
    merged before, and their reviewer has taken them back since. ``conflicts`` are on
    captions that the merged log decides, also if they were merged before. ``remaining`` counts
    all conflicts that are still open, also with other reviewers.
    """

    source: str
    added: int
    present: int
    unknown: int
    withdrawn: int
    damaged: int
    agreement: Agreement
    conflicts: tuple[Conflict, ...]
    remaining: int


def merge_log(
    log: DecisionLog, other: Path, findings: Sequence[Finding], prefer: Prefer = "none"
) -> Merged:
    """Add the decisions of another log; conflicts stay open unless ``prefer`` chooses.

    Decisions that were merged before and are taken back there are taken back here.
    The agreement compares decisions of different reviewers that were made independently, before
    one log was merged into the other, so merging again gives the same numbers.
    """
    theirs = _open_other(other)
    undone = _undone(log, theirs)
    if undone:
        log.append(*undone)
    mine, yours = Review.of(log, findings), Review.of(theirs, findings)
    stored = log.standings()
    pairs: list[tuple[Decision, Decision]] = []
    new: list[Decision] = []
    votes: dict[CaptionKey, list[Decision]] = {}
    for key, standing in _all_standings(yours):
        own = mine.standings.get(key) or stored.get(key, Standing())
        pairs += _comparable(own, standing)
        # An earlier decision may be stored under another number of the same caption.
        target = own.decision.key if own.decision is not None else key
        votes.setdefault(target, []).extend(standing.votes)
        new += [
            vote.model_copy(update={**target._asdict(), "merged": True})
            for vote in standing.votes
            if vote.identity not in log.identities
        ]
    if new:
        log.append(*new)
    conflicts = list(_conflicts(log.standings(), votes, prefer))
    chosen = [one.chosen for one in conflicts if one.chosen is not None]
    if chosen:  # they count as decisions made with knowledge of both
        log.append(*(one.model_copy(update={"merged": False}) for one in chosen))
    return Merged(
        source=str(other),
        added=len(new),
        present=sum(map(len, votes.values())) - len(new),
        unknown=len(yours.unknown),
        withdrawn=len(undone),
        damaged=theirs.damaged,
        agreement=Agreement.of(pairs),
        conflicts=tuple(conflicts),
        remaining=sum(bool(one.rivals) for one in log.standings().values()),
    )


def _undone(log: DecisionLog, theirs: DecisionLog) -> list[Decision]:
    """Takes back the decisions of a log that were taken back in another one."""
    active = log.active()
    withdrawn = {one.identity: one for one in theirs.withdrawn() if one.identity in active}
    changes = {"action": "undo", "correction": None, "merged": True}
    return [
        one.model_copy(update={**active[identity]._asdict(), **changes})
        for identity, one in withdrawn.items()
    ]


def _comparable(mine: Standing, theirs: Standing) -> list[tuple[Decision, Decision]]:
    """The pair of independent decisions of two reviewers, if there is one."""
    one, other = mine.independent, theirs.independent
    if other is None and theirs.decision is not None and theirs.decision.merged:
        other = theirs.decision  # their log collects those of others
    if one is None or other is None or one.is_by_reviewer_of(other):
        return []
    return [] if one.identity == other.identity else [(one, other)]


def _conflicts(
    standings: Mapping[CaptionKey, Standing],
    votes: Mapping[CaptionKey, Sequence[Decision]],
    prefer: Prefer,
) -> Iterator[Conflict]:
    """The conflicts on captions that the merged log has ``votes`` on."""
    for key, merged in votes.items():
        standing = standings.get(key, Standing())
        if standing.decision is None or not standing.rivals:
            continue
        identities = {vote.identity for vote in merged}
        mine, theirs = standing.decision, standing.rivals[0]
        their_rivals = [one for one in standing.rivals if one.identity in identities]
        if their_rivals:
            theirs = their_rivals[0]
        elif mine.identity in identities:
            mine, theirs = theirs, mine
        chosen = {
            "none": None,
            "mine": mine,
            "theirs": theirs,
            "latest": max(standing.votes, key=lambda one: one.time),
        }[prefer]
        yield Conflict(mine=mine, theirs=theirs, chosen=chosen)


def _all_standings(review: Review) -> Iterator[tuple[CaptionKey, Standing]]:
    yield from review.standings.items()
    for standing in review.unknown:
        if standing.decision is not None:
            yield standing.decision.key, standing


def _open_other(path: Path) -> DecisionLog:
    target = path / LOG if path.is_dir() else path
    if not target.exists():
        raise DataError(f"{target}: no such file; give an audit folder or its {LOG}")
    log = DecisionLog(target)
    if log.damaged and not log.identities:
        raise DataError(f"{target}: none of its lines is a decision; expected a {LOG}")
    return log
