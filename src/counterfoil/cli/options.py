"""Arguments and options that several commands share, each declared once, and their checks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from counterfoil.core.errors import ConfigError
from counterfoil.core.storage.atomic import CACHE_VARIABLE, DEFAULT_CACHE


def between(least: float, most: float, above: bool = False) -> Callable[[float | None], Any]:
    """Check of an option: a number from ``least`` (``above``: excluded) to ``most``.

    For what Typer's ``min`` and ``max`` cannot express: excluded bounds, and "nan", which no
    comparison refuses.
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


def given(context: typer.Context, name: str) -> bool:
    """Whether the command line, or an environment variable, sets this parameter."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def refuse_useless(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Refuse options that were given but would have no effect."""
    flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    useless = [flags[name] for name in names if given(context, name)]
    if useless:
        raise ConfigError(f"{', '.join(useless)}: no effect, because {why}")


def check_together(context: typer.Context, needs: dict[str, str], excludes: dict[str, str]) -> None:
    """Refuse an option without the one that it ``needs``, or beside one that it ``excludes``."""
    names = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    for name, needed in needs.items():
        if given(context, name) and not given(context, needed):
            raise ConfigError(f"{names[name]} belongs to {names[needed]}: add it")
    for name, others in excludes.items():
        useless = [names[other] for other in others.split() if given(context, other)]
        if given(context, name) and useless:
            raise ConfigError(f"with {names[name]}, leave out {', '.join(useless)}")


def find_models(context: typer.Context, value: Any) -> Any:
    """Check of an argument that names models: the folder of each, or of a pretrained model."""
    if value is None or context.resilient_parsing:
        return value
    from counterfoil.cli.output import progress
    from counterfoil.core.zoo import resolve

    # `Cache` is eager, so its value is there already; some commands do not have it
    cache = context.params.get("cache")
    folders = [resolve(one, cache=cache, progress=progress()) for one in _listed(value)]
    return folders if isinstance(value, list) else folders[0]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


RUN_HELP = "Run folder (its best checkpoint is used), folder of a saved model, or pretrained model."
Run = Annotated[Path, typer.Argument(callback=find_models, help=RUN_HELP)]
Ensemble = Annotated[
    list[Path],
    typer.Argument(
        callback=find_models,
        help="Runs, model folders or pretrained models. The scores of several are averaged "
        "(ensemble).",
    ),
]
Image = Annotated[str, typer.Argument(help="Image file, or the id of an image in the data set.")]
Sentence = Annotated[str, typer.Argument(help="Sentence about the image, in quotes.")]
Pairs = Annotated[
    str | None,
    typer.Argument(help="Data set: a path or a name. Default: the data of RUN."),
]
Index = Annotated[Path, typer.Argument(help="Index folder, made with `counterfoil index RUN`.")]
Data = Annotated[
    str | None,
    typer.Option("--data", help="Data set: a path or a name. Default: the data of RUN."),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format", "-f", help="Format of the data set. Default: detected from its files."
    ),
]
SourceOptions = Annotated[
    list[str] | None,
    typer.Option("--option", help="Option of the data source, as key=value. Repeatable."),
]
Splits = Annotated[
    list[str] | None,
    typer.Option("--split", help="Split to use. Repeatable. Default: all splits."),
]
IdSplit = Annotated[
    str | None,
    typer.Option("--split", help="Split that has the image id. Default: search all."),
]
Layout = Annotated[str, typer.Option("--to", help="File layout to write: scan, jsonl or shards.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace existing output instead of refusing to.")
]
Device = Annotated[
    str,
    typer.Option("--device", help="auto (a GPU if there is one), cpu, cuda, cuda:1 …"),
]
CACHE = DEFAULT_CACHE
Cache = Annotated[
    Path,
    typer.Option(
        "--cache",
        envvar=CACHE_VARIABLE,
        is_eager=True,
        help="Folder for generated scenes, extracted features and downloaded models, reused by all "
        "commands.",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON and nothing else to stdout.")
]
Markdown = Annotated[
    bool, typer.Option("--markdown", help="Print Markdown tables instead of terminal tables.")
]
Picture = Annotated[
    Path | None, typer.Option("--out", "-o", help="Also draw the result to this PNG file.")
]
ApiKey = Annotated[
    str,
    typer.Option(
        "--api-key",
        envvar="COUNTERFOIL_QDRANT_API_KEY",
        help="API key of the Qdrant server. It is never stored.",
    ),
]
ShortlistSize = Annotated[
    int | None,
    typer.Option(
        "--shortlist-size",
        min=1,
        help="Candidates per query that the matcher ranks. Default: set by the index.",
    ),
]
Corrector = Annotated[
    Path | None,
    typer.Option(
        "--corrector",
        callback=find_models,
        help="Run trained with tags-dc that suggests corrections, or scenes-corrector.",
    ),
]
Masks = Annotated[
    int,
    typer.Option("--masks", min=1, help="Masked versions per caption, K (model-made foils only)."),
]
Samples = Annotated[
    int,
    typer.Option("--samples", min=1, help="Samples per masked version, L (model-made foils only)."),
]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature",
        callback=ABOVE_0,
        help="Sampling temperature τ, above 0; higher gives more varied foils (model-made only).",
    ),
]
Masking = Annotated[
    Literal["scene-graph", "words"],
    typer.Option(
        "--masking",
        help="Mask whole scene-graph units or single words (model-made foils only).",
    ),
]

PartOption = Annotated[
    str | None,
    typer.Option(
        "--part",
        metavar="I/N",
        help="Make part I of N only, in the folder OUT.parts; parts can run at the same time and "
        "on several machines. auto: the rank that torchrun states; the first process then merges.",
    ),
]
MergeOption = Annotated[
    bool,
    typer.Option("--merge", help="Merge the complete parts of OUT, made with --part."),
]


def check_part(part: str | None, merge: bool) -> None:
    """Refuse a part that is not I/N or auto, and --part with --merge, before any work."""
    from counterfoil.core.errors import ConfigError
    from counterfoil.core.parts import AUTO, Part

    if part is not None and merge:
        raise ConfigError("--part makes a part, --merge merges all parts: give one of them")
    if part is not None and part != AUTO:
        Part.parse(part)


@contextmanager
def part_processes(part: str | None) -> Iterator[bool]:
    """With --part auto, join the other processes of torchrun; yields whether this is the first."""
    if part != "auto" or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield True
        return
    from counterfoil.core.distributed import processes  # which imports torch

    with processes(dict(os.environ)) as first:
        yield first


def wait_for_parts() -> None:
    """With --part auto, return when every process has made its part."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from counterfoil.core.distributed import wait_for_all

        wait_for_all()
