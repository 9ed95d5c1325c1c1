"""A score matrix to a loss; one file per idea."""

from counterfoil.objectives import (  # noqa: F401 - each registers its objectives
    alignment,
    captioning,
    contrastive,
    counterfactual,
    distance,
    diversity,
    foils,
    guided,
    hard_candidates,
    lseh,
    masked_words,
    meta,
    noisy,
    offline,
    polynomial,
    relations,
    sel,
    selhn,
    semihard,
    tags,
    triplet,
)
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
