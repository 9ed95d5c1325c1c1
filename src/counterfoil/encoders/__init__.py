"""Encoders of image fragments and of words: projections, poolings, GRUs, BERT, CLIP."""

from counterfoil.encoders import bert as _bert  # noqa: F401
from counterfoil.encoders import dive as _dive  # noqa: F401
from counterfoil.encoders import dual as _dual  # noqa: F401
from counterfoil.encoders import uniter as _uniter  # noqa: F401
from counterfoil.encoders import vsrn as _vsrn  # noqa: F401
from counterfoil.encoders.encoded import Encoded, Needs, l2_normalize
from counterfoil.encoders.images import ImageEncoder, image_encoders
from counterfoil.encoders.pooling import GPO, poolings
from counterfoil.encoders.texts import text_encoders

__all__ = [
    "GPO",
    "Encoded",
    "ImageEncoder",
    "Needs",
    "image_encoders",
    "l2_normalize",
    "poolings",
    "text_encoders",
]
