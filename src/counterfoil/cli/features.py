"""`counterfoil features`: photos to fragments that every other command reads."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from counterfoil.cli.output import (
    CACHE_OPTION,
    JSON_OPTION,
    FormatOption,
    SourceOptions,
    console,
    parse_options,
    print_json,
    progress,
)
from counterfoil.core.storage.atomic import DEFAULT_CACHE

if TYPE_CHECKING:
    from counterfoil.core.progress import Progress
    from counterfoil.data import Pairs
    from counterfoil.features.build import FeatureReport


FEW = 5
"""Captions or images of one kind of problem that are named."""


def features(
    pairs: Annotated[str, typer.Argument(help="A data set's path or name, or a folder of photos.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")],
    backbone: Annotated[
        str | None,
        typer.Option(
            "--backbone",
            "-b",
            help="efficientnet-lite, transformers, timm:NAME, onnx, crops, joined, pixels or "
            "segments.",
        ),
    ] = None,
    backbone_option: Annotated[
        list[str] | None,
        typer.Option(
            "--backbone-option", help="Option of the backbone: key=value; repeatable (variant=2)."
        ),
    ] = None,
    format: FormatOption = None,
    option: SourceOptions = None,
    to: Annotated[str, typer.Option("--to", help="Layout: scan, jsonl or shards.")] = "scan",
    images: Annotated[
        bool, typer.Option("--images/--no-images", help="Copy the images along.")
    ] = True,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Threads (for segments: processes) that decode images."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 3 if any image fails or is missing.")
    ] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace what is in the folder.")] = False,
    cache: Path = CACHE_OPTION,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Neither read nor write cached features.")
    ] = False,
    as_json: bool = JSON_OPTION,
) -> None:
    """Turn images into fragments with boxes: a data set with precomputed features.

    Features are cached by the content of each image: another split, table or subset of the same
    photos extracts nothing again, and interrupted work goes on where it stopped (size of the cache,
    and how to clear it: counterfoil data cache). Images that cannot be read are left out and
    counted; exit code 3 means that a split has none that can be read (--strict: not all can).

    [bold]Examples[/]

      counterfoil features photos/captions.csv --out photos-lite0
      counterfoil features flickr8k/ -b efficientnet-lite --backbone-option variant=2 -o lite2
      counterfoil features coco/ -b transformers --backbone-option model=dinov2-base -o coco-dinov2
    """
    from counterfoil.data.formats.base import HASHED
    from counterfoil.features.build import build_features, check_choices, default_backbone

    bars = progress(quiet=as_json)
    name = backbone or default_backbone()
    if backbone is None and name == "segments":
        bars.say(
            "no weights are installed: taking 'segments', which needs none "
            '(better: pip install "counterfoil[vision]")'
        )
    options = parse_options(option or [])
    backbone_options = parse_options(backbone_option or [], "--backbone-option")
    check_choices(name, backbone_options, to)
    _refuse_backbone_options(options, name)
    data = _read(pairs, format, options, cache, bars)
    for problem in data.problems:
        if problem.kind == HASHED:
            bars.say(f"note: {problem.message}")
    report = build_features(
        data,
        out,
        name,
        backbone_options,
        format=to,
        images=images,
        overwrite=overwrite,
        cache_dir=None if no_cache else cache,
        device=device,
        workers=workers,
        progress=bars,
    )
    if as_json:
        print_json(report.as_dict())
    else:
        _show(report)
    missing = any(problem.kind == "missing-image" for problem in report.left_out)
    if strict and (report.failed or missing):
        raise typer.Exit(3)


def _refuse_backbone_options(options: dict[str, Any], backbone: str) -> None:
    """--option is for the data, as in all commands: say so if it was meant for the backbone."""
    from counterfoil.core.errors import ConfigError
    from counterfoil.data.formats import named_sources, sources
    from counterfoil.features.extractors import extractors, split_full_name

    name, _ = split_full_name(backbone)
    known = {key for kind in (sources, named_sources) for one in kind for key in kind.options(one)}
    for key in options:
        if name in extractors and key in extractors.options(name) and key not in known:
            raise ConfigError(
                f"--option {key}: options of the backbone '{name}' are set with --backbone-option "
                f"{key}=…; --option is for the data"
            )


def _read(
    source: str, format: str | None, options: dict[str, Any], cache: Path, bars: Progress
) -> Pairs:
    """A data set or, where the path is none but a folder of images, those without captions."""
    from counterfoil.data import load_pairs
    from counterfoil.data.formats import sources
    from counterfoil.data.load import is_named
    from counterfoil.features.build import is_photo_folder, read_photos

    path = Path(source)
    if format is None and not is_named(source, None) and path.is_dir():
        known = any(sources[name].matches(path) for name in sources)
        if not known and is_photo_folder(path):
            return read_photos(path)
    return load_pairs(source, format, options=options, cache_dir=cache, progress=bars)


def _show(report: FeatureReport) -> None:
    from counterfoil.features.cache import CLEAR

    out = console()
    _show_left_out(report)
    for problem in report.failed[:20]:
        out.print(f"{problem.severity.value:>5}  {problem}", markup=False, highlight=False)
    if len(report.failed) > 20:
        out.print(f"… and {len(report.failed) - 20} more (all of them: features.json)")
    made = report.manifest["features"]
    splits = report.manifest["splits"]
    images = ", ".join(f"{name} {split['images']:,}" for name, split in splits.items())
    out.print(
        f"{report.written.target}: {report.manifest['extractor']['name']}, {images} images of "
        f"{made['fragments']} × {made['dim']}, {len(report.failed)} failed, "
        f"{report.written.bytes / 1e6:,.1f} MB, {report.seconds:,.1f} s",
        highlight=False,
        markup=False,
    )
    folder = report.cache.folder
    if folder is not None:
        where = "" if folder == DEFAULT_CACHE else f" --cache {shlex.quote(str(folder))}"
        out.print(
            f"cache: {report.cache}; {report.cache.bytes / 1e6:,.1f} MB of features in {folder} "
            f"(to delete them: {CLEAR}{where})",
            highlight=False,
            markup=False,
        )


def _show_left_out(report: FeatureReport) -> None:
    """Captions and images that are not in the result: counts, and the first few of each kind."""
    from counterfoil.data.pairs import count_kinds

    out = console()
    for kind, count in count_kinds(report.left_out).items():
        named = [problem for problem in report.left_out if problem.kind == kind][:FEW]
        out.print(f"left out, {kind}: {count:,}", style="yellow", highlight=False, markup=False)
        for problem in named:
            out.print(f"  {problem}", highlight=False, markup=False)
        if count > len(named):
            out.print(f"  … and {count - len(named):,} more (all of them: features.json)")
