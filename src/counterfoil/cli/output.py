"""What commands share: the console, progress bars, tables, JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from counterfoil.core.printable import is_encodable, printable
from counterfoil.core.progress import Progress as Says
from counterfoil.core.progress import Silent

if TYPE_CHECKING:
    from counterfoil.models.model import Model


T = TypeVar("T")

LINE_EVERY = 60.0
"""Seconds between two progress lines when there is no terminal for a bar."""


def console(stderr: bool = False) -> Console:
    return Console(stderr=stderr, soft_wrap=not stderr)


def print_line(text: str, style: str | None = None, stderr: bool = False) -> None:
    """A line without markup, number coloring or control characters."""
    console(stderr).print(printable(text, keep="\n"), highlight=False, markup=False, style=style)


def print_json(value: Any) -> None:
    """One JSON value; in ASCII if it has half a surrogate pair, which UTF-8 cannot encode."""
    text = json.dumps(value, ensure_ascii=False, indent=2, default=str)
    typer.echo(text if is_encodable(text) else json.dumps(value, indent=2, default=str))


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


class Bars:
    """Progress bars with rate and remaining time on a terminal, a line a minute elsewhere."""

    def __init__(self, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = Console(stderr=True)
        self.quiet = quiet
        self._clock = clock
        self._note = ""
        self._progress: Progress | None = None
        self._task: Any = None

    def track(
        self, items: Iterable[T], description: str, total: int | None = None, done: int = 0
    ) -> Iterator[T]:
        if self.quiet:
            yield from items
            return
        if not self.console.is_terminal:
            yield from self._lines(items, description, total, done)
            return
        if self._progress is not None:  # a bar inside a bar would only flicker
            yield from items
            return
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            transient=True,
        ) as self._progress:
            try:
                self._task = self._progress.add_task(
                    description, total=total, completed=done, note=""
                )
                for item in items:
                    yield item
                    self._progress.advance(self._task)
            finally:
                self._progress = None

    def _lines(
        self, items: Iterable[T], description: str, total: int | None, done: int
    ) -> Iterator[T]:
        """For logs: what begins and, each minute, its progress and the time left."""
        self.say(f"{description} …")
        self._note = ""
        began = last = self._clock()
        for count, item in enumerate(items, 1):
            yield item
            now = self._clock()
            if now - last >= LINE_EVERY:
                last = now
                rate = count / (now - began)
                self.say("  ".join(filter(None, [_how_far(done + count, total, rate), self._note])))

    def note(self, text: str) -> None:
        self._note = text
        if self._progress is not None:
            self._progress.update(self._task, note=escape(printable(text)))

    def say(self, text: str) -> None:
        if not self.quiet:
            # In a log, a line stays one line.
            wrapped = self.console.is_terminal
            self.console.print(
                printable(text, keep="\n"), highlight=False, markup=False, soft_wrap=not wrapped
            )


def _how_far(count: int, total: int | None, rate: float) -> str:
    if not total:
        return f"  {count:,}"
    left = max(0, total - count) / rate
    time_left = f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
    return f"  {count:,} of {total:,} ({count / total:.0%}), about {time_left} left"


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
