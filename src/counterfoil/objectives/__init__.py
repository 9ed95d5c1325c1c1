"""A score matrix to a loss; one file per idea."""

from counterfoil.objectives import triplet as _triplet  # noqa: F401 - registers its objectives
from counterfoil.objectives.base import (
    Anchors,
    Context,
    LossReport,
    Objective,
    both_directions,
    objectives,
)
from counterfoil.objectives.composite import Composite, create_objective

__all__ = [
    "Anchors",
    "Composite",
    "Context",
    "LossReport",
    "Objective",
    "both_directions",
    "create_objective",
    "objectives",
]
