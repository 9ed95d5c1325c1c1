"""`counterfoil data`: look at data sets, convert them, draw scenes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from counterfoil.cli.output import (
    CACHE_OPTION,
    JSON_OPTION,
    FormatOption,
    SourceOptions,
    console,
    parse_options,
    print_json,
    print_table,
    progress,
)
from counterfoil.core.printable import printable

if TYPE_CHECKING:
    from counterfoil.data import Inspection
    from counterfoil.data.splits import Leakage


data_app = typer.Typer(help="Look at data sets, convert them, draw scenes.", no_args_is_help=True)

SOURCE = typer.Argument(help="A path, or the name of a data set ('scenes').")


@data_app.command()
def inspect(
    source: Annotated[str, SOURCE],
    format: FormatOption = None,
    option: SourceOptions = None,
    shallow: Annotated[
        bool, typer.Option("--shallow", help="Do not decode images or read features.")
    ] = False,
    limit: Annotated[int, typer.Option(min=0, help="Problems to list; 0: all.")] = 50,
    cache: Path = CACHE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Say what a data set holds, and list everything that is wrong with it, with its place.

    Exit code 3 means that something fatal was found: training would refuse the data.

    [bold]Examples[/]

      counterfoil data inspect scenes
      counterfoil data inspect f30k_precomp --json
      counterfoil data inspect photos/captions.csv
    """
    from counterfoil.data import inspect as look

    found = look(
        source,
        format,
        options=parse_options(option or []),
        deep=not shallow,
        cache_dir=cache,
        progress=progress(quiet=as_json),
    )
    if as_json:
        print_json(found.as_dict())
    else:
        _show(found, limit)
    if not found.usable:
        raise typer.Exit(3)


def _show(found: Inspection, limit: int) -> None:
    rows = [
        ["split", "images", "captions", "per image", "words", "vocabulary", "fragments", "pixels"]
    ]
    for name, split in found.splits.items():
        each, words = split.captions_per_image, split.words_per_caption
        fragments = split.fragments
        rows.append(
            [
                name,
                f"{split.images:,}",
                f"{split.captions:,}",
                f"{each['min']:g}–{each['max']:g}" if each else "–",
                f"{words['mean']:.1f} (max {words['max']:g})" if words else "–",
                f"{split.vocabulary:,}",
                f"{fragments['max']} × {fragments['dim']} {fragments['dtype']}"
                if fragments
                else "–",
                "yes" if split.has_pixels else "no",
            ]
        )
    print_table(rows, title=found.source)
    _show_duplicates(found)
    colours = {"fatal": "bold red", "skip": "yellow", "note": "cyan"}
    order = list(colours)
    # What stops the work comes first: thousands of images to be skipped may precede it.
    problems = sorted(found.problems, key=lambda problem: order.index(problem.severity.value))
    shown = problems if limit == 0 else problems[:limit]
    for problem in shown:
        level = problem.severity.value
        console().print(
            f"{level:>5}  {problem}", style=colours[level], markup=False, highlight=False
        )
    if len(found.problems) > len(shown):
        console().print(f"… and {len(found.problems) - len(shown)} more (--limit 0 lists them all)")
    counts = {level: sum(p.severity.value == level for p in found.problems) for level in colours}
    for shared in found.leakage:
        _show_leakage(shared)
    if found.dev_set_aside is not None:
        from counterfoil.data.splits import describe

        line = f"in training, {describe(*found.dev_set_aside)}"
        console().print(line, style="cyan", highlight=False, markup=False)
    console().print(
        f"{counts['fatal']} fatal, {counts['skip']} to be skipped, {counts['note']} notes",
        highlight=False,
    )


def _show_duplicates(found: Inspection) -> None:
    """Per split, the captions that also stand at another image."""
    for name, split in found.splits.items():
        counts, total = split.duplicate_captions, max(1, split.captions)
        line = (
            f"captions of '{name}' that another image has, too: {counts.exact:,} word for word "
            f"({counts.exact / total:.1%}), {counts.near:,} nearly ({counts.near / total:.1%})"
        )
        console().print(printable(line), highlight=False, markup=False)


def _show_leakage(shared: Leakage) -> None:
    counts = {"ids": shared.ids, "captions": shared.captions, "similar images": shared.images}
    listed = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    if listed:
        one, other = shared.splits
        line = printable(f"'{one}' and '{other}' share {listed}")
        console().print(line, style="yellow", highlight=False, markup=False)


@data_app.command()
def convert(
    source: Annotated[str, SOURCE],
    target: Annotated[Path, typer.Argument(help="Folder to write.")],
    to: Annotated[str, typer.Option("--to", help="scan, jsonl or shards.")] = "jsonl",
    format: FormatOption = None,
    option: SourceOptions = None,
    features: Annotated[
        str | None,
        typer.Option(help="Extract features with this extractor first ('segments')."),
    ] = None,
    shard_size: Annotated[int, typer.Option(min=1, help="Images per shard.")] = 1000,
    overwrite: Annotated[bool, typer.Option(help="Replace what is in the folder.")] = False,
    cache: Path = CACHE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Write a data set in another layout, without loss.

    [bold]Examples[/]

      counterfoil data convert dataset_flickr8k.json flickr8k-shards --to shards
      counterfoil data convert scenes scenes-scan --to scan --features segments
    """
    from counterfoil.data import convert as write
    from counterfoil.data import load_pairs

    bars = progress(quiet=as_json)
    pairs = load_pairs(
        source, format, options=parse_options(option or []), cache_dir=cache, progress=bars
    )
    if features is not None:
        from counterfoil.features import with_fragments

        pairs = with_fragments(pairs, cache, features, {}, bars)
    report = write(pairs, target, to, overwrite=overwrite, progress=bars, shard_size=shard_size)
    if as_json:
        print_json(report.as_dict())
        return
    for problem in [*pairs.problems, *report.problems][:20]:
        console().print(f"{problem.severity.value:>5}  {problem}", markup=False, highlight=False)
    images = ", ".join(f"{name} {count:,}" for name, count in report.images.items())
    console().print(
        f"{report.target}: {report.format}, {images} images, "
        f"{sum(report.captions.values()):,} captions, {report.files:,} files, "
        f"{report.bytes / 1e6:,.1f} MB",
        highlight=False,
    )


@data_app.command()
def scenes(
    target: Annotated[Path, typer.Argument(help="Folder to write.")],
    images: Annotated[int, typer.Option(min=10, help="Images, over all splits.")] = 5000,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, other scenes.")] = 0,
    captions: Annotated[int, typer.Option(min=1, help="Captions per image.")] = 5,
    to: Annotated[str, typer.Option("--to", help="scan, jsonl or shards.")] = "jsonl",
    overwrite: Annotated[bool, typer.Option(help="Replace what is in the folder.")] = False,
    cache: Path = CACHE_OPTION,
) -> None:
    """Draw scenes with captions and full ground truth, as many as wanted.

    [bold]Example[/]

      counterfoil data scenes my-scenes --images 100000 --seed 7 --to shards
    """
    from counterfoil.data import convert as write
    from counterfoil.data import load_pairs

    bars = progress()
    options = {"images": images, "seed": seed, "captions": captions}
    pairs = load_pairs("scenes", options=options, cache_dir=cache, progress=bars)
    report = write(pairs, target, to, overwrite=overwrite, progress=bars)
    console().print(
        f"{report.target}: {sum(report.images.values()):,} images, "
        f"{sum(report.captions.values()):,} captions, {report.bytes / 1e6:,.1f} MB",
        highlight=False,
    )


@data_app.command()
def cache(
    clear: Annotated[
        bool, typer.Option("--clear", help="Delete cached features, and nothing else.")
    ] = False,
    folder: Path = CACHE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """List cached features of images by extractor, with their size, or delete them.

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
    line = f"{line}, {deleted / 1e6:,.1f} MB deleted" if clear else line
    console().print(printable(line), highlight=False, markup=False)
