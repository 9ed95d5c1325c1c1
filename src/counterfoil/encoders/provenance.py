"""Which parameters came from pretrained weights, and what could not be loaded.

A module that loads pretrained weights has an attribute ``pretrained``: the names of the parameters
that it loaded, relative to itself, or True if it loaded all of them. The optimizer gives exactly
these their own learning rate. ``loading_notes`` is what a user should know about the loading.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn


def pretrained_names(module: nn.Module) -> frozenset[str]:
    """Full names of all parameters of a module that came from pretrained weights.

    >>> layer = nn.Linear(2, 2)
    >>> layer.pretrained = frozenset({"weight"})
    >>> sorted(pretrained_names(nn.Sequential(layer, nn.Linear(2, 2))))
    ['0.weight']
    """
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        for name in _own_names(part)
    )


def pretrained_ids(module: nn.Module) -> set[int]:
    """Identities of those parameters."""
    identities = set()
    for part in module.modules():
        own = set(_own_names(part))
        identities |= {id(parameter) for name, parameter in part.named_parameters() if name in own}
    return identities


def _own_names(part: nn.Module) -> Iterator[str]:
    loaded: Collection[str] | bool = getattr(part, "pretrained", False)
    if not loaded:
        return
    for name, _ in part.named_parameters():
        if loaded is True or name in loaded:
            yield name


def names_of(module: nn.Module, parameters: Collection[int]) -> frozenset[str]:
    """Names of the parameters of a module that are among some identities."""
    return frozenset(name for name, p in module.named_parameters() if id(p) in parameters)


def loaded_ids(model: nn.Module, report: dict[str, Any]) -> set[int]:
    """Identities of the parameters that `transformers` found in a checkpoint, by its report.

    What a checkpoint lacks, `transformers` fills with random numbers.
    """
    missing = not_loaded(report)
    # of a tied weight, one name in the checkpoint is enough
    named = model.named_parameters(remove_duplicate=False)
    return {id(parameter) for name, parameter in named if name not in missing}


def not_loaded(report: dict[str, Any]) -> set[str]:
    """Weights that a checkpoint lacks or has in another shape."""
    mismatched = {key if isinstance(key, str) else key[0] for key in report["mismatched_keys"]}
    return set(report["missing_keys"]) | mismatched


def loading_notes(module: nn.Module) -> list[str]:
    """What is worth knowing of the loading of all parts of a module, each once."""
    notes = (note for part in module.modules() for note in getattr(part, "loading_notes", ()))
    return list(dict.fromkeys(notes))
