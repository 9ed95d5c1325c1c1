"""Sweeps that do not end at an edge: a line whose best value is its outermost gets one more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from counterfoil.reproduce.artifact import METRICS, Line, Sweep
from counterfoil.reproduce.results import Reproduction, RowResult

Side = Literal["below", "above"]
RSUM = METRICS[-1]


def edge(rows: Sequence[RowResult]) -> Side | None:
    """The side on which the best value of one line is the last that was tried; else None.

    A value whose run failed counts as tried: a rate that diverges is no reason to try larger ones.
    """
    ran = [row for row in rows if row.each or row.errors or row.diverged]
    tried = [row.value for row in ran if row.value is not None]
    best = best_value(rows)
    if best is None or len(tried) < 2:
        return None
    return "below" if best == min(tried) else "above" if best == max(tried) else None


def best_value(rows: Sequence[RowResult]) -> float | None:
    """The value with the highest RSUM; of equal ones, the smallest."""
    scores = [
        (row.numbers[RSUM].mean, -row.value)
        for row in rows
        if row.value is not None and RSUM in row.numbers
    ]
    return -max(scores)[1] if scores else None


def value_beyond(values: Sequence[float], side: Side, log: bool) -> float | None:
    """The next value by the ratio of the two outermost ones, or by their difference.

    None if there is none: whole numbers stay whole, and no value crosses zero.

    >>> value_beyond([0.002, 0.004, 0.008], "above", log=True)
    0.016
    >>> value_beyond([1, 3, 5], "below", log=False) is None
    True
    """
    ordered = sorted(values, reverse=side == "below")
    before, last = ordered[-2:]
    if log and before > 0 and last > 0:
        beyond = float(f"{last * last / before:.3g}")
    else:
        beyond = float(f"{2 * last - before:.6g}")
        if beyond < 0 <= last:
            return None
    return int(beyond) if all(isinstance(value, int) for value in values) else beyond


def latest(stored: Reproduction, now: Reproduction) -> Reproduction:
    """The stored rows that have numbers, and of the others what this call says of them."""
    known = {tuple(row.label): row for row in stored.rows if row.each or row.diverged}
    rows = [known.pop(tuple(row.label), row) for row in now.rows]
    return now.model_copy(update={"rows": [*rows, *known.values()]})


def of_line(result: Reproduction, line: Line) -> list[RowResult]:
    """The rows of one line, whatever their values."""
    return [row for row in result.rows if row.varied_run == line.run and row.value is not None]


def with_tried(sweep: Sweep, stored: Reproduction | None) -> Sweep:
    """The sweep with the further values that a stored result of it has."""
    if stored is None or stored.key != sweep.key:
        return sweep
    lines = [
        _with(line, [row.value for row in of_line(stored, line)], sweep) for line in sweep.lines
    ]
    return sweep.model_copy(update={"lines": lines})


def widened(sweep: Sweep, result: Reproduction) -> Sweep | None:
    """The sweep with one more value for each line whose best one is at an edge; None without any.

    A line is left alone while one of its runs is not finished, or when it has as many further
    values as ``beyond`` allows.
    """
    lines = [_wider(sweep, line, result) for line in sweep.lines]
    return sweep.model_copy(update={"lines": lines}) if lines != sweep.lines else None


def _wider(sweep: Sweep, line: Line, result: Reproduction) -> Line:
    rows = of_line(result, line)
    if any(row.missing for row in rows):
        return line
    beyond = next_value(sweep, line, rows)
    return line if beyond is None else _with(line, [beyond], sweep)


def next_value(sweep: Sweep, line: Line, rows: Sequence[RowResult]) -> float | None:
    """The value next to a best one that is at an edge of what was tried; None if it is inside.

    This is a value of the grid that was left out, or one beyond it, as far as ``beyond`` allows.
    """
    side, best = edge(rows), best_value(rows)
    if side is None or best is None:
        return None
    tried = {row.value for row in rows if row.value is not None}  # by other calls, too
    values = sorted({*sweep.values_of(line), *tried}, reverse=side == "below")
    further = values[values.index(best) + 1 :]
    if further:
        return further[0]
    beyond = [value for value in values if value not in sweep.values]
    return None if len(beyond) >= sweep.beyond else value_beyond(values, side, sweep.log)


def with_value(sweep: Sweep, run: str, value: float) -> Sweep:
    """The sweep in which the line of ``run`` has this value, too."""
    lines = [_with(line, [value], sweep) if line.run == run else line for line in sweep.lines]
    return sweep.model_copy(update={"lines": lines})


def _with(line: Line, values: Sequence[float | None], sweep: Sweep) -> Line:
    whole = all(isinstance(value, int) for value in sweep.values)
    new = {value for value in values if value is not None and value not in sweep.values}
    more = {int(value) if whole else value for value in new}
    return line.model_copy(update={"values": sorted({*line.values, *more})})


def ends_at_edge(rows: Sequence[RowResult]) -> bool:
    """Whether the best value of a line is the last or only one, so that a better may lie beyond.

    No epochs, no decay: nothing lies below 0.
    """
    if sum(bool(row.each) for row in rows) == 1:
        return True
    side = edge(rows)
    return side == "above" or (side == "below" and best_value(rows) != 0)


def at_an_edge(result: Reproduction) -> dict[str, float]:
    """By the label of each line whose best value is at an edge, that value."""
    lines: dict[str, list[RowResult]] = {}
    for row in result.rows:
        lines.setdefault(", ".join(row.label[:-1]), []).append(row)
    best = {label: best_value(rows) for label, rows in lines.items()}
    return {
        label: value
        for label, value in best.items()
        if value is not None and ends_at_edge(lines[label])
    }
