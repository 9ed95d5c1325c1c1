"""`counterfoil recipes`: list, show and copy the recipes that come with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import counterfoil.cli.options as opt
from counterfoil.cli.output import print_json, print_list
from counterfoil.core.errors import ConfigError
from counterfoil.core.recipes import (
    FOLDER,
    find_recipe,
    matching_names,
    recipe_names,
    suggest_recipes,
)


def complete_recipe(incomplete: str) -> list[str]:
    """Recipe names and YAML files with this prefix, for shell completion."""
    names = [name for name in recipe_names() if name.startswith(incomplete)]
    folder = Path(incomplete if incomplete.endswith("/") else Path(incomplete).parent)
    files = sorted(str(path) for path in folder.glob("*.y*ml"))
    return names + [file for file in files if file.startswith(incomplete)]


class ListByDefault(TyperGroup):
    """`counterfoil recipes [PATTERN]` is short for `counterfoil recipes list [PATTERN]`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        wants_group = bool(args) and (args[0] in self.commands or args[0] in ("-h", "--help"))
        if not wants_group and not ctx.resilient_parsing:  # which is what completion does
            args = ["list", *args]
        return super().parse_args(ctx, args)


recipes_app = typer.Typer(
    cls=ListByDefault,
    help="List, show or copy the recipes of `counterfoil train`: counterfoil recipes 'scenes/*'",
    rich_markup_mode="rich",
)

NAME = typer.Argument(help="Name of a recipe, such as scenes/naaf.", autocompletion=complete_recipe)


@recipes_app.command("list")
def list_recipes(
    pattern: Annotated[
        str, typer.Argument(help="Names to list, with wildcards: 'scenes/rvse*', coco, 'tags*'.")
    ] = "*",
    as_json: opt.Json = False,
) -> None:
    """List recipes: name, model, objective and data of each.

    A recipe is named DATA/METHOD. A pattern may match the whole name or either half of it.

    [bold]Examples[/]

      counterfoil recipes
      counterfoil recipes 'scenes/rvse*'
      counterfoil recipes naaf --json
    """
    names = matching_names(pattern)
    if not names:
        raise ConfigError(
            f"'{pattern}': no recipe has such a name{suggest_recipes(Path(pattern))} "
            "(counterfoil recipes lists them all)"
        )
    rows = [_described(name) for name in names]
    if as_json:
        print_json(rows)
        return
    columns = ("name", "model", "objective", "data")
    print_list(columns, [[row[column] for column in columns] for row in rows])


@recipes_app.command()
def show(name: Annotated[str, NAME]) -> None:
    """Print a recipe as it is written; `counterfoil train NAME --show-config` adds the defaults.

    [bold]Examples[/]

      counterfoil recipes show scenes/naaf
      counterfoil train scenes/naaf --show-config
    """
    typer.echo(_file_of(name).read_text(encoding="utf-8"), nl=False)


@recipes_app.command()
def copy(
    name: Annotated[str, NAME],
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[DEST]",
            help="File or folder (a new one ends with /). Default: the current folder.",
        ),
    ] = None,
    overwrite: opt.Overwrite = False,
) -> None:
    """Copy a recipe so that you can edit it; recipes it extends are still found in the package.

    [bold]Examples[/]

      counterfoil recipes copy scenes/naaf
      counterfoil recipes copy scenes/naaf mine.yaml
      counterfoil train mine.yaml
    """
    source = _file_of(name)
    file = Path(target or "")
    if file.is_dir() or (target or "").endswith("/"):
        file = file / source.name
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"{file}: its folder cannot be made: a file has that name") from None
    try:
        with file.open("wb" if overwrite else "xb") as stream:
            stream.write(source.read_bytes())
    except FileExistsError:
        raise ConfigError(
            f"{file}: already exists; name another file, or replace it with --overwrite"
        ) from None
    typer.echo(f"{file}: a copy of {name}; train with: counterfoil train {file}")


def _file_of(name: str) -> Path:
    path = find_recipe(Path(name))
    if not path.is_relative_to(FOLDER):
        hint = suggest_recipes(Path(name))
        raise ConfigError(f"'{name}': no such recipe{hint} (counterfoil recipes lists them)")
    return path


def _described(name: str) -> dict[str, str]:
    """A row of the list; the summary is the first line of the recipe's comment."""
    from counterfoil.core.config import load_config

    config = load_config(name)
    text = find_recipe(Path(name)).read_text(encoding="utf-8")
    comment = text.partition("\n")[0].removeprefix("# ")
    return {
        "name": name,
        "model": config.model.name,
        "objective": " + ".join(config.objective),
        "data": config.data.source,
        "summary": comment,
    }
