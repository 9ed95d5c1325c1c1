"""`counterfoil bench`: compositional benchmarks, with the scores of models that never look."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import counterfoil.cli.options as opt
from counterfoil.cli.inputs import check_inputs, check_picture
from counterfoil.cli.output import print_json, print_line, print_table, progress
from counterfoil.core.errors import ConfigError

if TYPE_CHECKING:
    from counterfoil.core.progress import Progress
    from counterfoil.evaluation.caption_model import CaptionModel
    from counterfoil.evaluation.compositional.model_scores import ModelScorer
    from counterfoil.evaluation.compositional.readers import Benchmark
    from counterfoil.evaluation.compositional.report import BenchmarkReport

SCENES = "scenes"


def bench(
    name: Annotated[
        str,
        typer.Argument(
            help="Benchmark: sugarcrepe, sugarcrepe++, valse, bivlc, cola, winoground, aro, foil "
            "(FOIL, nocaps-FOIL, HAT), or scenes (drawn here, needs no files)."
        ),
    ],
    data: Annotated[
        list[Path] | None, typer.Argument(help="Files of the benchmark, or folders of them.")
    ] = None,
    model: Annotated[
        list[Path] | None,
        typer.Option(
            "--model",
            "-m",
            callback=opt.find_models,
            help="Run, saved model or pretrained model to evaluate. Repeatable.",
        ),
    ] = None,
    images: Annotated[
        list[Path] | None,
        typer.Option("--images", help="Folder or tar shard with the images. Repeatable."),
    ] = None,
    blind: Annotated[
        Path | None,
        typer.Option(
            "--blind",
            help="Captions, one per line (may be .gz), for the language model that scores without "
            "images. Default: caption lengths only; for scenes, captions of other scenes.",
        ),
    ] = None,
    items: Annotated[
        int, typer.Option("--items", min=1, help="Items per kind (scenes only).")
    ] = 200,
    seed: Annotated[
        int, typer.Option(min=0, help="Random seed of the scenes and of the resamples.")
    ] = 0,
    bootstrap: Annotated[
        int, typer.Option(min=0, max=100_000, help="Bootstrap resamples; 0 for no intervals.")
    ] = 1000,
    out: opt.Picture = None,
    device: opt.Device = "auto",
    markdown: opt.Markdown = False,
    as_json: opt.Json = False,
) -> None:
    """Evaluate on a compositional benchmark: is the true caption preferred to a minimal change?

    Beside each model, with its words in order and shuffled, stand scores that use no image: how
    likely and how long a caption is, and chance. Without --model, only these are printed. BiVLC's
    per-item results of a model can be given as the data.

    [bold]Examples[/]

      counterfoil bench scenes --model scenes-naaf
      counterfoil bench sugarcrepe sugarcrepe/data --images coco/val2017 \\
        --model runs/a --model runs/b --blind captions.txt
      counterfoil bench valse valse/data --blind captions.txt.gz
      counterfoil bench bivlc BiVLC_ViT-B-32.csv
    """
    runs = model or []
    check_inputs(runs)
    check_picture(out)
    if name == SCENES and data:
        raise ConfigError("scenes are drawn here: leave out DATA, or name another benchmark")
    from counterfoil.evaluation.compositional.readers import refuse_twice

    refuse_twice(runs)
    bars = progress(quiet=as_json or markdown)
    benchmark = _benchmark(name, data or [], items, seed, bars)
    scorers = _models(benchmark, runs, images or [], device, bars)
    captions = _caption_model(name, blind, seed, bars)
    from counterfoil.evaluation.compositional.blind import BlindScorer
    from counterfoil.evaluation.compositional.report import evaluate_benchmark

    report = evaluate_benchmark(
        benchmark,
        [*scorers, BlindScorer(captions)],
        missing=[scorer.missing for scorer in scorers],
        language_model=captions.describe() if captions is not None else None,
        bootstrap=bootstrap,
        seed=seed,
    )
    if out is not None:
        from counterfoil.plots.charts import save_figure

        save_figure(report.chart(), out)
    _show(report, markdown, as_json)


def _benchmark(name: str, data: list[Path], items: int, seed: int, bars: Progress) -> Benchmark:
    if name == SCENES:
        from counterfoil.evaluation.compositional.drawn import scene_benchmark

        return scene_benchmark(items, seed, bars)
    from counterfoil.evaluation.compositional.readers import read_benchmark

    return read_benchmark(name, data)


def _models(
    benchmark: Benchmark, runs: list[Path], images: list[Path], device: str, bars: Progress
) -> list[ModelScorer]:
    """Scorers of the runs, named after their folders."""
    if not runs:
        return []
    if not images and not all(subset.pixels for subset in benchmark.subsets):
        raise ConfigError(
            f"{benchmark.name}: its files name images but do not have them; name the folder or the "
            "shards that have them with --images, or leave out --model"
        )
    from counterfoil.evaluation.compositional.model_scores import ImageStore, ModelScorer
    from counterfoil.training.run_folder import load_model

    store = ImageStore(images)
    names = [run.resolve().name for run in runs]
    return [
        ModelScorer(
            str(run) if names.count(name) > 1 else name, load_model(run, device), store, bars
        )
        for run, name in zip(runs, names, strict=True)
    ]


def _caption_model(name: str, blind: Path | None, seed: int, bars: Progress) -> CaptionModel | None:
    from counterfoil.evaluation.caption_model import CaptionModel

    if blind is not None:
        bars.say(f"training a language model on the captions of {blind}")
        return CaptionModel.read(blind)
    if name == SCENES:
        from counterfoil.evaluation.compositional.drawn import other_captions

        return CaptionModel(other_captions(seed, bars))
    return None


def _show(report: BenchmarkReport, markdown: bool, as_json: bool) -> None:
    if as_json:
        print_json(report.as_dict())
    elif markdown:
        typer.echo(report.to_markdown())
    else:
        print_line(report.headline(), style="bold")
        for title, rows in report.tables():
            print_table(rows, title=title)
        for note in report.footnotes():
            print_line(note)
