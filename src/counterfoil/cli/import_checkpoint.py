"""`counterfoil import`: a public project's checkpoint as a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from counterfoil.cli.output import JSON_OPTION, console, print_json, print_table

if TYPE_CHECKING:
    from counterfoil.models.importers import Imported


def import_(
    checkpoint: Annotated[
        Path, typer.Argument(help="A .pth.tar, .pth or .pt file of that project.")
    ],
    family: Annotated[
        str,
        typer.Option(
            "--from",
            help="Whose file it is: scan, naaf, bfan, sgraf, vse_infty, chan, uniter, tags.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Model folder to write.")],
    vocab: Annotated[
        Path | None,
        typer.Option("--vocab", help="The project's vocabulary (.json, .pkl) or tokenizer."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model that is already in that folder.")
    ] = False,
    as_json: bool = JSON_OPTION,
) -> None:
    """Turn a public project's checkpoint into a model that scores as its authors scored it.

    [bold]Examples[/]

      counterfoil import --from scan model_best.pth.tar --vocab f30k_precomp_vocab.json -o scan
      counterfoil import --from vse_infty model_best.pth --vocab f30k_vocab.json -o vse
      counterfoil import --from uniter model_step_4000.pt --vocab bert-base-cased -o uniter
      counterfoil evaluate scan --data f30k_precomp

    A checkpoint holds a vector for each word but not the words: those are in the project's
    vocabulary file. Without it the model is written all the same, with stand-ins for words, and
    scores nothing but token ids. (CHAN keeps its words in the checkpoint. UNITER and TAGS need the
    tokenizer of bert-base-cased, as a folder or its vocab.txt.)

    A pickle can run code. Nothing in these files is run: tensors, numbers, strings and options are
    read, anything else is refused by name. So are files that would take endless time or memory, and
    weights that are not finite. Exit code 4 means that the file was refused.
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
            f"{out} exists and is not a saved model: choose another folder with --out"
        )
    if not overwrite:
        raise ConfigError(f"{out} already holds a model: --overwrite replaces it")


def _show(imported: Imported, out: Path) -> None:
    found, unknown = imported.as_dict(), "not in the file"
    spec, epoch, rsum = found["spec"], imported.epoch, imported.best_rsum
    rows = [
        ["model", found["model"]],
        ["image encoder", _options(spec["image"])],
        ["text encoder", _options(spec["text"])],
        ["matcher", _options(spec["matcher"])],
        ["fragments → joint space", f"{found['input_dim']:,} → {found['embed_size']:,} numbers"],
        ["parameters", f"{found['parameters']:,}"],
        ["epoch", unknown if epoch is None else str(epoch)],
        ["best RSUM", unknown if rsum is None else f"{rsum:g}"],
        ["words", f"{found['words']:,}, {_origin(imported)}"],
    ]
    print_table([["", str(out)], *rows])
    for warning in imported.warnings:
        console(stderr=True).print(f"[yellow]warning:[/] {warning}", highlight=False)


def _origin(imported: Imported) -> str:
    return f"from {imported.vocabulary}" if imported.vocabulary else "stand-ins"


def _options(part: dict[str, object]) -> str:
    changed = [f"{key}={value}" for key, value in part.items() if key != "name"]
    return f"{part['name']} ({', '.join(changed)})" if changed else str(part["name"])
