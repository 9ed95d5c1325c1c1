"""Feature extraction: from images to fragments with boxes, cached on disk."""

from counterfoil.features.combine import Crops, Joined
from counterfoil.features.efficientnet import EfficientNetLiteFeatures
from counterfoil.features.extract import with_fragments
from counterfoil.features.extractors import Backbone, Extractor, extractors, full_name
from counterfoil.features.onnx_models import OnnxFeatures
from counterfoil.features.pixels import Pixels
from counterfoil.features.segments import Segments
from counterfoil.features.timm_models import TimmFeatures
from counterfoil.features.transformers_models import TransformersFeatures

__all__ = [
    "Backbone",
    "Crops",
    "EfficientNetLiteFeatures",
    "Extractor",
    "Joined",
    "OnnxFeatures",
    "Pixels",
    "Segments",
    "TimmFeatures",
    "TransformersFeatures",
    "extractors",
    "full_name",
    "with_fragments",
]
