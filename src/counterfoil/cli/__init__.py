"""The command line: one file per command; torch is imported only by commands that need it."""

from __future__ import annotations

import inspect
import io
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from counterfoil.cli.audit import audit_app
from counterfoil.cli.bench import bench
from counterfoil.cli.correct import correct
from counterfoil.cli.data import data_app
from counterfoil.cli.demo import demo
from counterfoil.cli.evaluate import evaluate
from counterfoil.cli.evaluate_foils import evaluate_foils, evaluate_judgements
from counterfoil.cli.evaluate_words import evaluate_words
from counterfoil.cli.explain import explain
from counterfoil.cli.export import export
from counterfoil.cli.features import features
from counterfoil.cli.foils import foils
from counterfoil.cli.guide import guide_app
from counterfoil.cli.import_checkpoint import import_
from counterfoil.cli.index import index_app
from counterfoil.cli.models import models
from counterfoil.cli.push import push
from counterfoil.cli.recipes import recipes_app
from counterfoil.cli.reproduce import reproduce
from counterfoil.cli.score import score
from counterfoil.cli.search import search
from counterfoil.cli.serve import serve
from counterfoil.cli.signals import end_on_sigterm
from counterfoil.cli.train import train
from counterfoil.core.errors import ConfigError, CounterfoilError
from counterfoil.core.registry import import_own

TAGLINE = "Image–text matching, trained with better negatives."
EPILOG = (
    "First steps:  counterfoil demo   ·   counterfoil models   ·   counterfoil recipes   ·   "
    "counterfoil train scenes/rvse-mlp train.epochs=3"
)
GROUPS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Get started": {"demo": demo, "models": models, "recipes": recipes_app},
    "Train and evaluate": {
        "train": train,
        "evaluate": evaluate,
        "evaluate-foils": evaluate_foils,
        "evaluate-judgements": evaluate_judgements,
        "evaluate-words": evaluate_words,
        "bench": bench,
        "guide": guide_app,
        "import": import_,
        "export": export,
        "push": push,
    },
    "Explain, audit, correct": {
        "score": score,
        "explain": explain,
        "correct": correct,
        "audit": audit_app,
    },
    "Search and serve": {"index": index_app, "search": search, "serve": serve},
    "Data": {"data": data_app, "features": features, "foils": foils},
    "Papers": {"reproduce": reproduce},
}
"""Commands by the panel of `counterfoil --help` that shows them."""

app = typer.Typer(
    name="counterfoil",
    help=TAGLINE,
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _reflow(function: Callable[..., object]) -> None:
    """Join the lines of each paragraph, so that help fills the window; examples keep theirs."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    function.__doc__ = "\n\n".join(
        text if text.startswith(" ") else text.replace("\n", " ") for text in paragraphs
    )


for panel, commands in GROUPS.items():
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            for info in command.registered_commands:
                if info.callback is not None:
                    _reflow(info.callback)
            app.add_typer(command, name=name, rich_help_panel=panel)
        else:
            _reflow(command)
            app.command(name, rich_help_panel=panel)(command)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            help="Python module to import first, by name (my_parts for my_parts.py in this "
            "folder): a file of yours that registers a matcher, an objective, an encoder or a data "
            "format. Repeatable.",
        ),
    ] = None,
) -> None:
    """Image–text matching, trained with better negatives."""
    for module in modules or ():
        _import_own(module)
    if version:
        from counterfoil import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point: an error of ours is printed as one message, with its own exit code."""
    # Spinning OpenMP threads slow each other down as soon as another program runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Pillow's own warning about large images; we refuse them with an error of our own.
    warnings.filterwarnings("ignore", message="Image size .* exceeds limit", module="PIL")
    end_on_sigterm()
    _escape_unencodable()
    try:
        sys.argv[1:] = map(home_expanded, sys.argv[1:])  # Typer expands more of it on Windows
        app()
    except CounterfoilError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        prefix = f"{error.filename}: " if error.filename else ""
        _fail(f"{prefix}{error.strerror or error}", 1)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        _fail(f"out of memory ({_first_line(error)}); use a smaller model, batch or data set", 1)


def _import_own(module: str) -> None:
    """Import a module of the user's, from the current folder or installed."""
    if not all(part.isidentifier() for part in module.split(".")) or module.endswith(".py"):
        path = Path(module)
        if path.is_absolute() or ".." in path.parts:
            raise ConfigError(
                f"--import {module}: not the name of a module; with PYTHONPATH={path.parent} it is "
                f"--import {path.stem}"
            )
        dotted = re.sub(r"[/\\]", ".", module.removesuffix(".py")).strip(".")
        raise ConfigError(f"--import {module}: not the name of a module; did you mean '{dotted}'?")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        import_own([module])
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # one that the module imports
            raise
        raise ConfigError(
            f"--import {module}: no such module, neither in this folder nor installed"
        ) from None


def home_expanded(word: str) -> str:
    """``--out=~/runs`` and ``data.source=~/photos`` with the path of the home folder.

    Shells expand ``~`` only at the start of a word, so a folder of that name would be created.
    """
    match = re.fullmatch(r"((?:(?:--)?[a-z][a-z0-9_.-]*=)+)(~(?:[/\\].*)?)", word, re.DOTALL)
    return word if match is None else match[1] + os.path.expanduser(match[2])


def _escape_unencodable() -> None:
    """Print characters that the terminal's encoding lacks as escapes, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _is_out_of_memory(error: Exception) -> bool:
    """PyTorch raises RuntimeError, on the CPU and on a GPU; only the message tells."""
    known = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in known)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def _fail(message: str, code: int) -> NoReturn:
    from counterfoil.cli.output import console

    console(stderr=True).print(f"[bold red]error:[/] {_plain(message)}", highlight=False)
    sys.exit(code)


def _plain(text: str) -> str:
    """A message without markup and control characters, except for line breaks."""
    from rich.markup import escape

    from counterfoil.core.printable import printable

    return escape(printable(text, keep="\n"))
