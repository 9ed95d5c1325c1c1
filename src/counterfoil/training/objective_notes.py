"""What a run should say when its objective replaces that of the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from counterfoil.core.config import RunConfig
from counterfoil.objectives import create_objective, objectives
from counterfoil.objectives.composite import PROTECT
from counterfoil.objectives.protection import protections

VERBS = {"mean": "averaged", "sum": "summed"}


def objective_notes(recipe: RunConfig, config: RunConfig) -> list[str]:
    """One line for options of the recipe that are no longer set, one for another reduction.

    An objective is replaced whole, so options that the new one does not state have their defaults.
    """
    return [*_replacement_note(recipe, config), *_reduction_note(recipe, config)]


def _replacement_note(recipe: RunConfig, config: RunConfig) -> list[str]:
    """Which terms of the recipe are gone, and which options went, also of terms that stayed."""
    before, after = _options(recipe), _options(config)
    gone = [name for name in before if name not in after and name != PROTECT]
    lost = [
        f"{name}.{key}={value}"
        for name, options in before.items()
        for key, value in options.items()
        if key not in after.get(name, {}) and not (name in after and _is_default(name, key, value))
    ]
    if not gone and not lost:
        return []
    replaced = gone or [name for name in before if name != PROTECT]
    new = ", ".join(name for name in after if name != PROTECT)
    ending = f"; no longer in force: {', '.join(lost)}" if lost else ""
    return [f"objective {new} replaces the recipe's {', '.join(replaced)}{ending}"]


def _reduction_note(recipe: RunConfig, config: RunConfig) -> list[str]:
    """Which terms are averaged although the recipe's were summed, or the other way round."""
    before, after = set(_reductions(recipe).values()), _reductions(config)
    if len(before) != 1:  # no single scale that a new term could keep
        return []
    [wanted] = before
    changed = [name for name, reduction in after.items() if reduction != wanted]
    if not changed:
        return []
    advice = " ".join(f"objective.{name}.reduction={wanted}" for name in changed)
    if len(changed) < len(after):
        terms = ", ".join(f"{name} is {VERBS[reduction]}" for name, reduction in after.items())
        note = f"{terms} over the batch; the recipe's loss was {VERBS[wanted]}"
    else:
        note = _scale_note(recipe, config, wanted)
    return [f"{note}; to keep the recipe's scale: {advice}"]


def _scale_note(recipe: RunConfig, config: RunConfig, wanted: str) -> str:
    """By how much gradients change if every term has the other reduction."""
    averaged = wanted == "sum"
    new, old = ("averaged", "summed") if averaged else ("summed", "averaged")
    size = f"about {2 * config.train.batch_size} times as {'small' if averaged else 'large'}"
    note = f"the loss is {new} over the batch, the recipe's was {old}: gradients are {size}"
    clip = config.train.optimizer.clip
    if clip and clip == recipe.train.optimizer.clip:
        often = "hardly ever clips" if averaged else "clips nearly always"
        note += f", and train.optimizer.clip={clip:g}, set beside the recipe's loss, {often}"
    return note


def _options(config: RunConfig) -> dict[str, Mapping[str, Any]]:
    """Options of each term, and of ``protect``, as configured; a bare number is the weight."""
    return {
        name: options if isinstance(options, Mapping) else _weight(options)
        for name, options in config.objective.items()
    }


def _weight(given: float | None) -> dict[str, float]:
    return {} if given is None or given == 1 else {"weight": given}


def _is_default(name: str, key: str, value: Any) -> bool:
    """Whether a term has this value of an option without stating it."""
    options = protections.options(name) if name == PROTECT else objectives.options(name)
    return bool(({"weight": 1.0, "epochs": None} | options)[key] == value)


def _reductions(config: RunConfig) -> dict[str, str]:
    """Reduction of each term that has one."""
    terms = create_objective(config.objective).each()
    return {name: str(term.reduction) for name, term in terms if hasattr(term, "reduction")}
