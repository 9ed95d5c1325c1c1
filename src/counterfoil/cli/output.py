"""What commands share: the console, progress bars, tables, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from counterfoil.core.bars import Bars
from counterfoil.core.printable import is_encodable, printable
from counterfoil.core.progress import Progress as Says
from counterfoil.core.progress import Silent
from counterfoil.core.storage.atomic import DEFAULT_CACHE

if TYPE_CHECKING:
    from counterfoil.models.model import Model


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
