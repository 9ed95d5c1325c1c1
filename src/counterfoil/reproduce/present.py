"""A reproduction as Markdown, JSON and pictures, and pages filled from the store."""

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
from counterfoil.reproduce.plots import charts_of, write_charts
from counterfoil.reproduce.results import Measure, Reproduction, RowResult, StatedClaim
from counterfoil.reproduce.store import read_stored
from counterfoil.reproduce.word_maps import pair_sections

CLAIM_HEADS = ("Claim", "ours, Δ RSUM", "published Δ", "held")
RSUM = METRICS[-1]


# Claims: what a paper says is better than what, beside the same difference of ours.
def claim_rows(found: Reproduction) -> list[tuple[str, ...]]:
    """A header and a row for each claim about rows that are there; nothing where there is none."""
    rows = {row.name: row for row in found.rows}
    told = [
        _row(claim, rows[claim.better], rows[claim.worse], found.published_on)
        for claim in found.claims
        if claim.better in rows and claim.worse in rows
    ]
    return [CLAIM_HEADS, *told] if told else []


def difference(better: RowResult, worse: RowResult) -> Measure | None:
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
    claim: StatedClaim, better: RowResult, worse: RowResult, published_on: str | None
) -> tuple[str, ...]:
    ours = difference(better, worse)
    first, second = (_published_sum(row, published_on or "") for row in (better, worse))
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


def _by_seed(row: RowResult) -> dict[int, float]:
    return {one.seed: one.numbers[RSUM] for one in row.each if RSUM in one.numbers}


def _published_sum(row: RowResult, data: str) -> float | None:
    numbers = row.published.get(data)
    return numbers[-1] if numbers else None


HEADS = ("i→t R@1", "R@5", "R@10", "t→i R@1", "R@5", "R@10", "RSUM")


def write_reproduction(found: Reproduction, folder: Path) -> str:
    """Write everything into a folder; the Markdown, for printing."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = write_charts(found, folder)
    page = to_markdown(found, [path.name for path in pictures])
    write_atomically(folder / f"{found.name}.md", page)
    write_atomically(folder / f"{found.name}.json", found.to_json())
    return page


def to_markdown(found: Reproduction, pictures: Sequence[str] = ()) -> str:
    """Title, how it was made, the table, what the numbers are, what went wrong."""
    parts = [f"## {found.title}", "", f"{found.paper}.", "", _how(found), ""]
    return "\n".join(parts) + "\n" + body(found, pictures)


def body(found: Reproduction, pictures: Sequence[str] = ()) -> str:
    """The table, the claims it bears out or does not, what the numbers are, what went wrong."""
    parts = [*markdown_table(_rows(found)), ""]
    claims = claim_rows(found)
    parts += [*markdown_table(claims), ""] if claims else []
    if found.distributions:
        parts += [*markdown_table(distribution_rows(found)), ""]
    parts += pair_sections(found)
    parts += [f"- {line}" for line in _notes(found)]
    parts += ["", *sheet_markdown(found.sheet)] if found.sheet is not None else []
    parts += ["", *(f"![{found.title}]({name})" for name in pictures)]
    return "\n".join(parts).rstrip() + "\n"


def _how(found: Reproduction) -> str:
    seeds = f"{found.seeds} seed{'s' if found.seeds > 1 else ''}"
    data = "the drawn scenes" if found.data == "scenes" else found.data
    text = f"Ours: {data}, {found.scale} scale, {seeds}"
    if found.overrides:
        text += f", with `{' '.join(found.overrides)}`"
    return f"{text}."


def _choices(found: Reproduction) -> list[tuple[str, ...]]:
    """A sweep that chooses a value for each of several runs: RSUM by value, the best in bold."""
    runs = dict.fromkeys(row.label[0] for row in found.rows)
    values = sorted({row.value for row in found.rows if row.value is not None})
    table = [(found.columns[0], *(f"{value:g}" for value in values))]
    for run in runs:
        of_run = {row.value: row.numbers.get("rsum") for row in found.rows if row.label[0] == run}
        most = max((number.mean for number in of_run.values() if number), default=None)
        cells = []
        for value in values:
            number = of_run.get(value)
            text = number.text() if number else ""
            cells.append(f"**{text}**" if number and number.mean == most else text)
        table.append((_safe(run), *cells))
    return table


def _rows(found: Reproduction) -> list[tuple[str, ...]]:
    if found.kind == "sweep" and found.judged_on == "dev" and len(found.columns) > 1:
        return _choices(found)
    metrics = _metrics(found)
    heads = [_head(metric, metrics) for metric in metrics]
    more = [measure.title for measure in found.measures]
    speed = ("Kpps", "Kpps, matching alone", "× slowest") if found.kind == "scatter" else ()
    slowest = min((row.speed.kpps for row in found.rows if row.speed), default=1.0)
    table: list[tuple[str, ...]] = [(*found.columns, *heads, *more, *speed)]
    for row in found.rows:
        cells = [_cell(row, metric, found.published_on) for metric in metrics]
        cells += _measures(found, row)
        if row.errors and not row.numbers:
            cells[-1] = f"failed {cells[-1]}".strip()
        elif row.missing and not row.numbers:
            cells[-1] = f"not finished {cells[-1]}".strip()
        table.append((*map(_safe, row.label), *cells, *(_speed(row, slowest) if speed else ())))
    return table


def _cell(row: RowResult, metric: str, published_on: str | None) -> str:
    """``mean ± std (published)``, with what there is of these."""
    ours = row.numbers[metric].text() if metric in row.numbers else ""
    numbers = row.published.get(published_on or "", [])
    theirs = numbers[METRICS.index(metric)] if numbers else None
    return " ".join(filter(None, (ours, f"({theirs:.1f})" if theirs is not None else "")))


def _metrics(found: Reproduction) -> list[str]:
    if found.kind == "sweep":
        return list(METRICS)
    return [METRICS[-1]] if found.kind in ("scatter", "curves") else found.metrics


def _head(metric: str, shown: Sequence[str]) -> str:
    """R@5 stands beside R@1, which says the direction; where it does not, it says so itself."""
    title, (side, _, _) = HEADS[METRICS.index(metric)], metric.partition("_")
    if title.startswith("R@") and f"{side}_r1" not in shown:
        return f"{side[0]}→{side[-1]} {title}"
    return title


def _measures(found: Reproduction, row: RowResult) -> list[str]:
    cells = []
    for place, measure in enumerate(found.measures):
        number = row.numbers.get(measure.title)
        ours = number.text(measure.decimals) if number is not None else ""
        told = row.published_measures.get(found.published_on or "", [])
        theirs = told[place] if told else None
        quoted = f"({theirs:.{measure.decimals}f})" if theirs is not None else ""
        cells.append(" ".join(filter(None, (ours, quoted))))
    return cells


def _speed(row: RowResult, slowest: float) -> tuple[str, ...]:
    if row.speed is None:
        return ("", "", "")
    speed = row.speed
    return (f"{speed.kpps:.3g}", f"{speed.matching_kpps:.3g}", f"{speed.kpps / slowest:.1f}")


def _notes(found: Reproduction) -> list[str]:
    notes = [found.note] if found.note else []
    if found.judged_on == "dev":
        notes.append("Recalls are of dev, at the epoch that was best there; test stays unseen.")
        if found.kind == "sweep" and len(found.columns) > 1:
            notes.append(f"RSUM by {found.x_label or found.key}; the best of each row is taken.")
    if claim_rows(found):
        notes.append("Δ: seed by seed; “within the spread” is less than the deviation over seeds.")
    if any(found.published_on in _published(row) for row in found.rows):
        notes.append(f"In brackets: as published, on {found.published_title}.")
        if not found.same_data:
            notes.append("Ours are on other data: compare orders and differences, not values.")
    elif found.data != "scenes" and any(_published(row) for row in found.rows):
        notes.append("Which published numbers belong to this data is not known: --published.")
    if found.seeds > 1:
        notes.append("± is the standard deviation over seeds (n − 1).")
    measured = [row.speed for row in found.rows if row.speed]
    if measured:
        notes.append(
            f"Kpps: thousand image-text pairs scored in a second on {measured[0].images} × "
            f"{measured[0].captions}, encoding included ({measured[0].device})."
        )
    notes += distribution_notes(found)
    maps = [*found.maps, *(found.sheet.maps if found.sheet is not None else [])]
    notes += [one.note for one in maps if one.note]
    for plot in found.plots:
        if not plot.curves:
            notes.append(f"{plot.title}: no finished run logged '{plot.metric}'.")
    for row in found.rows:
        if row.note:
            notes.append(f"{row.name}: {row.note}")
        if row.missing and row.numbers:  # else the table says it
            done = max(measure.seeds for measure in row.numbers.values())
            asked = done + row.missing  # rows may be ahead of each other
            notes.append(f"{row.name}: {row.missing} of {asked} seeds not finished.")
        notes += [f"{row.name}: failed: {error}" for error in dict.fromkeys(row.errors)]
    return [_safe(note) for note in notes]


def _published(row: RowResult) -> set[str]:
    """Data sets that a row has any published number for."""
    return {*row.published, *row.published_measures}


def _safe(text: str) -> str:
    """Text that does not end a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


# A page's tables and pictures come from the store, so that no number is typed. Between two markers
# stands what a file of the store says, and nothing else:
#
#     <!-- results: naaf.table1@lite2 -->
#     <!-- /results -->
#
# Claims of several of them can stand together, by a pattern of their names:
#
#     <!-- claims: naaf.*@lite2 -->
#     <!-- /claims -->


SECTION_START = re.compile(r"^<!-- (results|claims): (\S+) -->$", re.MULTILINE)
NOT_RUN = "*Not run yet.*"


def pages_to_fill(path: Path) -> list[Path]:
    """A page, or those of a folder that have a section to fill."""
    if not path.is_dir():
        return [path]
    pages = [
        page for page in sorted(path.glob("*.md")) if SECTION_START.search(page.read_text("utf-8"))
    ]
    if not pages:
        raise DataError(f"{path}: no page has a '<!-- results: NAME -->' to fill")
    return pages


def fill_page(page: Path, store: Path) -> list[str]:
    """Write every section of a page anew, and its pictures beside it; the names of the sections."""
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
        raise DataError(f"{page}: the section '{name}' does not end ('{closing}')")
    return f"{text[:start]}\n{section}\n{text[end:]}"


def _claims(store: Path, pattern: str) -> str:
    """What was found of the claims of several tables, one under the other."""
    stored = [read_stored(path) for path in sorted(store.glob(f"{pattern}.json"))]
    told = [
        (found.name, *row)
        for found in stored
        if found is not None
        for row in claim_rows(found)[1:]
        if row[-1]
    ]
    return "\n".join(markdown_table([("Table", *CLAIM_HEADS), *told])) if told else NOT_RUN


def _section(found: Reproduction | None, name: str, page: Path) -> str:
    if found is None or not any(row.numbers for row in found.rows):
        return NOT_RUN
    return body(found, _pictures(found, name, page)).strip()


def _pictures(found: Reproduction, name: str, page: Path) -> list[str]:
    """Written into a folder that is called like the page; as the page refers to them."""
    folder = page.with_suffix("")
    written = []
    for chart in charts_of(found):
        path = folder / f"{name}-{chart.name}.svg"
        save_figure(chart.draw(), path)
        written.append(f"{folder.name}/{path.name}")
    return written
