"""`counterfoil demo`: train, search and audit on generated scenes, nothing to download."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import counterfoil.cli.options as opt
from counterfoil.cli.output import console, print_json, print_line, print_table, progress
from counterfoil.cli.signals import ENDED_BY
from counterfoil.cli.train import ADVICE

if TYPE_CHECKING:
    from counterfoil.cli.demo_stages import Demo, DemoResult, Example


DEMO_FOLDER = Path("runs/demo")

DEMO = {
    "data": {"source": "scenes", "min_count": 2, "drop_regions": 0.1},
    "model": {"name": "naaf", "embed_size": 128, "text": {"word_dim": 128}},
    "objective": {"hardest": {"warmup_epochs": 1}},
    "train": {
        "epochs": 3,
        # NAAF scores all pairs of a batch: smaller batches give more steps for the same time.
        "batch_size": 32,
        "optimizer": {"lr": 0.0015},
        "schedule": {"name": "cosine", "warmup_steps": 50},
    },
}

# A small TAGS-DC from scratch. Without an objective that contrasts captions of other images, it
# learns which captions are likely whatever the image shows, and retrieves nothing.
CORRECTOR = {
    "data": {"source": "scenes", "min_count": 2},
    "model": {
        "name": "uniter-small",
        "embed_size": 96,
        "image": {"dropout": 0.0},
        "text": {"positions": 64, "dropout": 0.0},
        "matcher": {
            "layers": 2,
            "heads": 4,
            "dropout": 0.0,
            "output": "logit",
            "alike": True,
            "extras": ["mlm", "discrimination", "correction"],
        },
    },
    "objective": {
        "alignment": {"kept": 2, "alone": 1},
        "tags-dc": {
            "masks": 1,
            "samples": 2,
            "kept": 2,
            "margin": 1.0,
            "mlm": 1.0,
            "rank": 1.0,
            "discrimination": 1.0,
            "correction": 1.0,
            "epochs": [1, None],
        },
    },
    "train": {
        "epochs": 8,
        "batch_size": 64,
        "optimizer": {"lr": 0.002, "betas": [0.9, 0.98]},
        "schedule": {"name": "linear", "warmup_steps": 100},
    },
}


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Run folder to write.")] = DEMO_FOLDER,
    epochs: Annotated[int, typer.Option(min=1, help="Training epochs.")] = 3,
    images: Annotated[
        int, typer.Option(min=100, help="Scenes to generate, over all splits.")
    ] = 2500,
    corrector: Annotated[
        bool,
        typer.Option(
            "--corrector",
            help="Also train a small TAGS-DC, which suggests corrections; takes longer.",
        ),
    ] = False,
    serve: Annotated[
        bool,
        typer.Option(help="Serve the web page at the end (only if run in a terminal)."),
    ] = True,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the web page.")] = 8000,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Train again, replacing a run in the folder.")
    ] = False,
    cache: opt.Cache = opt.CACHE,
    as_json: opt.Json = False,
) -> None:
    """Try everything on generated scenes: train, search, find planted errors, open the web page.

    Takes a few minutes on two CPU cores; needs no download and no GPU. If interrupted, repeat the
    command to continue. A finished demo is shown again without training.

    [bold]Examples[/]

      counterfoil demo
      counterfoil demo --corrector --no-serve
    """
    from counterfoil.cli.demo_stages import INTERRUPTED_NOTE, Demo
    from counterfoil.core.config import build_config, merge
    from counterfoil.core.storage.locks import locked_folder
    from counterfoil.training.run_folder import clear_run, holds_a_run, locked_run

    started = time.monotonic()
    data = {"data": {"options": {"images": images}}}
    bars = progress(quiet=as_json)
    own = Demo(
        matcher=build_config(merge(merge(DEMO, data), {"train": {"epochs": epochs}}), "demo"),
        corrector=build_config(merge(CORRECTOR, data), "demo") if corrector else None,
        folder=out,
        cache=cache,
        progress=bars,
        may_delete=overwrite or out == DEMO_FOLDER,
    )
    with ExitStack() as locks:
        locks.enter_context(locked_run(out, ADVICE))
        locks.enter_context(locked_folder(own.audit_folder, "writing an audit there", ADVICE))
        if corrector:
            locks.enter_context(locked_run(own.corrector_folder, ADVICE))
        result = None if overwrite else own.finished()
        if result is not None:
            bars.say(f"{out}: already finished with these settings; --overwrite trains it again")
        else:
            if overwrite:
                for folder in (out, own.corrector_folder) if corrector else (out,):
                    if holds_a_run(folder):
                        clear_run(folder)
            own.clear()
            try:
                result = own.make()
            except KeyboardInterrupt:
                bars.say(INTERRUPTED_NOTE)
                raise typer.Exit(ENDED_BY[signal.SIGINT]) from None
    _show(result, own, time.monotonic() - started, as_json)
    if not as_json:
        helper = own.corrector_folder if "corrector" in result.configs else None
        _end_at_the_page(out, helper, own.audit_folder, serve, port, cache)


def _show(result: DemoResult, demo: Demo, seconds: float, as_json: bool) -> None:
    page = demo.folder / "report.html"
    if as_json:
        print_json(
            {
                "report": str(page),
                "results": result.retrieval.as_dict(),
                "audit": {
                    "folder": str(demo.audit_folder),
                    "threshold": result.threshold,
                    "measures": result.measures.as_dict(),
                    "planted": [one.as_dict() for one in result.planted],
                },
                "corrections": result.corrections and result.corrections.as_dict(),
            }
        )
        return
    print_table(result.retrieval.rows(), title=result.retrieval.headline())
    _print_searches("Images found with a sentence", result.by_text)
    _print_searches("Captions found with an image", result.by_image)
    print_line("")
    print_table(result.planted_rows(), title="Planted errors", words=(0, 2, 3, 4, 5))
    print_table(result.measure_rows())
    for sentence in (result.audit_sentence(), result.correction_sentence()):
        print_line(sentence)
    print_line("")
    print_line(f"{seconds:.0f} s in total. Report with pictures: {page}")
    print_line(
        f"Try a sentence of your own: counterfoil score {demo.folder} IMAGE.png "
        '-t "a small red car next to a tree"'
    )


def _print_searches(title: str, examples: Sequence[Example]) -> None:
    console().print(f"\n[bold]{title}[/]")
    for example in examples:
        print_line(f"  {example.query}")
        for right, score, item in example.hits[:3]:
            mark = "✓" if right else " "
            print_line(f"    {mark} {score:6.3f}  {item}")


def _end_at_the_page(
    run: Path, corrector: Path | None, audit: Path, wanted: bool, port: int, cache: Path
) -> None:
    """Serve the page if there is a terminal; else print the command that does."""
    more = f" --corrector {corrector}" if corrector is not None else ""
    watched = sys.stdin.isatty() and sys.stdout.isatty() and not os.environ.get("CI")
    installed = all(find_spec(name) for name in ("fastapi", "uvicorn", "python_multipart"))
    if not (wanted and watched and installed):
        print_line(f"Open the web page: counterfoil serve {run}{more} --audit {audit}")
        return
    from counterfoil.cli.serve import serve

    serve(run, corrector=corrector, audit=audit, port=port, cache=cache)
