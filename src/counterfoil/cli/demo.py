"""`counterfoil demo`: a pretrained model on generated scenes, or on your photos."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import counterfoil.cli.options as opt
from counterfoil.cli.output import console, print_json, print_line, print_table, progress
from counterfoil.cli.signals import ENDED_BY

if TYPE_CHECKING:
    from counterfoil.app.content import AwaitedAudit, Content
    from counterfoil.cli.demo_background import Message
    from counterfoil.cli.demo_stages import AuditResult, Demo, Example, ScenesResult
    from counterfoil.core.progress import Progress
    from counterfoil.evaluation.report import RetrievalReport


DEMO_FOLDER = Path("runs/demo")
MATCHER, CORRECTOR = "scenes-naaf", "scenes-corrector"
TRAIN_SCENES, DEV_SCENES, TEST_SCENES, EPOCHS = 600, 100, 500, 3
HOST = "127.0.0.1"

SMALL_MODEL: dict[str, Any] = {
    "data": {"source": "scenes", "min_count": 2, "drop_regions": 0.1},
    "model": {"name": "naaf", "embed_size": 128, "text": {"word_dim": 128}},
    "objective": {"hardest": {"warmup_epochs": 1}},
    "train": {
        # NAAF scores all pairs of a batch: smaller batches give more steps for the same time.
        "batch_size": 32,
        "optimizer": {"lr": 0.0015},
        "schedule": {"name": "cosine", "warmup_steps": 50},
    },
}


def demo(
    context: typer.Context,
    photos: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PHOTOS]",
            help="Folder of photos to search and explain, with or without captions. "
            "Default: generated scenes.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help=f"Folder to write: the run of the small model, with -audit and -index beside it. "
            f"Default: {DEMO_FOLDER}; for photos, {DEMO_FOLDER}-NAME-HASH.",
        ),
    ] = None,
    scenes: Annotated[
        int, typer.Option(min=20, help="Test scenes to draw and search.")
    ] = TEST_SCENES,
    train_scenes: Annotated[
        int, typer.Option(min=50, help="Scenes on which the small model is trained.")
    ] = TRAIN_SCENES,
    epochs: Annotated[
        int, typer.Option(min=1, help="Training epochs of the small model.")
    ] = EPOCHS,
    serve: Annotated[
        bool, typer.Option(help="Serve the web page (only if run in a terminal).")
    ] = True,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the web page.")] = 8000,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Make everything again, replacing what is in --out.")
    ] = False,
    cache: opt.Cache = opt.CACHE,
    as_json: opt.Json = False,
) -> None:
    """Try a pretrained model on generated scenes, or on your own photos.

    Prints how well it retrieves 500 scenes and serves a web page to search, explain and audit.
    Meanwhile a small model trains from nothing; its curve is on the page. Without a terminal it
    trains, prints both results, and exits. Needs no download and no GPU. If interrupted, repeat the
    command to continue.

    With PHOTOS, it extracts features of all photos in the folder (once), and serves them for
    search. Captions beside the photos are audited. Needs the extra "vision".

    [bold]Examples[/]

      counterfoil demo
      counterfoil demo my-photos/
      counterfoil demo --no-serve --json
    """
    started = time.monotonic()
    bars = progress(quiet=as_json)
    page_port = port if serve and not as_json and _can_serve() else None
    try:
        if photos is not None:
            _refuse_scene_options(context)
            from counterfoil.cli.demo_photos import demo_photos

            folder, replaces = out or _library_folder(photos), overwrite or out is None
            demo_photos(photos, folder, cache, bars, page_port, as_json, overwrite=replaces)
            return
        with _scenes_prepared(scenes, cache, bars):
            own = _new_demo(out or DEMO_FOLDER, scenes, train_scenes, epochs, cache, bars)
            own.may_delete = overwrite or out is None
            own.clear(overwrite)
            if page_port is not None:
                own.discard_other_audit()
                import counterfoil.app.application  # noqa: F401 - one import less to wait for later
        _run(own, page_port, as_json, started)
    except KeyboardInterrupt:
        bars.say("interrupted; repeat the command to continue")
        raise typer.Exit(ENDED_BY[signal.SIGINT]) from None


def _refuse_scene_options(context: typer.Context) -> None:
    from counterfoil.core.errors import ConfigError

    for name in ("scenes", "train_scenes", "epochs"):
        if opt.given(context, name):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option}: only for generated scenes; leave out either {option} or PHOTOS"
            )


def _library_folder(photos: Path) -> Path:
    """Where the library of a folder is written; the hash separates folders of one name."""
    path = photos.resolve()
    digest = sha256(os.fsencode(path)).hexdigest()[:8]
    return DEMO_FOLDER.with_name(f"demo-{path.name or 'photos'}-{digest}")


@contextmanager
def _scenes_prepared(scenes: int, cache: Path, bars: Progress) -> Iterator[None]:
    """Draw and segment the test scenes into the cache, while the block imports torch.

    If that fails, whoever reads the scenes next makes them, and reports the error.
    """
    forks = "fork" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if forks else None)
    process = context.Process(target=_prepare_scenes, args=(scenes, cache, bars))
    process.start()
    try:
        yield
        process.join()
    finally:
        if process.is_alive():
            process.terminate()
            process.join()


def _prepare_scenes(scenes: int, cache: Path, bars: Progress) -> None:
    from counterfoil.core.parallel import end_with_parent
    from counterfoil.data.load import load_pairs
    from counterfoil.features import with_fragments

    end_with_parent()
    with suppress(Exception, KeyboardInterrupt, SystemExit):
        pairs = load_pairs("scenes", options=_options(scenes), cache_dir=cache, progress=bars)
        with_fragments(pairs, cache, "segments", {}, bars)


def _options(scenes: int) -> dict[str, Any]:
    """Options of the data set "scenes" for test scenes alone, which no recipe trains on."""
    return {"images": [0, 0, scenes]}


def _new_demo(
    folder: Path, scenes: int, train_scenes: int, epochs: int, cache: Path, bars: Progress
) -> Demo:
    from counterfoil.cli.demo_stages import Demo
    from counterfoil.core.config import build_config, merge

    images = [train_scenes, min(DEV_SCENES, train_scenes), scenes]
    config = merge(
        SMALL_MODEL, {"data": {"options": {"images": images}}, "train": {"epochs": epochs}}
    )
    return Demo(
        config=build_config(config, "demo"),
        folder=folder,
        cache=cache,
        data=_options(scenes),
        matcher=MATCHER,
        corrector=CORRECTOR,
        progress=bars,
    )


def _run(demo: Demo, port: int | None, as_json: bool, started: float) -> None:
    """The stages of a demo: in this process or, with a page, the slow ones beside it.

    ``started`` is when the command was called, by `time.monotonic`.
    """
    tested = demo.test()
    if not as_json:
        _show_test(tested, demo, time.monotonic() - started)
    if port is not None:
        demo.index(tested)
        _serve(demo, port)
        return
    audited = demo.audit()
    if not as_json:
        _show_audit(audited, demo)
        print_line(_training_line(demo))
    trained = demo.train()
    if as_json:
        print_json(_as_dict(tested, audited, trained, demo))
        return
    demo.index(tested)
    _show_trained(trained, demo)
    print_line(f"Open the web page: {_serve_command(demo)}")


def _serve(demo: Demo, port: int) -> None:
    """Serve the page; meanwhile audit and train in a process of its own, which ends with it."""
    from counterfoil.app.application import serve
    from counterfoil.app.content import AwaitedAudit
    from counterfoil.cli.demo_background import Background
    from counterfoil.cli.serve import print_address

    awaited = AwaitedAudit(demo.audit_folder)
    background = Background(demo, lambda message: _show_message(message, demo, awaited))

    def ready(address: str) -> None:
        background.start()
        print_address(address)
        print_line("Meanwhile planted errors are audited (see the Audit tab), and")
        print_line(f"{_training_line(demo)} (see the Runs tab).")

    try:
        serve(_content(demo, awaited), HOST, port, on_ready=ready)
    except KeyboardInterrupt:  # how a page is left
        raise typer.Exit(ENDED_BY[signal.SIGINT]) from None
    finally:
        if background.end():
            demo.progress.say("the training was stopped; repeat the command to continue")


def _content(demo: Demo, awaited: AwaitedAudit) -> Content:
    """What the page shows: the test scenes, an audit to come, and the run of the small model."""
    from counterfoil.app.content import open_content
    from counterfoil.app.runs import Runs
    from counterfoil.core.zoo import resolve

    content = open_content(
        resolve(demo.matcher, cache=demo.cache),
        index=demo.index_folder,
        corrector=resolve(demo.corrector, cache=demo.cache),
        cache=demo.cache,
        progress=demo.progress,
    )
    return replace(content, runs=Runs([demo.folder]), awaited_audit=awaited)


def _serve_command(demo: Demo) -> str:
    options = {
        "index": demo.index_folder,
        "corrector": demo.corrector,
        "audit": demo.audit_folder,
        "runs": demo.folder.parent,
    }
    parts = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return shlex.join(["counterfoil", "serve", demo.matcher, *parts])


def _can_serve() -> bool:
    """Whether somebody watches, and the extra "app" is installed."""
    watched = sys.stdin.isatty() and sys.stdout.isatty() and not os.environ.get("CI")
    return watched and all(find_spec(name) for name in ("fastapi", "uvicorn", "python_multipart"))


# --- what is printed ---


def _show_message(message: Message, demo: Demo, awaited: AwaitedAudit) -> None:
    """The result of a stage beside the page; a failure is one line."""
    from counterfoil.cli.demo_background import TRAINING, Failure
    from counterfoil.cli.demo_stages import AuditResult

    if isinstance(message, Failure):
        if message.stage != TRAINING:
            awaited.problem = message.reason
        print_line(f"{message.stage} failed: {message.reason}", style="yellow")
    elif isinstance(message, AuditResult):
        _show_audit(message, demo)
    else:
        _show_trained(message, demo)


def _show_test(result: ScenesResult, demo: Demo, seconds: float) -> None:
    print_line(
        f"{demo.matcher}, a pretrained model, on test scenes that it was not trained on "
        "(the test split of the data set “scenes”, seed 0):"
    )
    print_table(result.retrieval.rows(), title=result.retrieval.headline())
    _print_searches("Images found with a sentence", result.by_text)
    _print_searches("Captions found with an image", result.by_image)
    print_line("")
    print_line(f"First results ready after {seconds:.0f} s.")
    print_line("")


def _print_searches(title: str, examples: Sequence[Example]) -> None:
    console().print(f"\n[bold]{title}[/]")
    for example in examples:
        print_line(f"  {example.query}")
        for right, score, item in example.hits[:3]:
            mark = "✓" if right else " "
            print_line(f"    {mark} {score:6.3f}  {item}")


def _show_audit(result: AuditResult, demo: Demo) -> None:
    print_table(result.planted_rows(), title="Planted errors", words=(0, 2, 3, 4, 5, 6))
    print_table(result.measure_rows())
    print_line(result.audit_sentence())
    print_line(result.correction_sentence())
    print_line(f"Report with pictures: {demo.audit_folder / 'index.html'}")
    print_line("")


def _training_line(demo: Demo) -> str:
    (scenes, _, tested), epochs = demo.config.data.options["images"], demo.config.train.epochs
    passes = "1 epoch" if epochs == 1 else f"{epochs:,} epochs"
    # the time was measured with the default numbers
    quick = scenes <= TRAIN_SCENES and tested <= TEST_SCENES and epochs <= EPOCHS
    time = ": less than 2 minutes on two cores" if quick else ""
    return f"a small NAAF trains from nothing on {scenes:,} scenes, {passes}{time}"


def _show_trained(report: RetrievalReport, demo: Demo) -> None:
    print_line("The small model, trained from nothing, on the same test scenes:")
    print_table(report.rows(), title=report.headline())
    times = report.rsum / report.rsum_chance
    print_line(f"RSUM is {times:.0f} times chance. Report: {demo.folder / 'report.html'}")
    print_line(
        f"Try a sentence of your own: counterfoil score {demo.folder} IMAGE.png "
        '-t "a small red car next to a tree"'
    )


def _as_dict(
    tested: ScenesResult, audited: AuditResult, trained: RetrievalReport, demo: Demo
) -> dict[str, Any]:
    return {
        "report": str(demo.folder / "report.html"),
        "results": tested.retrieval.as_dict(),
        "audit": {"folder": str(demo.audit_folder), **audited.as_dict()},
        "trained": trained.as_dict(),
    }
