"""A score matrix to a loss; one file per idea."""

from counterfoil.objectives.alignment import Alignment
from counterfoil.objectives.aoq import AOQ
from counterfoil.objectives.base import (
    Anchors,
    Context,
    LossReport,
    Objective,
    both_directions,
    objectives,
)
from counterfoil.objectives.captioning import Captioning
from counterfoil.objectives.ce_clip import CECLIP
from counterfoil.objectives.cfm import CFM
from counterfoil.objectives.composite import Composite, create_objective
from counterfoil.objectives.contrastive import InfoNCE, SigLIP
from counterfoil.objectives.distance_weighted import DistanceWeighted
from counterfoil.objectives.dive import MMD, Uniformity
from counterfoil.objectives.foils import VSEC, FoilObjective
from counterfoil.objectives.fsc_clip import FSCCLIP
from counterfoil.objectives.hard_candidates import HardCandidates
from counterfoil.objectives.hrem import HREM
from counterfoil.objectives.lseh import LSEH
from counterfoil.objectives.meta_spn import MetaSPN
from counterfoil.objectives.ncr import NCR
from counterfoil.objectives.ndgl import NDGL
from counterfoil.objectives.negclip import NegCLIP, SigLIPFoils
from counterfoil.objectives.sel import SEL
from counterfoil.objectives.selhn import SelHN
from counterfoil.objectives.shn_sct import SCT, SHN
from counterfoil.objectives.ssp import SSP
from counterfoil.objectives.tags import MLM, TAGS, TAGSDC
from counterfoil.objectives.triplet import HardestNegative, Triplet
from counterfoil.objectives.triplet_clip import TripletCLIP

__all__ = [
    "AOQ", "CECLIP", "CFM", "FSCCLIP", "HREM", "LSEH", "MLM", "MMD", "NCR", "NDGL", "SCT", "SEL",
    "SHN", "SSP", "TAGS", "TAGSDC", "VSEC", "Alignment", "Anchors", "Captioning", "Composite",
    "Context", "DistanceWeighted", "FoilObjective", "HardCandidates", "HardestNegative", "InfoNCE",
    "LossReport", "MetaSPN", "NegCLIP", "Objective", "SelHN", "SigLIP", "SigLIPFoils", "Triplet",
    "TripletCLIP", "Uniformity", "both_directions", "create_objective", "objectives",
]  # fmt: skip
