"""A page of results whose tables and pictures come from the store, so that no number is typed.

Between two markers stands what a file of the store says, and nothing else:

    <!-- results: naaf.table1@lite2 -->
    <!-- /results -->

What is claimed in several of them can stand together, by a pattern of their names:

    <!-- claims: naaf.*@lite2 -->
    <!-- /claims -->
"""

from __future__ import annotations

import re
from pathlib import Path

from counterfoil.errors import DataError
from counterfoil.evaluation.report import markdown_table
from counterfoil.files import write_atomically
from counterfoil.plots.charts import save_figure
from counterfoil.reproduce.claims import HEADS, claim_rows
from counterfoil.reproduce.plots import charts_of
from counterfoil.reproduce.present import body
from counterfoil.reproduce.results import Reproduction
from counterfoil.reproduce.store import read_stored

OPENING = re.compile(r"^<!-- (results|claims): (\S+) -->$", re.MULTILINE)
NOTHING = "*Not run yet.*"


def fill_page(page: Path, store: Path) -> list[str]:
    """Write every section of a page anew, and its pictures beside it; the names of the sections."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{page}: cannot be read: {error}") from None
    sections = list(dict.fromkeys(OPENING.findall(text)))
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
    following = OPENING.search(text, start)
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
    return "\n".join(markdown_table([("Table", *HEADS), *told])) if told else NOTHING


def _section(found: Reproduction | None, name: str, page: Path) -> str:
    if found is None or not any(row.numbers for row in found.rows):
        return NOTHING
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
