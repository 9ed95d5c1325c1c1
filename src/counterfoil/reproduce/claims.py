"""What a paper says is better than what, beside the same difference of ours."""

from __future__ import annotations

from counterfoil.reproduce.artefact import METRICS
from counterfoil.reproduce.results import Found, Measure, Reproduction, StatedClaim

HEADS = ("Claim", "ours, Δ RSUM", "published Δ", "held")
RSUM = METRICS[-1]


def claim_rows(found: Reproduction) -> list[tuple[str, ...]]:
    """A header and a row for each claim about rows that are there; nothing where there is none."""
    rows = {row.name: row for row in found.rows}
    told = [
        _row(claim, rows[claim.better], rows[claim.worse], found.published_on)
        for claim in found.claims
        if claim.better in rows and claim.worse in rows
    ]
    return [HEADS, *told] if told else []


def difference(better: Found, worse: Found) -> Measure | None:
    """RSUM of one row less that of another, seed by seed where both have the seed."""
    first, second = _by_seed(better), _by_seed(worse)
    common = sorted(first.keys() & second.keys())
    if not common:
        return None
    return Measure.over([first[seed] - second[seed] for seed in common])


def verdict(ours: Measure | None) -> str:
    """Whether a difference is there, and whether it is more than seeds differ by themselves.

    >>> verdict(Measure(mean=3.0, std=1.0, seeds=3)), verdict(Measure(mean=0.5, std=1.0, seeds=3))
    ('yes', 'within the spread')
    >>> verdict(Measure(mean=3.0, std=None, seeds=1))
    'yes, with one seed'
    """
    if ours is None:
        return ""
    if ours.std is not None and abs(ours.mean) <= ours.std:
        return "within the spread"
    held = "yes" if ours.mean > 0 else "no"
    return held if ours.seeds > 1 else f"{held}, with one seed"


def _row(
    claim: StatedClaim, better: Found, worse: Found, published_on: str | None
) -> tuple[str, ...]:
    ours = difference(better, worse)
    first, second = (_published(row, published_on or "") for row in (better, worse))
    theirs = None if first is None or second is None else first - second
    return (
        claim.text,
        "" if ours is None else _signed(ours),
        "" if theirs is None else f"{theirs:+.1f}",
        verdict(ours),
    )


def _signed(measure: Measure) -> str:
    spread = "" if measure.std is None else f" ± {measure.std:.1f}"
    return f"{measure.mean:+.1f}{spread}"


def _by_seed(row: Found) -> dict[int, float]:
    return {one.seed: one.numbers[RSUM] for one in row.each if RSUM in one.numbers}


def _published(row: Found, data: str) -> float | None:
    numbers = row.published.get(data)
    return numbers[-1] if numbers else None
