"""`counterfoil import`: a public project's checkpoint as a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import counterfoil.cli.options as opt
from counterfoil.cli.output import console, print_json, print_table

if TYPE_CHECKING:
    from counterfoil.models.importers import Imported


def import_(
    checkpoint: Annotated[
        Path, typer.Argument(help="Checkpoint file of the project (.pth.tar, .pth, .pt).")
    ],
    family: Annotated[
        str,
        typer.Option(
            "--from",
            help="Project that wrote the file: scan, naaf, bfan, sgraf, vse_infty, chan, uniter "
            "or tags.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Model folder to write.")],
    vocab: Annotated[
        Path | None,
        typer.Option(
            "--vocab", help="The project's vocabulary file (.json, .pkl) or BERT tokenizer folder."
        ),
    ] = None,
    overwrite: opt.Overwrite = False,
    as_json: opt.Json = False,
) -> None:
    """Convert a public project's checkpoint; the model gives the scores of the original code.

    Most checkpoints store a vector per word but not the words: pass the project's vocabulary with
    --vocab. Without it, the model is written with placeholder words and can score token ids only.
    CHAN stores its words in the checkpoint. UNITER and TAGS need the tokenizer of bert-base-cased
    (its folder or vocab.txt).

    Pickles are read without running code: tensors, numbers, strings and options are accepted,
    anything else is refused by name, as are weights that are not finite and files that would take
    unbounded time or memory. Exit code 4: the file was refused.

    [bold]Examples[/]

      counterfoil import --from scan model_best.pth.tar \\
        --vocab f30k_precomp_vocab.json -o scan
      counterfoil import --from vse_infty model_best.pth \\
        --vocab f30k_vocab.json -o vse
      counterfoil import --from uniter model_step_4000.pt \\
        --vocab bert-base-cased -o uniter
      counterfoil evaluate scan --data f30k_precomp
    """
    from counterfoil.core.storage.atomic import replacing
    from counterfoil.models import save_pretrained
    from counterfoil.models.importers import import_checkpoint

    with replacing(out, "importing a model there", "wait for it, or choose another --out"):
        _check_target(out, overwrite)
        imported = import_checkpoint(checkpoint, family, vocab)
        save_pretrained(imported.model, out)
    if as_json:
        print_json({"checkpoint": str(checkpoint), "out": str(out), **imported.as_dict()})
        return
    _show(imported, out)


def _check_target(out: Path, overwrite: bool) -> None:
    from counterfoil.core.errors import ConfigError

    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / "config.json").is_file() or not (out / "model.safetensors").is_file():
        raise ConfigError(
            f"{out}: not empty and not a saved model; choose another folder with --out"
        )
    if not overwrite:
        raise ConfigError(f"{out}: already holds a model; --overwrite replaces it")


def _show(imported: Imported, out: Path) -> None:
    summary, unknown = imported.as_dict(), "not in the file"
    spec, epoch, rsum = summary["spec"], imported.epoch, imported.best_rsum
    rows = [
        ["model", summary["model"]],
        ["image encoder", _options(spec["image"])],
        ["text encoder", _options(spec["text"])],
        ["matcher", _options(spec["matcher"])],
        [
            "fragments → joint space",
            f"{summary['input_dim']:,} → {summary['embed_size']:,} numbers",
        ],
        ["parameters", f"{summary['parameters']:,}"],
        ["epoch", unknown if epoch is None else str(epoch)],
        ["best RSUM", unknown if rsum is None else f"{rsum:g}"],
        ["words", f"{summary['words']:,}, {_origin(imported)}"],
    ]
    print_table([["", str(out)], *rows])
    for warning in imported.warnings:
        console(stderr=True).print(f"[yellow]warning:[/] {warning}", highlight=False)


def _origin(imported: Imported) -> str:
    return f"from {imported.vocabulary}" if imported.vocabulary else "placeholders"


def _options(part: dict[str, object]) -> str:
    changed = [f"{key}={value}" for key, value in part.items() if key != "name"]
    return f"{part['name']} ({', '.join(changed)})" if changed else str(part["name"])
