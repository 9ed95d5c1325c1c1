"""The command line: few verbs, one file each; torch is imported only by the verb that needs it."""

from __future__ import annotations

import os
import sys
import warnings
from typing import NoReturn

import typer

from counterfoil.cli.audit import audit
from counterfoil.cli.correct import correct
from counterfoil.cli.data import data_app
from counterfoil.cli.demo import demo
from counterfoil.cli.evaluate import evaluate
from counterfoil.cli.explain import explain
from counterfoil.cli.export import export
from counterfoil.cli.features import features
from counterfoil.cli.foil_report import foil_report, judge
from counterfoil.cli.foils import foils
from counterfoil.cli.guide import guide_app
from counterfoil.cli.import_checkpoint import import_
from counterfoil.cli.index import index_app
from counterfoil.cli.models import models
from counterfoil.cli.recipes import recipes_app
from counterfoil.cli.reproduce import reproduce
from counterfoil.cli.score import score
from counterfoil.cli.search import search
from counterfoil.cli.serve import serve
from counterfoil.cli.signals import end_on_sigterm
from counterfoil.cli.train import train
from counterfoil.core.errors import CounterfoilError

EPILOG = (
    "First steps:  counterfoil demo   ·   counterfoil models   ·   counterfoil recipes   ·   "
    "counterfoil train scenes/rvse-mlp train.epochs=3"
)

app = typer.Typer(
    name="counterfoil",
    help="Match images with texts, and learn it from negatives.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(train)
app.command()(evaluate)
app.command()(score)
app.command()(explain)
app.command()(correct)
app.command()(foils)
app.command("foil-report")(foil_report)
app.command()(audit)
app.command()(judge)
app.command()(search)
app.command()(serve)
app.command()(models)
app.command()(reproduce)
app.command("import")(import_)
app.command()(export)
app.command()(features)
app.add_typer(recipes_app, name="recipes")
app.add_typer(index_app, name="index")
app.add_typer(guide_app, name="guide")
app.add_typer(data_app, name="data")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    """Match images with texts, and learn it from negatives."""
    if version:
        from counterfoil import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point: an error of ours is one clear message and its own exit code."""
    # Threads that wait by spinning make each other crawl as soon as another program is running.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Pillow's own warning about large images; we refuse them with an error of our own.
    warnings.filterwarnings("ignore", message="Image size .* exceeds limit", module="PIL")
    end_on_sigterm()
    try:
        app()
    except CounterfoilError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        _fail(f"{place}{error.strerror or error}", 1)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        _fail(f"out of memory ({_first_line(error)}); use a smaller model, batch or data set", 1)


def _is_out_of_memory(error: Exception) -> bool:
    """PyTorch says so in words, on the CPU and on a GPU."""
    known = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in known)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def _fail(message: str, code: int) -> NoReturn:
    from counterfoil.cli.output import console

    console(stderr=True).print(f"[bold red]error:[/] {_plain(message)}", highlight=False)
    sys.exit(code)


def _plain(text: str) -> str:
    """A message with neither markup nor control characters; lists of problems take lines."""
    from rich.markup import escape

    from counterfoil.core.printable import printable

    return escape(printable(text, keep="\n"))
