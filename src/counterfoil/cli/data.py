"""`counterfoil data`: inspect and convert data sets, generate scenes, manage the feature cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import counterfoil.cli.options as opt
from counterfoil.cli.inputs import parse_options
from counterfoil.cli.output import print_json, print_line, print_table, progress
from counterfoil.core.printable import plural

if TYPE_CHECKING:
    from counterfoil.data import Inspection
    from counterfoil.data.inspect import SplitSummary
    from counterfoil.data.splits import Leakage


data_app = typer.Typer(
    help="Inspect and convert data sets, generate scenes, manage the feature cache.",
    no_args_is_help=True,
)

SourceArgument = Annotated[str, typer.Argument(help="Path of a data set, or its name ('scenes').")]
TargetArgument = Annotated[Path, typer.Argument(help="Folder to write.")]


@data_app.command()
def inspect(
    source: SourceArgument,
    format: opt.Format = None,
    option: opt.SourceOptions = None,
    shallow: Annotated[
        bool,
        typer.Option("--shallow", help="Faster: do not decode images or read feature values."),
    ] = False,
    limit: Annotated[int, typer.Option(min=0, help="Problems to list; 0: all.")] = 50,
    cache: opt.Cache = opt.CACHE,
    as_json: opt.Json = False,
) -> None:
    """Summarize a data set and list every problem in it, with file and line.

    Exit code 3: a problem is fatal, so training would refuse the data.

    [bold]Examples[/]

      counterfoil data inspect scenes
      counterfoil data inspect f30k_precomp --json
      counterfoil data inspect photos/captions.csv
    """
    from counterfoil.data import inspect as look

    inspection = look(
        source,
        format,
        options=parse_options(option),
        deep=not shallow,
        cache_dir=cache,
        progress=progress(quiet=as_json),
    )
    if as_json:
        print_json(inspection.as_dict())
    else:
        _show(inspection, limit)
    if not inspection.usable:
        raise typer.Exit(3)


def _show(inspection: Inspection, limit: int) -> None:
    header = ["split", "images", "captions", "per image", "words", "vocabulary", "fragments"]
    rows = [_row(name, split) for name, split in inspection.splits.items()]
    print_table([[*header, "pixels"], *rows], title=inspection.source)
    for name, split in inspection.splits.items():
        counts, total = split.duplicate_captions, max(1, split.captions)
        print_line(
            f"captions of '{name}' shared with another image: {counts.exact:,} word for word "
            f"({counts.exact / total:.1%}), {counts.near:,} nearly ({counts.near / total:.1%})"
        )
    colors = {"fatal": "bold red", "skip": "yellow", "note": "cyan"}
    levels = list(colors)
    # Fatal problems first: thousands of skipped images may precede them.
    problems = sorted(inspection.problems, key=lambda one: levels.index(one.severity.value))
    listed = problems if limit == 0 else problems[:limit]
    for problem in listed:
        level = problem.severity.value
        print_line(f"{level:>5}  {problem}", style=colors[level])
    if len(problems) > len(listed):
        print_line(f"… and {len(problems) - len(listed)} more (--limit 0 lists all)")
    for leakage in inspection.leakage:
        _show_leakage(leakage)
    if inspection.dev_set_aside is not None:
        from counterfoil.data.splits import describe

        print_line(f"in training, {describe(*inspection.dev_set_aside)}", style="cyan")
    fatal, skipped, notes = (sum(p.severity.value == one for p in problems) for one in levels)
    print_line(f"{fatal} fatal, {skipped} skipped, {plural(notes, 'note')}")


def _row(name: str, split: SplitSummary) -> list[str]:
    each, words, fragments = split.captions_per_image, split.words_per_caption, split.fragments
    return [
        name,
        f"{split.images:,}",
        f"{split.captions:,}",
        f"{each['min']:g}–{each['max']:g}" if each else "–",
        f"{words['mean']:.1f} (max {words['max']:g})" if words else "–",
        f"{split.vocabulary:,}",
        f"{fragments['max']} × {fragments['dim']} {fragments['dtype']}" if fragments else "–",
        "yes" if split.has_pixels else "no",
    ]


def _show_leakage(leakage: Leakage) -> None:
    counts = {"id": leakage.ids, "caption": leakage.captions, "similar image": leakage.images}
    listed = ", ".join(plural(count, what) for what, count in counts.items() if count)
    if listed:
        one, other = leakage.splits
        print_line(f"'{one}' and '{other}' share {listed}", style="yellow")


@data_app.command()
def convert(
    source: SourceArgument,
    target: TargetArgument,
    to: opt.Layout = "jsonl",
    format: opt.Format = None,
    option: opt.SourceOptions = None,
    features: Annotated[
        str | None,
        typer.Option(
            help="Extract features with this extractor first, e.g. segments. Default: convert the "
            "data as they are."
        ),
    ] = None,
    shard_size: Annotated[
        int, typer.Option(min=1, help="Images per shard (layout shards only).")
    ] = 1000,
    overwrite: opt.Overwrite = False,
    cache: opt.Cache = opt.CACHE,
    as_json: opt.Json = False,
) -> None:
    """Write a data set in another file layout, without loss.

    [bold]Examples[/]

      counterfoil data convert dataset_flickr8k.json flickr8k-shards --to shards
      counterfoil data convert scenes scenes-scan --to scan --features segments
    """
    from counterfoil.data import convert as write
    from counterfoil.data import load_pairs

    bars = progress(quiet=as_json)
    pairs = load_pairs(
        source, format, options=parse_options(option), cache_dir=cache, progress=bars
    )
    if features is not None:
        from counterfoil.features import with_fragments

        pairs = with_fragments(pairs, cache, features, {}, bars)
    report = write(pairs, target, to, overwrite=overwrite, progress=bars, shard_size=shard_size)
    if as_json:
        print_json(report.as_dict())
        return
    for problem in [*pairs.problems, *report.problems][:20]:
        print_line(f"{problem.severity.value:>5}  {problem}")
    images = ", ".join(f"{name} {count:,}" for name, count in report.images.items())
    print_line(
        f"{report.target}: {report.format}, {images} images, "
        f"{sum(report.captions.values()):,} captions, {report.files:,} files, "
        f"{report.bytes / 1e6:,.1f} MB"
    )


@data_app.command()
def scenes(
    target: TargetArgument,
    images: Annotated[int, typer.Option(min=10, help="Images over all splits.")] = 5000,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the scenes.")] = 0,
    captions: Annotated[int, typer.Option(min=1, help="Captions per image.")] = 5,
    to: opt.Layout = "jsonl",
    overwrite: opt.Overwrite = False,
    cache: opt.Cache = opt.CACHE,
) -> None:
    """Generate drawn scenes with captions and full ground truth.

    [bold]Example[/]

      counterfoil data scenes my-scenes --images 100000 --seed 7 --to shards
    """
    from counterfoil.data import convert as write
    from counterfoil.data import load_pairs

    bars = progress()
    options = {"images": images, "seed": seed, "captions": captions}
    pairs = load_pairs("scenes", options=options, cache_dir=cache, progress=bars)
    report = write(pairs, target, to, overwrite=overwrite, progress=bars)
    print_line(
        f"{report.target}: {sum(report.images.values()):,} images, "
        f"{sum(report.captions.values()):,} captions, {report.bytes / 1e6:,.1f} MB"
    )


@data_app.command()
def cache(
    clear: Annotated[
        bool,
        typer.Option("--clear", help="Delete all cached features; scenes and models stay."),
    ] = False,
    folder: opt.Cache = opt.CACHE,
    as_json: opt.Json = False,
) -> None:
    """List cached image features per extractor with their size, or delete them.

    [bold]Examples[/]

      counterfoil data cache
      counterfoil data cache --clear
    """
    from counterfoil.features.cache import cache_bytes, cache_contents, clear_cache

    contents = cache_contents(folder)
    deleted = clear_cache(folder) if clear else 0
    size = cache_bytes(folder)
    if as_json:
        listed = [vars(one) for one in contents]
        print_json({"folder": folder, "bytes": size, "deleted": deleted, "extractors": listed})
        return
    if contents and not clear:
        rows = [[c.name, f"{c.images:,}", f"{c.bytes / 1e6:,.1f}", c.extractor] for c in contents]
        print_table([["features", "images", "MB", "extractor"], *rows], words=(0, 3))
    line = f"{folder}: {size / 1e6:,.1f} MB of features"
    print_line(f"{line}, {deleted / 1e6:,.1f} MB deleted" if clear else line)
