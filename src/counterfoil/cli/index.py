"""`counterfoil index`: make a run's images and captions searchable, and keep them up to date."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from counterfoil.cli.output import (
    CACHE_OPTION,
    JSON_OPTION,
    FormatOption,
    SourceOptions,
    check_index,
    check_inputs,
    console,
    parse_options,
    print_json,
    print_table,
    progress,
)

if TYPE_CHECKING:
    from counterfoil.search import SearchIndex
    from counterfoil.search.query import Recall
    from counterfoil.search.update import Added


class BuildByDefault(TyperGroup):
    """`counterfoil index RUN …` is short for `counterfoil index build RUN …`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["build", *args]
        return super().parse_args(ctx, args)


index_app = typer.Typer(
    cls=BuildByDefault,
    help="Make an index to search, and keep it up to date: counterfoil index RUN PAIRS --out INDEX",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

INDEX = typer.Argument(help="Folder of an index.")
SPLIT = typer.Option("--split", help="A split of the data; repeat it for several. Default: all.")
DEVICE = typer.Option(help="auto, cpu, cuda …")
SETTING = typer.Option(
    "--set", help="Option of the backend: key=value, e.g. kind=ivfpq, url=http://host:6333."
)
API_KEY = typer.Option(
    "--api-key", envvar="COUNTERFOIL_QDRANT_API_KEY", help="Of a Qdrant server; never stored."
)
QUERIES = typer.Option("--recall", min=0, help="Queries to measure recall with; 0: do not measure.")


@index_app.command()
def build(
    run: Annotated[Path, typer.Argument(help="Run or model folder.")],
    pairs: Annotated[
        str | None,
        typer.Argument(help="Data set: a path or a name; by default the one of the run."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder of the index; default: RUN/index."),
    ] = None,
    format: FormatOption = None,
    option: SourceOptions = None,
    split: Annotated[list[str] | None, SPLIT] = None,
    backend: Annotated[
        Literal["exact", "faiss", "qdrant"],
        typer.Option(
            help="Of the first stage. exact: every vector is compared; faiss: approximate, beyond "
            "a few hundred thousand; qdrant: embedded, or a cluster with --set url=…"
        ),
    ] = "exact",
    setting: Annotated[list[str] | None, SETTING] = None,
    api_key: Annotated[str, API_KEY] = "",
    first_stage: Annotated[
        Literal["auto", "pooled", "fitted", "maxsim"],
        typer.Option(
            help="pooled: one vector an item; fitted: the same, fitted to the matcher's scores; "
            "maxsim: one vector for each fragment. auto: fitted for matchers of fragments."
        ),
    ] = "auto",
    first: Annotated[
        Path | None,
        typer.Option(
            "--first", help="Run of a model of whole vectors that finds the shortlist instead."
        ),
    ] = None,
    dtype: Annotated[
        Literal["float16", "float32"], typer.Option(help="Numbers on disk.")
    ] = "float16",
    shortlist: Annotated[
        int, typer.Option(min=1, help="How many the first stage passes on to the matcher.")
    ] = 200,
    overwrite: Annotated[bool, typer.Option(help="Replace an index that is there.")] = False,
    recall: Annotated[int, QUERIES] = 100,
    device: Annotated[str, DEVICE] = "auto",
    cache: Path = CACHE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Make an index of a run's model with the images and captions of a data set.

    A search has two stages: vectors find a shortlist, which the model's own matcher then ranks. At
    the end, their results are compared with those of scoring everything, and the share that was
    found is printed; raise --shortlist if it is too low.

    [bold]Examples[/]

      counterfoil index runs/scenes-naaf --split test --out index
      counterfoil index runs/naaf my_photos/ --out index --first-stage maxsim
      counterfoil index runs/vse photos.jsonl --out index --backend faiss --set kind=ivfpq
      counterfoil index runs/scenes-tags --first runs/scenes-vse-infty --split test --out index
    """
    check_inputs([run, *([first] if first else [])], pairs, format)
    from counterfoil.search import SearchIndex
    from counterfoil.training.run_data import evaluation_split
    from counterfoil.training.run_folder import load_model

    bars = progress(quiet=as_json)
    options = _settings(setting, api_key)
    data = evaluation_split(run, pairs, format, parse_options(option or []), cache, bars)
    splits = [data[name] for name in split] if split else list(data)
    index = SearchIndex.build(
        out or run / "index",
        load_model(run, device),
        backend=backend,
        backend_options=options,
        first_stage=first_stage,
        first=load_model(first, device) if first is not None else None,
        fit_on=splits,
        progress=bars,
        dtype=dtype,
        shortlist=shortlist,
        overwrite=overwrite,
    )
    added = index.add(splits, progress=bars)
    _report(index, added, recall, bars, as_json)


@index_app.command()
def add(
    index: Annotated[Path, INDEX],
    pairs: Annotated[str, typer.Argument(help="Data set: a path or a name.")],
    format: FormatOption = None,
    option: SourceOptions = None,
    split: Annotated[list[str] | None, SPLIT] = None,
    existing: Annotated[
        Literal["refuse", "skip", "update"],
        typer.Option(help="What to do with images whose id is in the index already."),
    ] = "refuse",
    api_key: Annotated[str, API_KEY] = "",
    recall: Annotated[int, QUERIES] = 0,
    device: Annotated[str, DEVICE] = "auto",
    cache: Path = CACHE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Add images with their captions; nothing is rebuilt.

    Killed at any moment, the index is whole; continue with --existing skip.

    [bold]Example[/]

      counterfoil index add index new_photos/ --existing skip
    """
    check_index(index)
    check_inputs([], pairs, format)
    from counterfoil.training.run_data import evaluation_split

    bars = progress(quiet=as_json)
    opened = _open(index, api_key, device)
    options = parse_options(option or [])
    data = evaluation_split(index / "model", pairs, format, options, cache, bars)
    splits = [data[name] for name in split] if split else list(data)
    added = opened.add(splits, existing=existing, progress=bars)
    _report(opened, added, recall, bars, as_json)


@index_app.command()
def remove(
    index: Annotated[Path, INDEX],
    ids: Annotated[list[str], typer.Argument(help="Ids of images or captions.")],
    api_key: Annotated[str, API_KEY] = "",
    device: Annotated[str, DEVICE] = "auto",
    as_json: bool = JSON_OPTION,
) -> None:
    """Remove images, with their captions, or single captions (IMAGE#0 is an image's first)."""
    opened = _open(index, api_key, device)
    gone = opened.remove(ids)
    if as_json:
        print_json({"removed": gone, "images": len(opened)})
        return
    console().print(f"removed {gone} items; {len(opened):,} images are left", highlight=False)


@index_app.command()
def info(
    index: Annotated[Path, INDEX],
    check: Annotated[bool, typer.Option(help="Compare every byte with its checksum.")] = False,
    api_key: Annotated[str, API_KEY] = "",
    as_json: bool = JSON_OPTION,
) -> None:
    """Say what an index holds, how it is searched and how large it is."""
    from counterfoil.core.errors import DataError

    opened = _open(index, api_key, "cpu")
    tree = opened.info()
    damaged = opened.check() if check else []
    if as_json:
        print_json({**tree, **({"damaged": damaged} if check else {})})
    else:
        _show(tree)
    if damaged:
        raise DataError("\n".join(damaged))


@index_app.command()
def recall(
    index: Annotated[Path, INDEX],
    queries: Annotated[int, typer.Option(min=1, help="Sampled queries each way.")] = 100,
    shortlist: Annotated[
        int | None,
        typer.Option(min=1, help="By default the one of the index."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the sample.")] = 0,
    api_key: Annotated[str, API_KEY] = "",
    device: Annotated[str, DEVICE] = "auto",
    as_json: bool = JSON_OPTION,
) -> None:
    """Measure how much of exhaustive scoring the two stages find.

    Captions of the index ask for images, images for captions.

    [bold]Example[/]

      counterfoil index recall index --shortlist 50
    """
    opened = _open(index, api_key, device)
    bars = progress(quiet=as_json)
    found = opened.recall(queries, shortlist=shortlist, seed=seed, progress=bars)
    if as_json:
        print_json([way.as_dict() for way in found])
    else:
        _print_recall(found)


@index_app.command()
def compact(
    index: Annotated[Path, INDEX],
    api_key: Annotated[str, API_KEY] = "",
    device: Annotated[str, DEVICE] = "auto",
) -> None:
    """Give the room of removed items back."""
    opened = _open(index, api_key, device)
    before = opened.info()["bytes"]
    opened.compact()
    console().print(
        f"{before / 1e6:,.1f} MB before, {opened.info()['bytes'] / 1e6:,.1f} MB now",
        highlight=False,
    )


def _open(folder: Path, api_key: str, device: str) -> SearchIndex:
    check_index(folder)
    from counterfoil.search import SearchIndex

    secret = {"api_key": api_key} if api_key else None
    return SearchIndex.open(folder, device=device, backend_options=secret)


def _settings(setting: list[str] | None, api_key: str) -> dict[str, Any]:
    return {**parse_options(setting or [], "--set"), **({"api_key": api_key} if api_key else {})}


def _report(index: SearchIndex, added: Added, queries: int, bars: Any, as_json: bool) -> None:
    measured = queries > 0 and all(len(items) for items in index.items.values())
    found = index.recall(queries, progress=bars) if measured else []
    if as_json:
        print_json(
            {
                "added": vars(added),
                "recall": [way.as_dict() for way in found],
                **index.info(),
            }
        )
        return
    for line in added.left_out[:5]:
        bars.say(f"left out: {line}")
    if len(added.left_out) > 5:
        bars.say(f"… and {len(added.left_out) - 5} more")
    console().print(
        f"added {added.images:,} images and {added.captions:,} captions"
        + (f", {added.updated:,} of the images anew" if added.updated else "")
        + (f"; {added.skipped:,} images were there already" if added.skipped else ""),
        highlight=False,
    )
    _show(index.info())
    if found:
        _print_recall(found)
    command = shlex.join(["counterfoil", "search", str(index.folder), _example(index)])
    console().print(f"search it: {command}", highlight=False, markup=False)


def _example(index: SearchIndex) -> str:
    """A caption of the index: its model knows these words, which it may not of any other text."""
    texts = index.items["captions"]
    return str(texts.about(texts.table.live_ids[:1])[0]["text"]) if len(texts) else "WHAT TO FIND"


def _show(tree: dict[str, Any]) -> None:
    print_table(
        [
            ["index", str(tree["folder"])],
            ["model", f"{tree['model']['name']} ({tree['model']['sha256'][:12]})"],
            ["images", f"{tree['images']:,}"],
            ["captions", f"{tree['captions']:,}"],
            ["first stage", f"{tree['backend']}, {_first_stage(tree)}, {tree['dtype']}"],
            ["shortlist", f"{tree['shortlist']:,}"],
            ["size", f"{tree['bytes'] / 1e6:,.1f} MB"],
        ]
    )


def _first_stage(tree: dict[str, Any]) -> str:
    if "first_model" not in tree:
        return str(tree["first_stage"])
    return f"vectors of {tree['first_model']['name']} ({tree['first_model']['sha256'][:12]})"


def _print_recall(found: list[Recall]) -> None:
    rows = [
        [
            f"{way.asked_with} → {way.target}",
            *(f"{100 * value:.1f}" for value in way.at.values()),
            f"{way.shortlist:,} of {way.items:,}",
            f"{way.queries:,}",
        ]
        for way in found
    ]
    depths = [f"recall@{k}" for k in found[0].at]
    title = "two stages against scoring everything (%)"
    print_table([["", *depths, "shortlist", "queries"], *rows], title=title)
