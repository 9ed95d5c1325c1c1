"""What a run should say when its objective replaces that of the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from counterfoil.config import RunConfig
from counterfoil.objectives import create_objective
from counterfoil.objectives.composite import PROTECT


def objective_notes(recipe: RunConfig, config: RunConfig) -> list[str]:
    """One line for the options that went with the recipe's terms, one for another reduction.

    An objective is replaced whole, so those of the new one are its defaults. Nothing is said if all
    terms of the recipe are still there.
    """
    before, after = _terms(recipe), _terms(config)
    gone = [name for name in before if name not in after]
    if not gone:
        return []
    lost = [f"{name}.{key}={value}" for name in gone for key, value in before[name].items()]
    new = ", ".join(after)
    ending = f"; no longer in force: {', '.join(lost)}" if lost else ""
    notes = [f"objective {new} replaces the recipe's {', '.join(gone)}{ending}"]
    return [*notes, *_reduction_note(recipe, config)]


def _reduction_note(recipe: RunConfig, config: RunConfig) -> list[str]:
    """Whether the loss is averaged where the recipe's was summed, or the other way round."""
    before, after = _reductions(recipe), _reductions(config)
    if not before or not after or set(before.values()) == set(after.values()):
        return []
    averaged = set(after.values()) == {"mean"}
    verbs = ("averaged", "summed") if averaged else ("summed", "averaged")
    size = f"about {2 * config.train.batch_size} times as {'small' if averaged else 'large'}"
    note = (
        f"the loss is {verbs[0]} over the batch, the recipe's was {verbs[1]}: gradients are {size}"
    )
    clip = config.train.optimiser.clip
    if clip and clip == recipe.train.optimiser.clip:
        often = "hardly ever clips" if averaged else "clips nearly always"
        note += f", and train.optimiser.clip={clip:g}, set beside the recipe's loss, {often}"
    wanted = "sum" if averaged else "mean"
    keys = [f"objective.{name}.reduction={wanted}" for name in after]
    return [f"{note}; to keep the recipe's scale: {' '.join(keys)}"]


def _terms(config: RunConfig) -> dict[str, Mapping[str, Any]]:
    """Options of each term as configured."""
    return {
        name: options if isinstance(options, Mapping) else {}
        for name, options in config.objective.items()
        if name != PROTECT
    }


def _reductions(config: RunConfig) -> dict[str, str]:
    """How each term that can do either adds up its costs."""
    terms = create_objective(config.objective).each()
    return {name: str(term.reduction) for name, term in terms if hasattr(term, "reduction")}
