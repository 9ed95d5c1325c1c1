"""`counterfoil guide`: what trained runs think of all pairs of the data, to guide another run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from counterfoil.cli.output import (
    CACHE_OPTION,
    JSON_OPTION,
    check_inputs,
    console,
    print_json,
    print_table,
    progress,
)

if TYPE_CHECKING:
    from counterfoil.training.guides.manifest import Manifest


guide_app = typer.Typer(
    help="Build and look at guides: scores of trained runs that guide another (NDGL).",
    no_args_is_help=True,
)


@guide_app.command()
def build(
    runs: Annotated[
        list[Path], typer.Argument(help="Trained runs on the same data; their scores are averaged.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the guide.")],
    form: Annotated[
        Literal["matrix", "embeddings"] | None,
        typer.Option(
            help="matrix: every score on disk; embeddings: what the runs' matchers compare. "
            "By default a matrix up to 1 GB."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    cache: Path = CACHE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Let runs score their training data, to guide others by objective.ndgl.guide.

    Killed at any moment, the same command continues where it was.

    [bold]Example[/]

      counterfoil guide build runs/a runs/b --out guides/ab
      counterfoil train scenes/chan objective.ndgl.guide=guides/ab
    """
    check_inputs(runs)
    from counterfoil.core.tensors.device import choose_device
    from counterfoil.training.guides.build import build_guide
    from counterfoil.training.run_data import shared_train_split

    bars = progress(quiet=as_json)
    place = choose_device(device)
    split = shared_train_split(runs, cache, bars)
    manifest = build_guide(out, runs, split, form=form, device=place, progress=bars)
    _show(out, manifest, as_json)


@guide_app.command()
def show(
    guide: Annotated[Path, typer.Argument(help="Folder of a guide.")],
    as_json: bool = JSON_OPTION,
) -> None:
    """Say what a guide is made of, how large it is and whether it is finished."""
    from counterfoil.training.guides.manifest import read_manifest

    _show(guide, read_manifest(guide), as_json)


def _show(folder: Path, manifest: Manifest, as_json: bool) -> None:
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if as_json:
        tree = manifest.model_dump()
        print_json({"folder": str(folder), "bytes": size, "done": manifest.share_done, **tree})
        return
    state = "complete" if manifest.complete else f"{manifest.share_done:.0%} done"
    rows = [[t.run, t.model, t.weights_sha256[:12]] for t in manifest.teachers]
    print_table(
        [["teacher", "model", "weights"], *rows], title=f"{folder}: {manifest.form}, {state}"
    )
    data = manifest.data
    features = f"{data.features.fragments} × {data.features.dim}"
    console().print(
        f"{data.images:,} images ({features} features), {data.captions:,} captions, "
        f"{size / 1e6:,.1f} MB",
        highlight=False,
    )
