"""Fragments or words to the joint space: projections, poolings, recurrent and BERT encoders."""

from counterfoil.encoders import attention_images as _attention_images  # noqa: F401
from counterfoil.encoders import bert as _bert  # noqa: F401 - registers 'bert'
from counterfoil.encoders.encoded import Encoded, Needs, l2_normalise
from counterfoil.encoders.images import ImageEncoder, image_encoders
from counterfoil.encoders.pooling import GPO, poolings
from counterfoil.encoders.texts import text_encoders

__all__ = [
    "GPO",
    "Encoded",
    "ImageEncoder",
    "Needs",
    "image_encoders",
    "l2_normalise",
    "poolings",
    "text_encoders",
]
