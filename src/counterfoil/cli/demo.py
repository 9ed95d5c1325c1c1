"""`counterfoil demo`: the main job on the embedded scenes, nothing to download."""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from counterfoil.cli.output import (
    CACHE_OPTION,
    JSON_OPTION,
    console,
    print_json,
    print_table,
    progress,
)
from counterfoil.cli.train import ADVICE

if TYPE_CHECKING:
    from counterfoil.cli.output import Bars
    from counterfoil.data.pairs import Pairs
    from counterfoil.progress import Silent
    from counterfoil.training.run import FinishedRun

DEMO_FOLDER = Path("runs/demo")

DEMO = {
    "data": {"source": "scenes", "min_count": 2, "drop_regions": 0.1},
    "model": {"name": "naaf", "embed_size": 128, "text": {"word_dim": 128}},
    "objective": {"hardest": {"warmup_epochs": 1}},
    "train": {
        "epochs": 3,
        "batch_size": 128,
        "optimiser": {"lr": 0.0015},
        "schedule": {"name": "cosine", "warmup_steps": 50},
    },
}

# A TAGS-DC as small as it can be and still learn something in two minutes.
CORRECTOR = {
    "data": {"source": "scenes", "min_count": 2},
    "model": {
        "name": "uniter-small",
        "embed_size": 128,
        "image": {"dropout": 0.0},
        "text": {"positions": 64, "dropout": 0.0},
        "matcher": {
            "layers": 2,
            "heads": 4,
            "dropout": 0.0,
            "extras": ["mlm", "discrimination", "correction"],
        },
    },
    "objective": {
        "tags-dc": {
            "anchors": 64,
            "masks": 1,
            "samples": 2,
            "kept": 2,
            "mlm": 1.0,
            "rank": 1.0,
            "discrimination": 1.0,
            "correction": 1.0,
        }
    },
    "train": {
        "epochs": 3,
        "batch_size": 64,
        "optimiser": {"lr": 0.001, "betas": [0.9, 0.98]},
        "schedule": {"name": "linear", "warmup_steps": 100},
    },
}
HELD_OUT = 10


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Run folder.")] = DEMO_FOLDER,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs to train.")] = 3,
    images: Annotated[int, typer.Option(min=100, help="Scenes to draw, all splits.")] = 5000,
    corrector: Annotated[
        bool,
        typer.Option(
            "--corrector",
            help="Also train a small TAGS-DC, which suggests corrections; takes longer.",
        ),
    ] = False,
    serve: Annotated[
        bool, typer.Option(help="End with the page; without a terminal it never does.")
    ] = True,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the page.")] = 8000,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run there.")] = False,
    cache: Path = CACHE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Draw scenes, train a matcher on them, search both ways, open the page.

    Needs no download and no GPU; a few minutes on two cores.
    """
    from counterfoil.config import build_config, merge
    from counterfoil.training.run import execute
    from counterfoil.training.run_folder import locked_run

    started = time.monotonic()
    change = {"train": {"epochs": epochs}, "data": {"options": {"images": images}}}
    beside = _beside(out)
    bars = progress(quiet=as_json)
    with locked_run(out, ADVICE), locked_run(beside, ADVICE) if corrector else nullcontext():
        _make_room(out, overwrite)
        if corrector:
            _make_room(beside, overwrite)
        finished = execute(build_config(merge(DEMO, change), "demo"), out, cache, progress=bars)
        if corrector:
            _train_corrector(finished.pairs, images, beside, bars)
    assert finished.report is not None  # noqa: S101 - nothing interrupts the demo but a signal
    if as_json:
        print_json({"report": str(finished.page), "results": finished.report.as_dict()})
        return
    print_table(finished.report.rows(), title=finished.report.headline())
    _searches(finished)
    console().print(
        f"\n{time.monotonic() - started:.0f} s in all. Open the report, with the pictures: "
        f"[bold]{finished.page}[/]\nTry a sentence of your own: counterfoil score {out} IMAGE.png "
        '-t "a small red car next to a tree"',
        highlight=False,
    )
    _end_at_the_page(out, beside if corrector else None, serve, port, cache)


def _make_room(folder: Path, overwrite: bool) -> None:
    from counterfoil.training.run_folder import make_room

    of_a_demo = folder in (DEMO_FOLDER, _beside(DEMO_FOLDER))
    make_room(folder, overwrite or of_a_demo, "--overwrite deletes it")


def _beside(run: Path) -> Path:
    """Where the corrector of a demo goes."""
    return run.parent / f"{run.name}-corrector"


def _train_corrector(pairs: Pairs, images: int, folder: Path, bars: Bars | Silent) -> None:
    """Train on the same scenes; few are held out, as it reads every pair at length."""
    import torch

    from counterfoil.config import build_config, merge
    from counterfoil.models import create_model
    from counterfoil.training.loop import Trainer

    bars.say("a small TAGS-DC, to suggest corrections")
    few = {name: pairs[name].select(range(HELD_OUT)) for name in ("dev", "test")}
    pairs = replace(pairs, splits={**pairs.splits, **few})
    change = {"data": {"options": {"images": images}}}
    config = build_config(merge(CORRECTOR, change), "demo")
    torch.manual_seed(config.seed)
    model = create_model(config.model, pairs.train, config.data)
    model.fragments_from = pairs.train.fragments.made_by if pairs.train.fragments else None
    Trainer(model, pairs, config, folder, bars).run()


def _end_at_the_page(
    run: Path, corrector: Path | None, wanted: bool, port: int, cache: Path
) -> None:
    """Serve, where somebody is there to look; else say how to."""
    more = f" --corrector {corrector}" if corrector is not None else ""
    watched = sys.stdin.isatty() and sys.stdout.isatty() and not os.environ.get("CI")
    installed = all(find_spec(name) for name in ("fastapi", "uvicorn", "python_multipart"))
    if not (wanted and watched and installed):
        console().print(f"Open the page: counterfoil serve {run}{more}", highlight=False)
        return
    from counterfoil.cli.serve import serve

    serve(run, corrector=corrector, port=port, cache=cache)


def _searches(finished: FinishedRun) -> None:
    assert finished.gallery is not None  # noqa: S101
    split = finished.pairs[finished.report.split]  # type: ignore[union-attr]
    out = console()
    out.print("\n[bold]Searching images with a sentence[/]")
    for search in finished.gallery.text_to_image:
        out.print(f"  “{split.texts[search.query]}”", highlight=False, markup=False)
        for hit in search.hits[:3]:
            mark = "✓" if hit.right else " "
            out.print(f"    {mark} {hit.score:6.3f}  {split.ids[hit.index]}", highlight=False)
    out.print("\n[bold]Searching sentences with an image[/]")
    for search in finished.gallery.image_to_text:
        out.print(f"  {split.ids[search.query]}", highlight=False, markup=False)
        for hit in search.hits[:3]:
            mark = "✓" if hit.right else " "
            text = split.texts[hit.index]
            out.print(f"    {mark} {hit.score:6.3f}  {text}", highlight=False, markup=False)
