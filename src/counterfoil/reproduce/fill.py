"""A page of results whose tables and pictures come from the store, so that no number is typed.

Between two markers stands what a file of the store says, and nothing else:

    <!-- results: naaf.table1@lite2 -->
    <!-- /results -->
"""

from __future__ import annotations

import re
from pathlib import Path

from counterfoil.errors import DataError
from counterfoil.files import write_atomically
from counterfoil.reproduce.plots import charts_of, to_svg
from counterfoil.reproduce.present import body
from counterfoil.reproduce.results import Reproduction
from counterfoil.reproduce.store import read_stored

OPENING = re.compile(r"^<!-- results: (\S+) -->$", re.MULTILINE)
CLOSING = "<!-- /results -->"
NOTHING = "*Not run yet.*"


def fill_page(page: Path, store: Path) -> list[str]:
    """Write every section of a page anew, and its pictures beside it; the names of the sections."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{page}: cannot be read: {error}") from None
    names = OPENING.findall(text)
    if not names:
        raise DataError(f"{page}: has no '<!-- results: NAME -->' to fill")
    for name in dict.fromkeys(names):
        found = read_stored(store / f"{name}.json")
        text = _replaced(text, name, _section(found, name, page), page)
    write_atomically(page, text)
    return names


def _replaced(text: str, name: str, section: str, page: Path) -> str:
    opening = f"<!-- results: {name} -->"
    start = text.index(opening) + len(opening)
    end = text.find(CLOSING, start)
    following = OPENING.search(text, start)
    if end < 0 or (following is not None and following.start() < end):
        raise DataError(f"{page}: the section '{name}' does not end ('{CLOSING}')")
    return f"{text[:start]}\n{section}\n{text[end:]}"


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
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, to_svg(chart))
        written.append(f"{folder.name}/{path.name}")
    return written
