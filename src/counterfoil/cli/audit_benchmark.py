"""`counterfoil audit benchmark`: how well an audit and other methods find planted errors."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import counterfoil.cli.options as opt
from counterfoil.cli.inputs import check_inputs, parse_options
from counterfoil.cli.output import print_json, print_line, print_table, progress
from counterfoil.core.errors import ConfigError

if TYPE_CHECKING:
    from counterfoil.audit.noise_benchmark import Source
    from counterfoil.audit.noise_tables import Cell
    from counterfoil.core.config import RunConfig
    from counterfoil.core.progress import Progress
    from counterfoil.data.pairs import Split
    from counterfoil.models.model import Model

OUT = Path("runs") / "audit-benchmark"
SCENES = "scenes"
SMOKE = ["model.embed_size=32", "train.epochs=1", "train.batch_size=32"]
IMAGES = {"full": None, "smoke": 60}
SCENE_IMAGES = {"full": 1000, "smoke": 60}


def benchmark(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Config overrides of the self-trained model: train.epochs=5"),
    ] = None,
    data: Annotated[
        str, typer.Option("--data", help="'scenes' (drawn), or the path of a data set.")
    ] = SCENES,
    format: opt.Format = None,
    option: opt.SourceOptions = None,
    split: Annotated[
        str, typer.Option("--split", help="Split whose captions get errors and are audited.")
    ] = "train",
    model: Annotated[
        list[Path] | None,
        typer.Option(
            "--model",
            "-m",
            callback=opt.find_models,
            help="Run, saved model or pretrained model to audit with. Repeatable. Default: a model "
            "trained on the noisy captions.",
        ),
    ] = None,
    self_trained: Annotated[
        bool,
        typer.Option(
            "--self-trained", help="Also audit with a model trained on the noisy captions."
        ),
    ] = False,
    recipe: Annotated[
        str, typer.Option("--recipe", help="Recipe of the self-trained model.")
    ] = "scenes/vse-infty",
    folds: Annotated[
        list[int] | None,
        typer.Option(
            "--folds",
            min=1,
            help="Self-trained models per cell: each scores images that it was not trained on. 1: "
            "one model, trained on all. Repeatable. Default: 1.",
        ),
    ] = None,
    noise: Annotated[
        list[str] | None,
        typer.Option(
            "--noise",
            help="random (a caption of another image), noun (one that shares a noun) or word (a "
            "word exchanged). Repeatable. Default: all three.",
        ),
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(
            "--rate",
            help="Share of wrong captions. Repeatable. Default: 0.4.",
        ),
    ] = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(
            "--seed",
            min=0,
            help="Random seed of the noise and of the training. Repeatable. Default: 0, 1 and 2.",
        ),
    ] = None,
    one_caption: Annotated[
        bool,
        typer.Option("--one-caption", help="Use one caption per image, as LEMoN's protocol does."),
    ] = False,
    donors: Annotated[
        str | None,
        typer.Option(
            "--donors",
            help="Split whose captions replace others, so that wrong captions have no copy. "
            "Default: the audited split, as in LEMoN's protocol, where a caption that is planted "
            "also stays at its own image.",
        ),
    ] = None,
    images: Annotated[
        int | None,
        typer.Option("--images", min=10, help="Images to use, evenly spaced. Default: all."),
    ] = None,
    examine: Annotated[
        int, typer.Option(min=2, help="Captions that the audit examines word by word, at most.")
    ] = 5000,
    scale: Annotated[
        Literal["full", "smoke"],
        typer.Option("--scale", help="smoke: few images and a tiny model, for a quick check."),
    ] = "full",
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder of results; its cells are reused.")
    ] = OUT,
    collect: Annotated[
        bool,
        typer.Option(
            "--collect",
            help="Write the results of all cells in --out, as of several processes, and measure "
            "nothing.",
        ),
    ] = False,
    render_page: Annotated[
        Path | None,
        typer.Option(
            "--render-page",
            help="Rewrite the tables of this Markdown page from the results in --out, and measure "
            "nothing.",
        ),
    ] = None,
    tune_lemon: Annotated[
        bool,
        typer.Option(
            "--tune-lemon",
            help="Print LEMoN's weights with the best mean F1 over the noises, rates and seeds, "
            "and measure nothing. Needs one --model, a dev split, and seeds of its own.",
        ),
    ] = False,
    device: opt.Device = "auto",
    cache: opt.Cache = opt.CACHE,
    markdown: opt.Markdown = False,
    as_json: opt.Json = False,
) -> None:
    """Plant errors into captions, and measure how well an audit and other methods find them.

    Compared with the same model: the audit, by default and tuned on labels, the similarity alone,
    LEMoN's multimodal neighbors, and NCR's mixture of losses. Every cell (model, noise, rate, seed)
    is stored in --out: an interrupted command continues when repeated. results.json has all cells,
    results.md the tables, and one .svg per table and model the precision at each recall.

    [bold]Examples[/]

      counterfoil audit benchmark
      counterfoil audit benchmark --scale smoke --noise random --seed 0
      counterfoil audit benchmark --model scenes-naaf --split test
      counterfoil audit benchmark --model scenes-naaf --split test --donors train
      counterfoil audit benchmark --data lite2-36 --recipe flickr8k/gpo \\
        --folds 1 --folds 3 --rate 0.4 --rate 0.05 train.optimizer.lr=3e-3
      counterfoil audit benchmark --data lite2-36 --split dev --model photos-vse \\
        --rate 0.4 --rate 0.1 --seed 10 --seed 11 --tune-lemon
    """
    runs = model or []
    if tune_lemon:
        without_effect = {
            "--collect": collect,
            "--render-page": render_page is not None,
            "--self-trained": self_trained,
            "--folds": bool(folds),
            "--donors": donors is not None,
            "config overrides": bool(overrides),
        }
        _check_tuning(runs, [name for name, is_given in without_effect.items() if is_given])
    if collect or render_page is not None:
        _collect(out, render_page)
        return
    check_inputs(runs, data, format)
    quiet = as_json or markdown
    bars = progress(quiet=quiet)
    if runs and data == SCENES:
        bars.say("note: measured on drawn scenes; --data names the data of your own")
    tail = SMOKE if scale == "smoke" else []
    config = _config(recipe, [*tail, *(overrides or [])], device)
    options = parse_options(option)
    from counterfoil.audit.noise import NOISES, check_noise
    from counterfoil.data.load import load_pairs
    from counterfoil.data.splits import evenly_spaced

    noises, rates = noise or [n for n in NOISES if donors is None or n != "word"], rate or [0.4]
    if donors is not None and "word" in noises:
        raise ConfigError("--donors: noise 'word' changes captions in place; leave it out")
    if donors == split:
        raise ConfigError(f"--donors {donors}: is the audited split itself; name another one")
    for kind, share in product(noises, rates):
        check_noise(kind, share)
    if data == SCENES and not options:
        count = images or SCENE_IMAGES[scale]
        used = (split, donors)
        options = {"images": [count if name in used else 4 for name in ("train", "dev", "test")]}
    pairs = load_pairs(data, format, options=options, cache_dir=cache, progress=bars)
    lenders = None if donors is None else pairs[donors]
    chosen = _with_features(
        evenly_spaced(pairs[split], images or IMAGES[scale]), pairs.name, runs, cache, bars
    )
    seeds = seed or [0, 1, 2]
    if tune_lemon:
        _tune_lemon(runs[0], chosen, noises, rates, seeds, one_caption, device, bars, as_json)
        return
    from counterfoil.audit.noise_benchmark import Benchmark, read_cells
    from counterfoil.audit.noise_tables import write_results

    counts = folds or ([] if runs and not self_trained else [1])
    task = Benchmark(
        split=chosen,
        sources=_sources(runs, config, counts, device, cache),
        noises=noises,
        rates=rates,
        seeds=seeds,
        out=out,
        examined=examine,
        one_caption=one_caption,
        donors=lenders,
        data=data if data == SCENES else Path(data).name,
    )
    cells = task.run(bars)
    write_results(out, read_cells(out), drawn=cells)
    _show(cells, out, markdown, as_json)


def _config(recipe: str, overrides: list[str], device: str) -> RunConfig:
    from counterfoil.core.config import load_config
    from counterfoil.core.unread_options import refuse_unread

    config = load_config(recipe, [f"train.device={device}", *overrides])
    refuse_unread(config)
    return config


def _with_features(
    chosen: Split, name: str, runs: list[Path], cache: Path, bars: Progress
) -> Split:
    """The images to audit, with features of the kind that the first model reads."""
    from counterfoil.data.pairs import Pairs
    from counterfoil.features import with_fragments
    from counterfoil.training.run_folder import load_model

    readers = [load_model(run, "cpu") for run in runs]
    for run, other in zip(runs, readers, strict=True):
        if _features(other) != _features(readers[0]):
            raise ConfigError(
                f"--model {run}: reads features {_features(other)}, but {runs[0]} reads "
                f"{_features(readers[0])}; give models with the same features, or one at a time"
            )
    reader = readers[0] if readers else None
    extractor = "segments" if reader is None else reader.fragments_from or "segments"
    settings = {} if reader is None else reader.fragments_options
    # features of these images only: to extract those of all others may take hours
    alone = Pairs(name, {chosen.name: chosen})
    return with_fragments(alone, cache, extractor, settings, bars)[chosen.name]


def _features(model: Model) -> str:
    """The kind of image features that a model reads, in words."""
    options = ", ".join(f"{key}={value}" for key, value in sorted(model.fragments_options.items()))
    source = model.fragments_from or "precomputed"
    return f"'{source}{f' ({options})' if options else ''}' of dimension {model.input_dim}"


def _sources(
    runs: list[Path], config: RunConfig, folds: list[int], device: str, cache: Path
) -> list[Source]:
    from counterfoil.audit.noise_benchmark import Given, SelfTrained
    from counterfoil.training.run_folder import load_model

    names = [run.resolve().name for run in runs]
    if len(set(names)) < len(names):
        raise ConfigError(f"--model: expected different names, got {', '.join(names)}")
    given = [Given(name, load_model(run, device)) for name, run in zip(names, runs, strict=True)]
    return [*given, *(SelfTrained(config, count, cache) for count in folds)]


def _check_tuning(runs: list[Path], without_effect: list[str]) -> None:
    if len(runs) != 1:
        raise ConfigError(f"--tune-lemon: expected one --model, got {len(runs)}")
    if without_effect:
        raise ConfigError(
            f"--tune-lemon trains and writes nothing; leave out {', '.join(without_effect)}"
        )


def _tune_lemon(
    run: Path,
    split: Split,
    noises: list[str],
    rates: list[float],
    seeds: list[int],
    one_caption: bool,
    device: str,
    bars: Progress,
    as_json: bool,
) -> None:
    from dataclasses import asdict

    from counterfoil.audit.detection import tune_on_noise
    from counterfoil.training.run_folder import load_model

    model = load_model(run, device)
    weights, f1 = tune_on_noise(
        model, split, noises, rates, seeds, one_caption=one_caption, progress=bars
    )
    if as_json:
        print_json({"weights": asdict(weights), "f1": f1})
        return
    print_line(
        f"LEMoN on {split.name}: β = {weights.by_image:g}, γ = {weights.by_caption:g}, "
        f"τ₁ = {weights.near:g}, τ₂ = {weights.match:g} (mean of the best F1: {f1:.1f})"
    )


def _collect(out: Path, page: Path | None) -> None:
    from counterfoil.audit.noise_benchmark import read_cells
    from counterfoil.audit.noise_tables import fill_page, write_results

    cells = read_cells(out)
    if page is not None:
        folder = os.path.relpath(out, page.parent)
        typer.echo(f"{page}: {fill_page(page, cells, folder)} tables written")
        return
    write_results(out, cells, drawn=cells)
    typer.echo(f"{out}: {len(cells)} cells")


def _show(cells: list[Cell], out: Path, markdown: bool, as_json: bool) -> None:
    from counterfoil.audit.noise_tables import groups, rows, table_title, to_markdown

    if as_json:
        print_json([cell.as_dict() for cell in cells])
    elif markdown:
        typer.echo(to_markdown(cells))
    else:
        for group, own in groups(cells).items():
            print_table(rows(own), title=table_title(group, own), words=(0, 1))
        print_line(f"results: {out}")
