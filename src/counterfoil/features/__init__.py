"""Pixels to fragments: regions with boxes and descriptors, kept on disk."""

from counterfoil.features.extract import with_fragments
from counterfoil.features.extractors import Extractor, extractors
from counterfoil.features.segments import Segments

__all__ = ["Extractor", "Segments", "extractors", "with_fragments"]
