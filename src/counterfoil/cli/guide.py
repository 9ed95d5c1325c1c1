"""`counterfoil guide`: scores of trained runs for all training pairs, to guide another run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import counterfoil.cli.options as opt
from counterfoil.cli.inputs import check_inputs
from counterfoil.cli.output import print_json, print_line, print_table, progress
from counterfoil.core.errors import ConfigError

if TYPE_CHECKING:
    from counterfoil.training.guides.manifest import Manifest


guide_app = typer.Typer(
    help="Precompute teacher scores for NDGL from trained runs.", no_args_is_help=True
)


@guide_app.command()
def build(
    runs: Annotated[
        list[Path],
        typer.Argument(
            callback=opt.find_models,
            help="Teachers: runs trained on the same data. Scores are averaged.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Guide folder to write.")],
    form: Annotated[
        Literal["matrix", "embeddings"] | None,
        typer.Option(
            help="matrix: store every score. embeddings: store the encoded items and compute "
            "scores during training. Default: matrix if it takes at most 1 GB."
        ),
    ] = None,
    device: opt.Device = "auto",
    cache: opt.Cache = opt.CACHE,
    as_json: opt.Json = False,
) -> None:
    """Precompute teacher scores of the training split, for objective.ndgl.guide.

    If interrupted, repeat the same command to continue.

    [bold]Example[/]

      counterfoil guide build runs/a runs/b --out guides/ab
      counterfoil train scenes/chan objective.ndgl.guide=guides/ab
    """
    check_inputs(runs)
    for number, run in enumerate(runs):
        if run.resolve() in [other.resolve() for other in runs[:number]]:
            raise ConfigError(f"{run}: named twice; a guide averages different runs")
    from counterfoil.core.tensors.device import choose_device
    from counterfoil.training.guides.build import build_guide
    from counterfoil.training.run_data import shared_train_split

    bars = progress(quiet=as_json)
    split = shared_train_split(runs, cache, bars)
    manifest = build_guide(out, runs, split, form=form, device=choose_device(device), progress=bars)
    _show(out, manifest, as_json)


@guide_app.command()
def show(
    guide: Annotated[Path, typer.Argument(help="Guide folder.")],
    as_json: opt.Json = False,
) -> None:
    """Show the teachers of a guide, its size, and whether it is complete.

    [bold]Example[/]

      counterfoil guide show guides/ab
    """
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
    print_line(
        f"{data.images:,} images ({features} features), {data.captions:,} captions, "
        f"{size / 1e6:,.1f} MB"
    )
