"""`counterfoil export`: a trained model as ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from counterfoil.cli import options as opt
from counterfoil.cli.inputs import check_inputs
from counterfoil.cli.output import print_json, print_table


def export(
    run: opt.Run,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")],
    overwrite: opt.Overwrite = False,
    as_json: opt.Json = False,
) -> None:
    """Export a model to ONNX: image encoder, text encoder and scorer.

    [bold]Examples[/]

      counterfoil export runs/demo --out demo-onnx
      counterfoil export runs/naaf --out naaf-onnx --overwrite

    The folder holds image.onnx, text.onnx and scorer.onnx with dynamic batch sizes, regions and
    words, the vocabulary or tokenizer, and export.json: names and shapes of all inputs and outputs,
    and how fragments were made. After the export, ONNX Runtime scores a random batch; the command
    fails if a score differs from PyTorch's by more than 1e-4.

    Cross-encoders (UNITER) and models that read pixels (CLIP, SigLIP) cannot be exported. Needs
    the extra "export": pip install "counterfoil\\[export]".
    """
    check_inputs([run])
    _check_target(out, overwrite)
    from counterfoil.core.storage.atomic import atomic_folder, replacing
    from counterfoil.models.export import export_model
    from counterfoil.training.run_folder import load_model

    model = load_model(run, "cpu")
    with replacing(out, "exporting a model there", "wait for it, or choose another --out"):
        _check_target(out, overwrite)  # another process may have been faster
        with atomic_folder(out) as folder:
            exported = export_model(model, folder)
    if as_json:
        print_json({"run": str(run), "out": str(out), **exported})
        return
    rows = [
        [graph["file"], side.removesuffix("s"), name, ", ".join(axes)]
        for graph in exported["graphs"].values()
        for side in ("inputs", "outputs")
        for name, axes in graph[side].items()
    ]
    print_table([[str(out), "", "name", "axes"], *rows], words=(0, 1, 2, 3))
    typer.echo(f"largest difference from PyTorch's scores: {exported['difference']:.1g}")


def _check_target(out: Path, overwrite: bool) -> None:
    from counterfoil.core.errors import ConfigError

    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / "export.json").is_file():
        raise ConfigError(
            f"{out} exists and is not an exported model: choose another folder with --out"
        )
    if not overwrite:
        raise ConfigError(f"{out} already holds an exported model: --overwrite replaces it")
