"""Two encoded batches to a score matrix; one file per method."""

from counterfoil.matchers.base import Matcher, Observation, matchers
from counterfoil.matchers.bfan import BFAN
from counterfoil.matchers.chamfer import SmoothChamfer
from counterfoil.matchers.chan import CHAN
from counterfoil.matchers.cross_encoder import CrossEncoder
from counterfoil.matchers.embedding import Cosine, Order
from counterfoil.matchers.fragment_matcher import FragmentMatcher, WordParts
from counterfoil.matchers.gsmn import GSMN
from counterfoil.matchers.imram import IMRAM
from counterfoil.matchers.naaf import NAAF
from counterfoil.matchers.naaf_reference import ReferenceNAAF
from counterfoil.matchers.scan import SCAN, SCANI2T, SCANT2I
from counterfoil.matchers.sgraf import SAF, SGR, SGRAF

__all__ = [
    "BFAN", "CHAN", "GSMN", "IMRAM", "NAAF", "SAF", "SCAN", "SCANI2T", "SCANT2I", "SGR", "SGRAF",
    "Cosine", "CrossEncoder", "FragmentMatcher", "Matcher", "Observation", "Order",
    "ReferenceNAAF", "SmoothChamfer", "WordParts", "matchers",
]  # fmt: skip
