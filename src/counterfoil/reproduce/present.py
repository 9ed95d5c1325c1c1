"""Writes a reproduction as Markdown, JSON and pictures, and renders pages from stored results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from counterfoil.core.errors import DataError
from counterfoil.core.storage.atomic import write_atomically
from counterfoil.evaluation.report import markdown_table
from counterfoil.plots.charts import save_figure
from counterfoil.reproduce.artifact import METRICS
from counterfoil.reproduce.distributions import distribution_notes, distribution_rows
from counterfoil.reproduce.examples import sheet_markdown
from counterfoil.reproduce.grid import at_an_edge
from counterfoil.reproduce.plots import charts_of, write_charts
from counterfoil.reproduce.results import Reproduction, RowResult
from counterfoil.reproduce.spec import Claim
from counterfoil.reproduce.spread import Measure
from counterfoil.reproduce.store import read_stored
from counterfoil.reproduce.word_maps import pair_sections

CLAIM_HEADS = ("Claim", "ours, Δ RSUM", "95 % interval", "published Δ", "strength")
RSUM = METRICS[-1]


def claim_rows(result: Reproduction) -> list[tuple[str, ...]]:
    """A header, and per claim our difference and the published one; empty without claims."""
    rows = {row.name: row for row in result.rows}
    claims = [
        _claim_row(claim, rows[claim.better], rows[claim.worse], result.published_on)
        for claim in result.claims
        if claim.better in rows and claim.worse in rows
    ]
    return [CLAIM_HEADS, *claims] if claims else []


def difference(better: RowResult, worse: RowResult) -> Measure | None:
    """RSUM of one row minus that of another, over their common seeds; None without any."""
    first, second = _rsum_by_seed(better), _rsum_by_seed(worse)
    common = sorted(first.keys() & second.keys())
    return Measure.over([first[seed] - second[seed] for seed in common]) if common else None


CLAIM_SEEDS = 3
"""Seeds without which a claim counts as not tested."""


def verdict(ours: Measure | None, tuned: bool = True) -> str:
    """The strength of a claim: held, within the spread, refuted or not tested.

    A difference counts with three seeds or more, if it is larger than its standard deviation over
    them, and weakly if 0 is inside its 95 % interval. It decides a claim only if both rows were
    tuned.

    >>> verdict(Measure(mean=3.0, std=1.0, seeds=3)), verdict(Measure(mean=0.5, std=1.0, seeds=3))
    ('held', 'within the spread')
    >>> verdict(Measure(mean=-2.0, std=1.0, seeds=3))
    'refuted, weakly'
    >>> verdict(Measure(mean=3.0, std=1.0, seeds=3), tuned=False)
    'higher, but not tuned'
    >>> verdict(Measure(mean=3.0, std=None, seeds=1))
    'not tested: 1 seed'
    """
    if ours is None:
        return "not tested"
    if ours.seeds < CLAIM_SEEDS:
        return f"not tested: {ours.seeds} seed{'s' if ours.seeds > 1 else ''}"
    if ours.std is not None and abs(ours.mean) <= ours.std:
        return "within the spread"
    if not tuned:
        return f"{'higher' if ours.mean > 0 else 'lower'}, but not tuned"
    interval = ours.interval()
    weakly = ", weakly" if interval is not None and interval[0] <= 0 <= interval[1] else ""
    return f"{'held' if ours.mean > 0 else 'refuted'}{weakly}"


def _claim_row(
    claim: Claim, better: RowResult, worse: RowResult, published_on: str | None
) -> tuple[str, ...]:
    fair = better.swept == worse.swept or not (better.each and worse.each)
    ours = difference(better, worse) if fair else None
    first, second = (_find_published(row, RSUM, published_on) for row in (better, worse))
    theirs = None if first is None or second is None else first - second
    return (
        claim.text,
        "" if ours is None else ours.text(sign="+"),
        _interval(ours),
        "" if theirs is None else f"{theirs:+.1f}",
        verdict(ours, better.tuned and worse.tuned)
        if fair
        else "not tested: only one row is tuned",
    )


def _interval(ours: Measure | None) -> str:
    """The interval of a difference; empty below `CLAIM_SEEDS` seeds, where it says nothing."""
    interval = ours.interval() if ours is not None and ours.seeds >= CLAIM_SEEDS else None
    return "" if interval is None else "{:+.1f} to {:+.1f}".format(*interval)


def _rsum_by_seed(row: RowResult) -> dict[int, float]:
    return {one.seed: one.numbers[RSUM] for one in row.each if RSUM in one.numbers}


def _find_published(row: RowResult, metric: str, published_on: str | None) -> float | None:
    numbers = row.published.get(published_on or "")
    return numbers[METRICS.index(metric)] if numbers else None


HEADS = ("i→t R@1", "R@5", "R@10", "t→i R@1", "R@5", "R@10", "RSUM")


def write_reproduction(result: Reproduction, folder: Path) -> str:
    """Write Markdown, JSON and pictures to a folder; returns the Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = write_charts(result, folder)
    page = to_markdown(result, [path.name for path in pictures])
    write_atomically(folder / f"{result.name}.md", page)
    write_atomically(folder / f"{result.name}.json", result.to_json())
    return page


def to_markdown(result: Reproduction, pictures: Sequence[str] = ()) -> str:
    """Title, settings, and the `body`."""
    parts = [f"## {result.title}", "", f"{result.paper}.", "", _settings(result), ""]
    return "\n".join(parts) + "\n" + body(result, pictures)


def body(result: Reproduction, pictures: Sequence[str] = ()) -> str:
    """Table, claims, distributions, maps, notes, examples and pictures."""
    parts = [*markdown_table(_rows(result)), ""]
    claims = claim_rows(result)
    parts += [*markdown_table(claims), ""] if claims else []
    if result.distributions:
        parts += [*markdown_table(distribution_rows(result)), ""]
    parts += pair_sections(result)
    parts += [f"- {line}" for line in _notes(result)]
    parts += ["", *sheet_markdown(result.sheet)] if result.sheet is not None else []
    parts += ["", *(f"![{result.title}]({name})" for name in pictures)]
    return "\n".join(parts).rstrip() + "\n"


def _settings(result: Reproduction) -> str:
    seeds = f"{result.seeds} seed{'s' if result.seeds > 1 else ''}"
    data = "the drawn scenes" if result.data == "scenes" else result.data
    text = f"Ours: {data}, {result.scale} scale, {seeds}"
    if result.overrides:
        text += f", with `{' '.join(result.overrides)}`"
    return f"{text}."


def _choices(result: Reproduction) -> list[tuple[str, ...]]:
    """A sweep that chooses a value per run: one row per run, one column per value, best in bold."""
    runs = dict.fromkeys(row.label[0] for row in result.rows)
    values = sorted({row.value for row in result.rows if row.value is not None})
    table = [(result.columns[0], *(f"{value:g}" for value in values))]
    for run in runs:
        of_run = {row.value: row.numbers.get("rsum") for row in result.rows if row.label[0] == run}
        diverged = {row.value for row in result.rows if row.label[0] == run and row.diverged}
        most = max((number.mean for number in of_run.values() if number), default=None)
        if most is None:  # nothing of it has been run yet
            continue
        cells = []
        for value in values:
            number = of_run.get(value)
            text = number.text() if number else "diverged" if value in diverged else ""
            cells.append(f"**{text}**" if number and number.mean == most else text)
        table.append((_safe(run), *cells))
    return table


def _rows(result: Reproduction) -> list[tuple[str, ...]]:
    if result.kind == "sweep" and result.judged_on == "dev" and len(result.columns) > 1:
        return _choices(result)
    metrics = _metrics(result)
    heads = [_head(metric, metrics) for metric in metrics]
    more = [measure.title for measure in result.measures]
    speed = ("Kpps", "Kpps, matching alone", "× slowest") if result.kind == "scatter" else ()
    slowest = min((row.speed.kpps for row in result.rows if row.speed), default=1.0)
    table: list[tuple[str, ...]] = [(*result.columns, *heads, *more, *speed)]
    for row in result.rows:
        cells = [_cell(row, metric, result.published_on) for metric in metrics]
        cells += _measures(result, row)
        if row.diverged:
            cells[-1] = f"diverged {cells[-1]}".strip()
        elif row.errors and not row.numbers:
            cells[-1] = f"failed {cells[-1]}".strip()
        elif row.missing and not row.numbers:
            cells[-1] = f"not finished {cells[-1]}".strip()
        table.append((*map(_safe, row.label), *cells, *(_speed(row, slowest) if speed else ())))
    return table


def _cell(row: RowResult, metric: str, published_on: str | None) -> str:
    """``mean ± std (published)``, or the parts that exist."""
    return _both(row.numbers.get(metric), _find_published(row, metric, published_on))


def _both(ours: Measure | None, theirs: float | None, decimals: int = 1) -> str:
    cells = [ours.text(decimals)] if ours is not None else []
    cells += [f"({theirs:.{decimals}f})"] if theirs is not None else []
    return " ".join(cells)


def _metrics(result: Reproduction) -> list[str]:
    if result.kind == "sweep":
        return list(METRICS)
    return [METRICS[-1]] if result.kind in ("scatter", "curves") else result.metrics


def _head(metric: str, metrics: Sequence[str]) -> str:
    """The heading of a metric; R@5 and R@10 name the direction only without R@1 beside them."""
    title, (side, _, _) = HEADS[METRICS.index(metric)], metric.partition("_")
    if title.startswith("R@") and f"{side}_r1" not in metrics:
        return f"{side[0]}→{side[-1]} {title}"
    return title


def _measures(result: Reproduction, row: RowResult) -> list[str]:
    cells = []
    published = row.published_measures.get(result.published_on or "", [])
    for index, measure in enumerate(result.measures):
        theirs = published[index] if published else None
        cells.append(_both(row.numbers.get(measure.title), theirs, measure.decimals))
    return cells


def _speed(row: RowResult, slowest: float) -> tuple[str, ...]:
    if row.speed is None:
        return ("", "", "")
    speed = row.speed
    return (f"{speed.kpps:.3g}", f"{speed.matching_kpps:.3g}", f"{speed.kpps / slowest:.1f}")


def _notes(result: Reproduction) -> list[str]:
    notes = [result.note] if result.note else []
    if result.judged_on == "dev":
        notes.append("Recalls are on dev at the best epoch; the test split is not used.")
        if result.kind == "sweep" and len(result.columns) > 1:
            notes.append(f"RSUM by {result.x_label or result.key}; the best value per row is used.")
            edges = [f"{label} ({value:g})" for label, value in at_an_edge(result).items()]
            notes.append(f"Best at an edge of what was tried: {'; '.join(edges) or 'none'}.")
    if claim_rows(result):
        notes.append(
            "Δ: mean difference over seeds, with its 95 % interval by Student's t. A claim is held "
            "or refuted with three seeds or more, a difference beyond its standard deviation, and "
            "rates tuned for both rows; weakly, if the interval contains 0."
        )
        trained = [row for row in result.rows if row.each]
        others = [row.name for row in trained if not row.tuned]
        if 0 < len(others) < len(trained):
            notes.append(f"Not tuned, or tuned to an edge of what was tried: {'; '.join(others)}.")
    if any(result.published_on in _published(row) for row in result.rows):
        notes.append(f"In brackets: published numbers on {result.published_title}.")
        if not result.same_data:
            notes.append("Our runs use other data: compare rankings and differences, not values.")
    elif result.data != "scenes" and any(_published(row) for row in result.rows):
        notes.append("No published numbers were found for this data; choose them by --published.")
    if result.seeds > 1:
        notes.append("± is the standard deviation over seeds (n − 1).")
    measured = [row.speed for row in result.rows if row.speed]
    if measured:
        notes.append(
            f"Kpps: thousands of image-text pairs scored per second, including encoding, for "
            f"{measured[0].images} images × {measured[0].captions} captions ({measured[0].device})."
        )
    notes += distribution_notes(result)
    maps = [*result.maps, *(result.sheet.maps if result.sheet is not None else [])]
    notes += [one.note for one in maps if one.note]
    for plot in result.plots:
        if not plot.curves:
            notes.append(f"{plot.title}: no finished run logged '{plot.metric}'.")
    for row in result.rows:
        if row.note:
            notes.append(f"{row.name}: {row.note}")
        if row.missing and row.numbers:  # without numbers, the table says so
            # rows may have different numbers of seeds
            total = max(measure.seeds for measure in row.numbers.values()) + row.missing
            notes.append(f"{row.name}: {row.missing} of {total} seeds not finished.")
        notes += _fewer_seeds(row)
        notes += [f"{row.name}: failed: {error}" for error in dict.fromkeys(row.errors)]
    return [_safe(note) for note in notes]


def _fewer_seeds(row: RowResult) -> list[str]:
    """A note if some numbers of a row are over fewer seeds than the others."""
    most = max((measure.seeds for measure in row.numbers.values()), default=0)
    fewer: dict[int, list[str]] = {}
    for title, measure in row.numbers.items():
        if measure.seeds < most:
            fewer.setdefault(measure.seeds, []).append(title)
    return [
        f"{row.name}: over {seeds} of {most} seeds: {'; '.join(titles)}."
        for seeds, titles in sorted(fewer.items())
    ]


def _published(row: RowResult) -> set[str]:
    """Data sets for which a row has published numbers."""
    return {*row.published, *row.published_measures}


def _safe(text: str) -> str:
    """Text escaped for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


# Tables and pictures of a page are rendered from stored results, so that no number is typed by
# hand. They replace everything between two markers:
#
#     <!-- results: naaf.table1@lite2 -->
#     <!-- /results -->
#
# One section can show the claims of several files, by a pattern of their names:
#
#     <!-- claims: naaf.*@lite2 -->
#     <!-- /claims -->


SECTION_START = re.compile(r"^<!-- (results|claims): (\S+) -->$", re.MULTILINE)
NOT_RUN = "*Not run yet.*"


def pages_to_fill(path: Path) -> list[Path]:
    """A page, or the pages of a folder that have a section to fill."""
    if not path.is_dir():
        return [path]
    pages = [
        page for page in sorted(path.glob("*.md")) if SECTION_START.search(page.read_text("utf-8"))
    ]
    if not pages:
        raise DataError(f"{path}: no page has a '<!-- results: NAME -->' to fill")
    return pages


def fill_page(page: Path, store: Path) -> list[str]:
    """Render every section of a page, with its pictures; returns the names of the sections."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{page}: cannot be read: {error}") from None
    sections = list(dict.fromkeys(SECTION_START.findall(text)))
    if not sections:
        raise DataError(f"{page}: has no '<!-- results: NAME -->' to fill")
    for kind, name in sections:
        if kind == "claims":
            section = _claims(store, name)
        else:
            section = _section(read_stored(store / f"{name}.json"), name, page)
        text = _replaced(text, kind, name, section, page)
    write_atomically(page, text)
    return [name for _, name in sections]


def _replaced(text: str, kind: str, name: str, section: str, page: Path) -> str:
    opening, closing = f"<!-- {kind}: {name} -->", f"<!-- /{kind} -->"
    start = text.index(opening) + len(opening)
    end = text.find(closing, start)
    following = SECTION_START.search(text, start)
    if end < 0 or (following is not None and following.start() < end):
        raise DataError(f"{page}: the section '{name}' has no end; add '{closing}'")
    return f"{text[:start]}\n{section}\n{text[end:]}"


def _claims(store: Path, pattern: str) -> str:
    """One table with the claims of several files."""
    stored = [read_stored(path) for path in sorted(store.glob(f"{pattern}.json"))]
    rows = [
        (result.name, *row)
        for result in stored
        if result is not None
        for row in claim_rows(result)[1:]
        if row[-1]
    ]
    return "\n".join(markdown_table([("Table", *CLAIM_HEADS), *rows])) if rows else NOT_RUN


def _section(result: Reproduction | None, name: str, page: Path) -> str:
    if result is None or not any(row.numbers for row in result.rows):
        return NOT_RUN
    return body(result, _pictures(result, name, page)).strip()


def _pictures(result: Reproduction, name: str, page: Path) -> list[str]:
    """Write the pictures to a folder named after the page; returns their relative paths."""
    folder = page.with_suffix("")
    written = []
    for chart in charts_of(result):
        path = folder / f"{name}-{chart.name}.svg"
        save_figure(chart.draw(), path)
        written.append(f"{folder.name}/{path.name}")
    return written
