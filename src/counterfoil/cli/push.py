"""`counterfoil push`: a run or a saved model to the Hugging Face hub, with its card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import counterfoil.cli.options as opt
from counterfoil.cli.inputs import check_inputs
from counterfoil.cli.output import print_json, print_line
from counterfoil.core.errors import ConfigError
from counterfoil.core.storage.reading import MIB, read_text


def push(
    run: opt.Run,
    name: Annotated[str, typer.Argument(help="Model on the hub to create or update: owner/name.")],
    card: Annotated[
        Path | None,
        typer.Option(
            help="Markdown file to use as the model card. Default: the card on the hub stays as "
            "it is; a new model gets README.md of RUN, or a plain card."
        ),
    ] = None,
    half: Annotated[
        bool, typer.Option("--half", help="Store weights in half precision, in half the space.")
    ] = False,
    private: Annotated[
        bool | None,
        typer.Option(
            "--private/--public", help="Who can see a new model. Default: as the hub decides."
        ),
    ] = None,
    message: Annotated[
        str, typer.Option("--message", "-m", help="Commit message.")
    ] = "Push a model with Counterfoil",
    as_json: opt.Json = False,
) -> None:
    """Push a model to the Hugging Face hub; others load it as hf://owner/name.

    Needs the extra "hub", and a login there: hf auth login.

    [bold]Example[/]

      counterfoil push runs/scenes-naaf me/scenes-naaf --half --private
      counterfoil explain hf://me/scenes-naaf photo.jpg "a dog on a beach"
    """
    check_inputs([run])
    try:
        text = read_text(card, MIB) if card is not None else None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--card {card}: cannot be read ({error})") from None
    from counterfoil.core.hub import hub_library
    from counterfoil.models.publish import push_to_hub
    from counterfoil.training.run_folder import load_model

    hub_library()  # refuses a missing extra before a model is loaded
    model = load_model(run, "cpu")
    url = push_to_hub(
        model, name, card=text, source=run, half=half, private=private, message=message
    )
    if as_json:
        print_json({"model": f"hf://{name.removeprefix('hf://')}", "commit": url})
    else:
        print_line(f"pushed: {url}")
        print_line(f"load it with: counterfoil explain hf://{name.removeprefix('hf://')} …")
