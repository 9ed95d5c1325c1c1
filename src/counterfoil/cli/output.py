"""What commands share: the console, progress bars, tables, JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

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
from counterfoil.core.storage.atomic import DEFAULT_CACHE

if TYPE_CHECKING:
    from counterfoil.models.model import Model


T = TypeVar("T")

LINE_EVERY = 60.0
"""Seconds between two lines about long work, where there is no terminal for a bar."""


def between(least: float, most: float, above: bool = False) -> Callable[[float | None], Any]:
    """Check of an option: a number from ``least`` (``above``: that itself is refused) to ``most``.

    For what Typer's ``min`` and ``max`` cannot say: bounds that are excluded, and "nan", which
    compares as if it were within all.
    """

    def check(value: float | None) -> float | None:
        if value is None or (least <= value <= most and not (above and value == least)):
            return value
        start = f"above {least:g}" if above else f"at least {least:g}"
        end = f" and at most {most:g}" if most < sys.float_info.max else ""
        raise typer.BadParameter(f"expected a number {start}{end}, got {value:g}")

    return check


SHARE = between(0.0, 1.0)
FROM_0 = between(0.0, sys.float_info.max)
ABOVE_0 = between(0.0, sys.float_info.max, above=True)
ABOVE_0_TO_1 = between(0.0, 1.0, above=True)

CACHE_OPTION = typer.Option(
    DEFAULT_CACHE,
    "--cache",
    envvar="COUNTERFOIL_CACHE",
    help="Folder of generated scenes and of cached features.",
)
FormatOption = Annotated[
    str | None,
    typer.Option("--format", "-f", help="Format of the data, if not detected."),
]
SourceOptions = Annotated[
    list[str] | None,
    typer.Option("--option", help="Option of the data source: key=value; repeatable."),
]
JSON_OPTION = typer.Option(False, "--json", help="Print one JSON object for a program to read.")


def console(stderr: bool = False) -> Console:
    return Console(stderr=stderr, soft_wrap=not stderr)


def print_json(value: Any) -> None:
    """One JSON value; where it holds half a surrogate pair, which is no UTF-8, in ASCII."""
    text = json.dumps(value, ensure_ascii=False, indent=2, default=str)
    typer.echo(text if is_encodable(text) else json.dumps(value, indent=2, default=str))


def print_table(
    rows: Sequence[Sequence[str]], title: str | None = None, words: Sequence[int] = (0,)
) -> None:
    """Rows of text, the first of them the header; columns of ``words`` begin at the left."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for number, cell in enumerate(rows[0]):
        table.add_column(escape(printable(cell)), justify="left" if number in words else "right")
    for row in rows[1:]:
        table.add_row(*(escape(printable(cell)) for cell in row))
    out = Console()
    # in a file or a pipe there is no window to fit into
    (out if out.is_terminal else Console(width=160)).print(table)


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
        """For logs: what begins and, each minute, how far it is and how long it will take."""
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
    """For --json and --markdown: nothing but warnings, which go to the error stream."""

    def say(self, text: str) -> None:
        if text.startswith("warning:"):
            out = Console(stderr=True)
            out.print(printable(text, keep="\n"), highlight=False, markup=False, soft_wrap=True)


def progress(quiet: bool = False) -> Bars | Silent:
    return OnlyWarnings() if quiet else Bars()


def say_fallback(bars: Says, models: Iterable[Model]) -> bool:
    """Say once, for all these models, where PyTorch scores instead of fused kernels; True if so."""
    from counterfoil.scoring.engine import fallback

    line = next((line for line in map(fallback, models) if line), None)
    if line:
        bars.say(line)
    return line is not None


def check_inputs(runs: Iterable[Path], data: str | None = None, format: str | None = None) -> None:
    """Refuse folders and paths that do not exist, before seconds are spent on importing torch."""
    from counterfoil.core.config import model_folder
    from counterfoil.data.load import check_source

    for run in runs:
        model_folder(run)
    if data is not None:
        check_source(data, format)


def check_index(folder: Path) -> None:
    """The same for the folder of an index."""
    from counterfoil.core.errors import DataError

    if not (folder / "index.json").is_file():
        raise DataError(
            f"{folder}: not a search index (there is no index.json); "
            "make one with: counterfoil index RUN PAIRS --out INDEX"
        )


def parse_options(pairs: Sequence[str], name: str = "--option") -> dict[str, Any]:
    """``--option images=1000`` to a mapping with YAML values; ``name`` is that of the option."""
    import yaml

    from counterfoil.core.config import read_value
    from counterfoil.core.errors import ConfigError

    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"{name} {pair}: expected key=value")
        try:
            options[key.strip()] = read_value(value)
        except (yaml.YAMLError, ValueError):
            raise ConfigError(f"{name} {pair}: '{value}' is not a value") from None
    return options
