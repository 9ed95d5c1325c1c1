"""Pixels to fragments: regions with boxes and descriptors, kept on disk."""

from counterfoil.features.backbone import Backbone
from counterfoil.features.crops import Crops
from counterfoil.features.efficientnet_lite import EfficientNetLiteFeatures
from counterfoil.features.extract import with_fragments
from counterfoil.features.extractors import Extractor, extractors, full_name
from counterfoil.features.onnx_models import OnnxFeatures
from counterfoil.features.segments import Segments
from counterfoil.features.vision_models import TransformersFeatures

__all__ = [
    "Backbone",
    "Crops",
    "EfficientNetLiteFeatures",
    "Extractor",
    "OnnxFeatures",
    "Segments",
    "TransformersFeatures",
    "extractors",
    "full_name",
    "with_fragments",
]
