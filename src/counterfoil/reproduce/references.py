"""How a file refers to runs: one of another seed, its folder, a guide made of several.

| written | is |
| --- | --- |
| ``chan`` | the run of that name, of the seed in hand |
| ``chan@3`` | its fourth seed, whatever the seed in hand (``--seeds`` counts from 0) |
| ``chan@+1`` | the seed after the one in hand |
| ``"{run:chan@+1}"`` in a value | the folder of that run |
| ``"{guide:chan@+1,chan@+2}"`` in a value | the folder of a guide made of these runs |
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

REFERENCE = re.compile(r"\{((?:run|guide):[^}]+)\}")
_SEED = re.compile(r"(\+?)(\d+)")


@dataclass(frozen=True)
class RunReference:
    """A run by its name, and which of its seeds."""

    name: str
    seed: int = 0
    relative: bool = True

    def at(self, seed: int) -> int:
        """The seed that is meant where ``seed`` is in hand."""
        return seed + self.seed if self.relative else self.seed


def run_reference(text: str) -> RunReference:
    """
    >>> run_reference("chan@+2").at(1), run_reference("chan@2").at(1), run_reference("chan").at(1)
    (3, 2, 1)
    """
    name, at, seed = text.strip().partition("@")
    if not at:
        return RunReference(name)
    found = _SEED.fullmatch(seed)
    if found is None or not name:
        raise ValueError(
            f"'{text.strip()}': a run of another seed is written {name or 'name'}@0 (the first of "
            f"its seeds) or {name or 'name'}@+1 (the one after the seed in hand)"
        )
    return RunReference(name, int(found[2]), relative=bool(found[1]))


def references(value: Any) -> list[str]:
    """Every ``run:…`` and ``guide:…`` in braces anywhere in a tree, each once."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return list(dict.fromkeys(found for item in value for found in references(item)))
    return list(dict.fromkeys(REFERENCE.findall(value))) if isinstance(value, str) else []


def replace_references(value: Any, to: Callable[[str], str]) -> Any:
    """The tree with what each reference stands for in its place."""
    if isinstance(value, dict):
        return {key: replace_references(item, to) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_references(item, to) for item in value]
    return REFERENCE.sub(lambda m: to(m[1]), value) if isinstance(value, str) else value
