"""A score matrix to a loss; one file per idea."""

from counterfoil.objectives import (
    alignment,  # noqa: F401
    captioning,  # noqa: F401
    contrastive,  # noqa: F401
    foils,  # noqa: F401
    hard_candidates,  # noqa: F401
    lseh,  # noqa: F401
    sel,  # noqa: F401
    selhn,  # noqa: F401
    tags,  # noqa: F401
    triplet,  # noqa: F401
)
from counterfoil.objectives import aoq as offline  # noqa: F401
from counterfoil.objectives import cfm as counterfactual  # noqa: F401
from counterfoil.objectives import distance_weighted as distance  # noqa: F401
from counterfoil.objectives import dive as diversity  # noqa: F401
from counterfoil.objectives import hrem as relations  # noqa: F401
from counterfoil.objectives import meta_spn as meta  # noqa: F401
from counterfoil.objectives import ncr as noisy  # noqa: F401
from counterfoil.objectives import ndgl as guided  # noqa: F401
from counterfoil.objectives import shn_sct as semihard  # noqa: F401
from counterfoil.objectives import ssp as polynomial  # noqa: F401
from counterfoil.objectives import tags as masked_words  # noqa: F401
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
