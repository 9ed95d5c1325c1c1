"""`counterfoil index`: make a run's images and captions searchable, and keep them up to date."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

import counterfoil.cli.options as opt
from counterfoil.cli.index_report import (
    print_info,
    print_recall,
    report_build,
    report_part,
)
from counterfoil.cli.inputs import DataChoice, check_index, check_inputs, open_index, parse_options
from counterfoil.cli.output import print_json, print_line, progress
from counterfoil.core.config import model_folder
from counterfoil.core.errors import ConfigError
from counterfoil.core.printable import plural

if TYPE_CHECKING:
    from counterfoil.data.pairs import Pairs


class BuildByDefault(TyperGroup):
    """`counterfoil index RUN …` is short for `counterfoil index build RUN …`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["build", *args]
        return super().parse_args(ctx, args)


index_app = typer.Typer(
    cls=BuildByDefault,
    help="Build a search index and keep it up to date: counterfoil index RUN PAIRS --out INDEX",
    epilog="`counterfoil index RUN …` is short for `counterfoil index build RUN …`, whose options "
    "`counterfoil index build --help` lists.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

RecallQueries = Annotated[
    int,
    typer.Option(
        "--recall-queries",
        min=0,
        help="Sampled queries per direction for measuring recall afterwards. 0: do not measure.",
    ),
]


@index_app.command()
def build(
    run: opt.Run,
    pairs: opt.Pairs = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Index folder to write. Default: RUN/index; required for a saved or pretrained "
            "model.",
        ),
    ] = None,
    format: opt.Format = None,
    option: opt.SourceOptions = None,
    split: opt.Splits = None,
    backend: Annotated[
        Literal["exact", "faiss", "qdrant"],
        typer.Option(
            help="Vector search of the first stage. exact: compares all vectors. faiss: "
            "approximate, for more than a few hundred thousand items. qdrant: embedded, or a "
            "server with --backend-option url=…"
        ),
    ] = "exact",
    backend_option: Annotated[
        list[str] | None,
        typer.Option(
            "--backend-option",
            help="Option of the backend, as key=value, e.g. kind=ivfpq. Repeatable.",
        ),
    ] = None,
    api_key: opt.ApiKey = "",
    first_stage: Annotated[
        Literal["auto", "pooled", "fitted", "fde", "maxsim"],
        typer.Option(
            help="Vectors of the first stage. pooled: one per item. fitted: one per item, fitted "
            "to the matcher's scores. fde: one per item, which estimates maxsim. maxsim: one per "
            "fragment. auto: fitted for matchers of fragments, if that finds more than pooled."
        ),
    ] = "auto",
    first_stage_option: Annotated[
        list[str] | None,
        typer.Option(
            "--first-stage-option",
            help="Option of the first stage fde, as key=value: bits, repetitions, width, dim. "
            "Repeatable.",
        ),
    ] = None,
    retriever: Annotated[
        Path | None,
        typer.Option(
            "--retriever",
            callback=opt.find_models,
            help="Run whose vectors find the shortlist instead, e.g. for a cross-encoder. It must "
            "be a model that compares one vector per item.",
        ),
    ] = None,
    dtype: Annotated[
        Literal["float16", "float32", "int8", "binary"],
        typer.Option(
            help="Precision of vectors on disk. int8: half the size of float16. binary: int8, and "
            "1 bit per number to find candidates."
        ),
    ] = "float16",
    shortlist_size: Annotated[
        int,
        typer.Option(
            min=1, help="Candidates per query that the first stage passes on to the matcher."
        ),
    ] = 200,
    part: opt.PartOption = None,
    merge: opt.MergeOption = False,
    overwrite: opt.Overwrite = False,
    recall_queries: RecallQueries = 100,
    device: opt.Device = "auto",
    cache: opt.Cache = opt.CACHE,
    as_json: opt.Json = False,
) -> None:
    """Build a search index of a data set, or of a folder of photos, with the model of a run.

    Search has two stages: vectors find a shortlist, and the model's matcher ranks it. At the end,
    the results are compared with scoring every item, and the recall is printed. If it is too low,
    raise --shortlist-size.

    [bold]Examples[/]

      counterfoil index runs/scenes-naaf --split test --out index
      counterfoil index photos-vse my_photos/ --out index
      counterfoil index runs/naaf my_photos/ --out index --first-stage maxsim
      counterfoil index runs/naaf my_photos/ --out index --dtype binary
      counterfoil index runs/vse photos.jsonl --out index --backend faiss \\
        --backend-option kind=ivfpq
      counterfoil index runs/scenes-tags --retriever runs/scenes-vse-infty \\
        --out index
      counterfoil index runs/vse photos.jsonl --out index --part 1/4
      counterfoil index runs/vse photos.jsonl --out index --merge
      torchrun --nproc-per-node 4 -m counterfoil index runs/vse photos.jsonl \\
        --out index --part auto
    """
    opt.check_part(part, merge)
    check_inputs([run, retriever], pairs, format, photos=True)
    target = out or run / "index"
    if target.resolve().is_relative_to(model_folder(run).resolve()):
        raise ConfigError(
            f"{run}: a saved model, which would be refused with an index inside; name another "
            "folder with --out"
        )
    from counterfoil.core.distributed import read_in_turn
    from counterfoil.core.parts import AUTO, Part
    from counterfoil.search import SearchIndex
    from counterfoil.search.build import Settings, check_folder, check_settings
    from counterfoil.search.parts import MergedParts, PartSettings, encode_part
    from counterfoil.training.run_folder import load_model

    options = parse_options(backend_option, "--backend-option")
    options |= {"api_key": api_key} if api_key else {}
    fde_options = parse_options(first_stage_option, "--first-stage-option")
    if part is None:
        check_folder(target, overwrite)  # before features are extracted
    with opt.part_processes(part) as first:
        quiet = as_json or not first
        bars = progress(quiet)
        choice = DataChoice(pairs, format, option, cache, quiet=quiet)
        model = load_model(run, device)
        other = load_model(retriever, device) if retriever is not None else None
        chosen = Settings(backend, options, first_stage, dtype, shortlist_size, other, fde_options)

        def check(data: Pairs) -> None:  # before features are extracted
            check_settings(chosen, model, choice.named(data, split))

        data = read_in_turn(lambda: choice.read(run, split, photos=True, check=check))
        splits = choice.named(data, split)
        settings = PartSettings(model, other, dtype)
        if part is not None:
            made = encode_part(
                target,
                splits,
                Part.parse(part, os.environ),
                settings,
                overwrite=overwrite,
                progress=bars,
            )
            if part != AUTO:
                report_part(made, as_json)
                return
            opt.wait_for_parts()
            if not first:
                return
        parts = None
        if merge or part is not None:
            parts = MergedParts.open(target, splits, settings)  # before a folder is created
        index = SearchIndex.build(
            target,
            model,
            backend=backend,
            backend_options=options,
            first_stage=first_stage,
            first_stage_options=fde_options,
            retriever=other,
            fit_on=splits,
            progress=bars,
            dtype=dtype,
            shortlist_size=shortlist_size,
            overwrite=overwrite,
        )
        try:
            added = parts.add_to(index, bars) if parts else index.add(splits, progress=bars)
        except KeyboardInterrupt:
            same = ", with the same --split, --format and --option" if split or option else ""
            bars.say(
                "interrupted: the index has only some of the items; add the others with: "
                f"counterfoil index add {shlex.quote(str(target))} {shlex.quote(pairs or 'PAIRS')} "
                f"--existing skip{same}"
            )
            raise
    report_build(index, added, data, recall_queries, bars, as_json)


@index_app.command()
def add(
    index: opt.Index,
    pairs: Annotated[str, typer.Argument(help="Data set: a path or a name.")],
    format: opt.Format = None,
    option: opt.SourceOptions = None,
    split: opt.Splits = None,
    existing: Annotated[
        Literal["refuse", "skip", "update"],
        typer.Option(help="What to do with images whose id is already in the index."),
    ] = "refuse",
    api_key: opt.ApiKey = "",
    recall_queries: RecallQueries = 0,
    device: opt.Device = "auto",
    cache: opt.Cache = opt.CACHE,
    as_json: opt.Json = False,
) -> None:
    """Add images with their captions, or photos without any, without rebuilding the index.

    If interrupted, the index stays valid; continue with --existing skip.

    [bold]Example[/]

      counterfoil index add index new_photos/ --existing skip
    """
    check_index(index)
    check_inputs([], pairs, format, photos=True)
    opened = open_index(index, api_key, device)
    choice = DataChoice(pairs, format, option, cache, quiet=as_json)
    data = choice.read(index / "model", split, photos=True)
    splits = choice.named(data, split)
    bars = progress(quiet=as_json)
    added = opened.add(splits, existing=existing, progress=bars)
    report_build(opened, added, data, recall_queries, bars, as_json)


@index_app.command()
def remove(
    index: opt.Index,
    ids: Annotated[
        list[str], typer.Argument(help="Ids of images or captions; IMAGE#0 is a first caption.")
    ],
    api_key: opt.ApiKey = "",
    device: opt.Device = "auto",
    as_json: opt.Json = False,
) -> None:
    """Remove images with their captions, or single captions.

    [bold]Example[/]

      counterfoil index remove index beach.jpg 'dog.jpg#2'
    """
    opened = open_index(index, api_key, device)
    removed = opened.remove(ids)
    if as_json:
        print_json({"removed": removed, "images": len(opened)})
        return
    left = plural(len(opened), "image is", "images are")
    print_line(f"removed {plural(removed, 'item')}; {left} left")


@index_app.command()
def info(
    index: opt.Index,
    check: Annotated[
        bool, typer.Option("--check", help="Verify every file against its checksum.")
    ] = False,
    api_key: opt.ApiKey = "",
    as_json: opt.Json = False,
) -> None:
    """Show what an index contains, how it is searched, and its size.

    Exit code 3: --check found damaged files.

    [bold]Example[/]

      counterfoil index info index --check
    """
    from counterfoil.core.errors import DataError

    opened = open_index(index, api_key, "cpu")
    tree = opened.info()
    damaged = opened.check() if check else []
    if as_json:
        print_json({**tree, **({"damaged": damaged} if check else {})})
    else:
        print_info(tree)
    if damaged:
        raise DataError("\n".join(damaged))


@index_app.command()
def recall(
    index: opt.Index,
    queries: Annotated[int, typer.Option(min=1, help="Sampled queries per direction.")] = 100,
    shortlist_size: opt.ShortlistSize = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the sample.")] = 0,
    api_key: opt.ApiKey = "",
    device: opt.Device = "auto",
    as_json: opt.Json = False,
) -> None:
    """Measure the recall of two-stage search against scoring every item.

    Captions of the index are the queries for images, and images those for captions.

    [bold]Example[/]

      counterfoil index recall index --shortlist-size 50
    """
    opened = open_index(index, api_key, device)
    bars = progress(quiet=as_json)
    recalls = opened.recall(queries, shortlist_size=shortlist_size, seed=seed, progress=bars)
    if as_json:
        print_json([way.as_dict() for way in recalls])
    else:
        print_recall(recalls)


@index_app.command()
def compact(
    index: opt.Index,
    api_key: opt.ApiKey = "",
    device: opt.Device = "auto",
    as_json: opt.Json = False,
) -> None:
    """Reclaim the disk space of removed items.

    [bold]Example[/]

      counterfoil index compact index
    """
    opened = open_index(index, api_key, device)
    before = opened.info()["bytes"]
    opened.compact()
    if as_json:
        print_json({"bytes_before": before, "bytes": opened.info()["bytes"]})
    else:
        print_line(f"{before / 1e6:,.1f} MB before, {opened.info()['bytes'] / 1e6:,.1f} MB now")
