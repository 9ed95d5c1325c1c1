"""`counterfoil features`: photos to fragments that every other command reads."""

from __future__ import annotations

import os
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import counterfoil.cli.options as opt
from counterfoil.cli.inputs import parse_options
from counterfoil.cli.output import print_json, print_left_out, print_line, progress
from counterfoil.cli.signals import interruptible

if TYPE_CHECKING:
    from counterfoil.core.progress import Progress
    from counterfoil.data import Pairs
    from counterfoil.features.build import FeatureReport
    from counterfoil.features.parts import PartReport


def features(
    pairs: Annotated[
        str, typer.Argument(help="Data set (a path or a name), or a folder of photos.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")],
    backbone: Annotated[
        str | None,
        typer.Option(
            "--backbone",
            "-b",
            help="efficientnet-lite, transformers, timm:NAME, onnx, crops, joined, pixels or "
            "segments (`counterfoil models --kind 'feature extractors'`). Default: "
            "efficientnet-lite if its weights are installed, else segments.",
        ),
    ] = None,
    backbone_option: Annotated[
        list[str] | None,
        typer.Option(
            "--backbone-option",
            help="Option of the backbone, as key=value, e.g. variant=2. Repeatable.",
        ),
    ] = None,
    format: opt.Format = None,
    option: opt.SourceOptions = None,
    to: opt.Layout = "scan",
    no_images: Annotated[
        bool, typer.Option("--no-images", help="Do not copy the images into the new data set.")
    ] = False,
    device: opt.Device = "auto",
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Threads that decode images (segments: processes). Default: one per core.",
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Exit with 3 if any image is missing or unreadable."),
    ] = False,
    part: opt.PartOption = None,
    merge: opt.MergeOption = False,
    overwrite: opt.Overwrite = False,
    cache: opt.Cache = opt.CACHE,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Neither read nor write cached features.")
    ] = False,
    as_json: opt.Json = False,
) -> None:
    """Extract features of images with boxes, and write a data set that contains them.

    Features are cached by image content: other splits or tables of the same photos extract nothing
    again, and an interrupted command continues when repeated (`counterfoil data cache` shows and
    clears the cache). Unreadable images are skipped and counted. Exit code 3: no image of a split
    could be read (with --strict: not every image could).

    [bold]Examples[/]

      counterfoil features photos/captions.csv --out photos-lite0
      counterfoil features flickr8k/ -b efficientnet-lite \\
        --backbone-option variant=2 -o lite2
      counterfoil features coco/ -b transformers \\
        --backbone-option model=dinov2-base -o coco-dinov2
      counterfoil features coco/ -o coco-lite0 --part 1/4
      counterfoil features coco/ -o coco-lite0 --merge
      torchrun --nproc-per-node 4 -m counterfoil features coco/ \\
        -o coco-lite0 --part auto
    """
    opt.check_part(part, merge)
    from counterfoil.core.parts import AUTO, Part
    from counterfoil.core.storage.atomic import check_folder_target
    from counterfoil.data.convert import DATA_SET_FILES
    from counterfoil.data.formats.base import HASHED, PARTLY_HASHED
    from counterfoil.data.formats.table import UNRELATED, UNUSED
    from counterfoil.features.build import build_features, check_choices, default_backbone
    from counterfoil.features.parts import extract_part

    bars = progress(quiet=as_json)
    name = backbone or default_backbone()
    if backbone is None and name == "segments":
        bars.say(
            "no pretrained backbone is installed: using 'segments', which needs no weights "
            '(better: pip install "counterfoil[vision]")'
        )
    options = parse_options(option)
    backbone_options = parse_options(backbone_option, "--backbone-option")
    check_choices(name, backbone_options, to)
    _refuse_backbone_options(options, name)
    # a part does not replace OUT yet; --merge may be given with --overwrite
    again = overwrite or part not in (None, AUTO)
    check_folder_target(out, overwrite=again, replaceable=DATA_SET_FILES)
    data = _read(pairs, format, options, cache, bars)
    for problem in data.problems:
        if problem.kind in (HASHED, PARTLY_HASHED):
            bars.say(f"note: {problem.message}")
        elif problem.kind in (UNRELATED, UNUSED):
            bars.say(f"note: {problem}")
    how: dict[str, Any] = {"device": device, "workers": workers, "overwrite": overwrite}
    keeps_what_is_done = part is not None or not no_cache
    with opt.part_processes(part) as first, interruptible(bars, lambda: keeps_what_is_done):
        if part is not None:
            extract = partial(extract_part, data, out, backbone=name, options=backbone_options)
            bars = progress(quiet=as_json or not first)
            made = extract(part=Part.parse(part, os.environ), **how, progress=bars)
            if part != AUTO:
                _show_part(made, as_json)
                return
            opt.wait_for_parts()
            if not first:
                return
        report = build_features(
            data,
            out,
            name,
            backbone_options,
            format=to,
            images=not no_images,
            cache_dir=None if no_cache else cache,
            merge=merge or part is not None,
            progress=bars,
            **how,
        )
    if as_json:
        print_json(report.as_dict())
    else:
        _show(report)
    missing = any(problem.kind == "missing-image" for problem in report.left_out)
    if strict and (report.failed or missing):
        raise typer.Exit(3)


def _refuse_backbone_options(options: dict[str, Any], backbone: str) -> None:
    """Refuse an --option that is one of the backbone: --option is for the data, as elsewhere."""
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
    """A data set or, if the path is a plain folder of images, these without captions."""
    from counterfoil.data import load_pairs
    from counterfoil.data.photos import has_only_photos, read_photos

    if has_only_photos(source, format, options):
        return read_photos(Path(source))
    return load_pairs(source, format, options=options, cache_dir=cache, progress=bars)


def _show_part(report: PartReport, as_json: bool) -> None:
    if as_json:
        print_json(report.as_dict())
        return
    print_line(
        f"{report.folder}: {report.part} is complete, {report.images:,} images, "
        f"{report.use.extracted:,} extracted now, {report.failed} failed; when all parts are: the "
        "same command with --merge"
    )


def _show(report: FeatureReport) -> None:
    from counterfoil.features.cache import CLEAR

    print_left_out(report.left_out, "features.json lists all")
    for problem in report.failed[:20]:
        print_line(f"{problem.severity.value:>5}  {problem}")
    if len(report.failed) > 20:
        print_line(f"… and {len(report.failed) - 20} more (features.json lists all)")
    made = report.manifest["features"]
    splits = report.manifest["splits"]
    images = ", ".join(f"{name} {split['images']:,}" for name, split in splits.items())
    print_line(
        f"{report.written.target}: {report.manifest['extractor']['name']}, {images} images of "
        f"{made['fragments']} × {made['dim']}, {len(report.failed)} failed, "
        f"{report.written.bytes / 1e6:,.1f} MB, {report.seconds:,.1f} s"
    )
    folder = report.cache.folder
    if folder is not None:
        where = "" if folder == opt.CACHE else f" --cache {shlex.quote(str(folder))}"
        print_line(
            f"cache: {report.cache}; {report.cache.bytes / 1e6:,.1f} MB of features in {folder} "
            f"(to delete them: {CLEAR}{where})"
        )
