"""The tables and figures that come with the package, and files of one's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from counterfoil.config import merge, read_recipe, read_value
from counterfoil.errors import ConfigError, nearest
from counterfoil.recipes import SUFFIXES
from counterfoil.reproduce.spec import AnyArtefact, build_artefact

TABLES = Path(__file__).parent / "tables"


def names() -> list[str]:
    """Everything that can be reproduced by name; a file that begins with _ is only extended."""
    return sorted(
        (path.stem for path in TABLES.glob("*.yaml") if not path.name.startswith("_")), key=_natural
    )


def load_artefact(name: str) -> AnyArtefact:
    """A table or figure by its name, or from a YAML file."""
    path = Path(name) if name.endswith(SUFFIXES) else TABLES / f"{name}.yaml"
    if path.parent == TABLES and path.stem not in names():
        raise ConfigError(
            f"nothing called '{name}' to reproduce{nearest(name, names())} "
            "(counterfoil reproduce --list shows what there is; a file of your own ends in .yaml)"
        )
    return build_artefact({"name": path.stem, **_read(path)}, str(path))


def _read(path: Path) -> dict[str, Any]:
    """A file whose ``extends`` lies beside it, or is a name or file of the package."""
    try:
        tree = read_value(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return read_recipe(path)  # which says what is wrong
    base = tree.get("extends") if isinstance(tree, dict) else None
    if not isinstance(base, str) or (path.parent / base).exists():
        return read_recipe(path)
    named = TABLES / (base if base.endswith(SUFFIXES) else f"{base}.yaml")
    if not named.is_file():
        return read_recipe(path)  # which says what is missing
    own = {key: value for key, value in tree.items() if key != "extends"}
    return merge(read_recipe(named), own)


def _natural(name: str) -> list[tuple[int, str]]:
    """table2 before table10, figure1b before figure3."""
    found = re.fullmatch(r"(.*?)(\d+)[a-z]?", name)
    return [(0, found[1] if found else name), (int(found[2]) if found else 0, name)]
