"""`counterfoil demo`: the main job on the embedded scenes, nothing to download."""

from __future__ import annotations

import time
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

if TYPE_CHECKING:
    from counterfoil.training.run import FinishedRun

DEMO_FOLDER = Path("runs/demo")

DEMO = {
    "data": {"source": "scenes", "min_count": 2, "drop_regions": 0.1},
    "model": {"name": "rvse-mlp", "embed_size": 128, "text": {"word_dim": 128}},
    "objective": {"hardest": {"warmup_epochs": 1}},
    "train": {
        "epochs": 6,
        "batch_size": 128,
        "optimiser": {"lr": 0.0015},
        "schedule": {"name": "cosine", "warmup_steps": 50},
    },
}


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Run folder.")] = DEMO_FOLDER,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs to train.")] = 6,
    images: Annotated[int, typer.Option(min=100, help="Scenes to draw, all splits.")] = 5000,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run there.")] = False,
    cache: Path = CACHE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Draw scenes, train a matcher on them, search both ways, write an HTML report.

    Needs no download and no GPU; a few minutes on two cores.
    """
    from counterfoil.config import build_config, merge
    from counterfoil.errors import ConfigError
    from counterfoil.training.run import clear_run, execute, holds_a_run

    started = time.monotonic()
    change = {"train": {"epochs": epochs}, "data": {"options": {"images": images}}}
    config = build_config(merge(DEMO, change), "demo")
    if holds_a_run(out):
        if out != DEMO_FOLDER and not overwrite:
            raise ConfigError(f"{out} already holds a run: --overwrite deletes it")
        clear_run(out)
    finished = execute(config, out, cache, progress=progress(quiet=as_json))
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
