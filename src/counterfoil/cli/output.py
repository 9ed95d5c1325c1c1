"""What commands share: the console, progress bars, tables, JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from counterfoil.core.printable import is_encodable, printable
from counterfoil.core.progress import Bars, Silent
from counterfoil.core.progress import Progress as Says

if TYPE_CHECKING:
    from counterfoil.data.pairs import Problem
    from counterfoil.models.model import Model


MAX_NAMED = 5
"""Examples listed per kind of problem."""


def console(stderr: bool = False) -> Console:
    return Console(stderr=stderr, soft_wrap=not stderr)


def print_line(text: str, style: str | None = None, stderr: bool = False) -> None:
    """Print one line; line ends inside ``text``, which data may contain, are escaped."""
    console(stderr).print(printable(text), highlight=False, markup=False, style=style)


def print_left_out(problems: Sequence[Problem], list_place: str) -> None:
    """Items of the data that were not used: the count of each kind, and a few examples.

    ``list_place`` says where to read about the others.
    """
    from counterfoil.data.pairs import count_kinds

    for kind, count in count_kinds(list(problems)).items():
        examples = [problem for problem in problems if problem.kind == kind][:MAX_NAMED]
        print_line(f"left out, {kind}: {count:,}", style="yellow")
        for problem in examples:
            print_line(f"  {problem}")
        if count > len(examples):
            print_line(f"  … and {count - len(examples):,} more ({list_place})")


def print_json(value: Any) -> None:
    typer.echo(to_json(value, getattr(sys.stdout, "encoding", None) or "utf-8"))


def to_json(value: Any, encoding: str = "utf-8") -> str:
    """One JSON value; in ASCII if it has what the encoding lacks, such as half a surrogate pair.

    A number that is not finite becomes null: JSON has no NaN.
    """
    value = _with_null(value)
    text = json.dumps(value, ensure_ascii=False, indent=2, default=str, allow_nan=False)
    return text if is_encodable(text, encoding) else json.dumps(value, indent=2, default=str)


def _with_null(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _with_null(one) for key, one in value.items()}
    return [_with_null(one) for one in value] if isinstance(value, (list, tuple)) else value


def print_table(
    rows: Sequence[Sequence[str]], title: str | None = None, words: Sequence[int] = (0,)
) -> None:
    """Rows of text, the first of them the header; ``words`` are the left-aligned columns."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for number, cell in enumerate(rows[0]):
        table.add_column(escape(printable(cell)), justify="left" if number in words else "right")
    for row in rows[1:]:
        table.add_row(*(escape(printable(cell)) for cell in row))
    out = Console()
    # in a file or a pipe there is no window to fit into
    (out if out.is_terminal else Console(width=160)).print(table)


def print_list(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Names and what they are: wrapped to a terminal, elsewhere one line per row for grep."""
    out = Console()
    if title:
        typer.echo(typer.style(title, bold=True) if out.is_terminal else title)
    if not out.is_terminal:
        widths = [max(len(row[n]) for row in rows) for n in range(len(header))]
        for row in rows:
            cells = (f"{printable(cell):{width}}" for cell, width in zip(row, widths, strict=True))
            typer.echo("  ".join(cells).rstrip())
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for number, name in enumerate(header):
        table.add_column(name, no_wrap=number == 0, overflow="fold")
    for row in rows:
        table.add_row(*(escape(printable(cell, keep="\n")) for cell in row))
    out.print(table)


class OnlyWarnings(Silent):
    """For --json and --markdown: print only warnings, to stderr."""

    def say(self, text: str) -> None:
        if text.startswith("warning:"):
            out = Console(stderr=True)
            out.print(printable(text, keep="\n"), highlight=False, markup=False, soft_wrap=True)


def progress(quiet: bool = False) -> Bars | Silent:
    return OnlyWarnings() if quiet else Bars()


def say_fallback(bars: Says, models: Iterable[Model]) -> bool:
    """Report once if PyTorch scores any of these models instead of fused kernels; True if so."""
    from counterfoil.scoring.engine import fallback

    line = next((line for line in map(fallback, models) if line), None)
    if line:
        bars.say(line)
    return line is not None
