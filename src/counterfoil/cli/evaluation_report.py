"""How `counterfoil evaluate` shows and writes what it found."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from counterfoil.cli.output import console, print_json, print_table
from counterfoil.printable import printable

if TYPE_CHECKING:
    from counterfoil.evaluation.comparison import Comparison
    from counterfoil.evaluation.report import RetrievalReport
    from counterfoil.evaluation.shortlist import ShortlistReport
    from counterfoil.evaluation.word_report import WordReport


@dataclass(frozen=True)
class Found:
    """The reports of one model or ensemble, and the images it could not read."""

    retrieval: RetrievalReport
    words: WordReport | None
    skipped: list[str]
    lists: ShortlistReport | None = None


def show(found: Found, out: Path | None, markdown: bool, as_json: bool) -> None:
    report, words = found.retrieval, found.words
    tree = json.loads(report.to_json())
    if words is not None:
        tree["words"] = json.loads(words.to_json())
    page = report.to_markdown() + (f"\n{words.to_markdown()}" if words is not None else "")
    if found.lists is not None:
        tree["shortlist"] = found.lists.as_dict()
        page += f"\n{found.lists.to_markdown()}"
    if found.skipped:
        tree["skipped_images"] = found.skipped
        page += f"\n{len(found.skipped)} images could not be read and were left out.\n"
    _write(out, tree, page)
    if as_json:
        print_json(tree)
    elif markdown:
        typer.echo(page)
    else:
        for title, rows in report.tables():
            print_table(rows, title=title)
        if report.extended is not None:
            print_table(report.extended.rows())
        if found.lists is not None:
            print_table(found.lists.rows())
            console().print(found.lists.note(), highlight=False)
        console().print(f"{report.tie_rule}", highlight=False)
        if words is not None:
            print_table(words.rows(), title=words.headline())
            console().print(words.notes(), highlight=False, markup=False)
        if found.skipped:
            line = f"{len(found.skipped)} images skipped, the first: {found.skipped[0]}"
            console().print(printable(line), markup=False)


def show_comparison(
    comparison: Comparison, out: Path | None, markdown: bool, as_json: bool
) -> None:
    tree = json.loads(comparison.to_json())
    _write(out, tree, comparison.to_markdown())
    if as_json:
        print_json(tree)
    elif markdown:
        typer.echo(comparison.to_markdown())
    else:
        print_table(comparison.rows(), title=comparison.headline())
        console().print(comparison.notes(), highlight=False, markup=False)


def _write(out: Path | None, tree: dict[str, Any], page: str) -> None:
    if out is None:
        return
    from counterfoil.files import write_atomically

    as_markdown = out.suffix.lower() == ".md"
    write_atomically(out, page if as_markdown else json.dumps(tree, ensure_ascii=False, indent=2))
